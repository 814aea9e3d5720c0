"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PAGE_SIZE = 20;
  const SCALES = {
    logprobs: { text: "log-prob", low: -5, high: 0, color: (x) => [220, 60, 40, 0.75 * (1 - x)] },
    entropy: { text: "entropy", low: 0, high: 3, color: (x) => [230, 120, 0, 0.75 * x] },
    mismatch: { text: "policy minus engine", low: -0.5, high: 0.5,
      color: (x) => (x < 0.5 ? [200, 40, 90, 1.5 * (0.5 - x)] : [30, 100, 200, 1.5 * (x - 0.5)]) },
    loss_mask: { text: "in the loss", low: 0, high: 1, color: (x) => [40, 150, 70, 0.45 * x] },
  };
  const state = { page: 0, rows: [] };
  const at = (id) => document.getElementById(id);

  function add(parent, tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  function addTable(parent, heads, rows) {
    const table = add(parent, "table");
    const head = add(table, "tr");
    heads.forEach((text) => add(head, "th", text));
    for (const row of rows) {
      const line = add(table, "tr");
      row.forEach((text) => add(line, "td", text));
    }
  }

  function draw(place, figures, absent) {
    if (!figures.length) add(place, "p", absent, "note");
    for (const figure of figures) {
      const options = { displaylogo: false, responsive: true };
      Plotly.newPlot(add(place, "div", undefined, "figure"), figure.data, figure.layout, options);
    }
  }

  function shade(name, value) {
    const scale = SCALES[name];
    if (!scale || value === null || value === undefined) return "";
    const share = Math.min(1, Math.max(0, (value - scale.low) / (scale.high - scale.low)));
    return `rgba(${scale.color(share).join(",")})`;
  }

  function number(value, digits = 3) {
    return value === null || value === undefined ? "none" : String(Number(value.toFixed(digits)));
  }

  function showLegend() {
    const name = at("color").value;
    const scale = SCALES[name];
    at("legend").replaceChildren();
    if (!scale) return;
    add(at("legend"), "span", `${scale.text}: ${scale.low}`);
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      add(at("legend"), "i").style.backgroundColor = shade(name, scale.low + share * (scale.high - scale.low));
    }
    add(at("legend"), "span", `${scale.high}`);
  }

  function showTokens(place, tokens, start = 0, stop = tokens.pieces.length) {
    const name = at("color").value;
    tokens.pieces.slice(start, stop).forEach((piece, index) => {
      const i = start + index;
      const bare = piece === "";
      const token = add(place, "span", bare ? "\u00b7" : piece, bare ? "token bare" : "token");
      token.classList.toggle("masked", tokens.loss_mask[i] === 0);
      token.style.backgroundColor = shade(name, name && tokens[name][i]);
      token.title = `log-prob ${number(tokens.logprobs[i])}, entropy ${number(tokens.entropy[i])}, mismatch ` +
        `${number(tokens.mismatch[i], 4)}, loss mask ${number(tokens.loss_mask[i])}` +
        (bare ? "; part of a character" : "");
    });
  }

  function showFacts(place, entries) {
    const facts = add(place, "div", undefined, "facts");
    for (const [name, value] of entries) {
      add(facts, "span", `${name} `);
      add(facts, "b", `${value}  `);
    }
  }

  function addReply(place, text, summary, length) {
    if (length <= 300) return add(place, "div", text, "reply"); // characters, or tokens
    const reply = add(place, "details", undefined, "reply");
    add(reply, "summary", `${summary} \u2026`);
    return add(reply, "div", text);
  }

  function showTurn(place, turn, following, tokens) {
    showFacts(place, turn.facts);
    const said = add(place, "div", tokens ? undefined : turn.text, "completion");
    const showReply = (text) => addReply(place, text, text.split("\n")[0].slice(0, 100), text.length);
    if (!tokens) return turn.replies.forEach(showReply);
    const stop = turn.start + turn.length;
    const length = following ? following.start - stop : 0;
    showTokens(said, tokens, turn.start, stop);
    if (length) showTokens(addReply(place, undefined, `${length} tokens of the reply`, length), tokens, stop, stop + length);
  }

  function showCompletion(row) {
    const article = add(at("list"), "article");
    const several = data.runs.length > 1 ? { run: data.runs[row.run].name } : {};
    const values = { ...several, step: row.step, reward: number(row.reward), advantage: number(row.advantage),
      length: number(row.length), finish: row.finish };
    showFacts(article, [...Object.entries(values), ...row.facts]);
    add(article, "div", data.runs[row.run].prompts[row.prompt], "prompt");
    if (typeof row.completion !== "string") {
      row.completion.forEach((turn, i) =>
        showTurn(add(article, "div", undefined, "turn"), turn, row.completion[i + 1], row.tokens));
      return;
    }
    const completion = add(article, "div", row.tokens ? undefined : row.completion, "completion");
    if (row.tokens) showTokens(completion, row.tokens);
  }

  function showPage() {
    const pages = Math.max(1, Math.ceil(state.rows.length / PAGE_SIZE));
    state.page = Math.min(pages - 1, Math.max(0, state.page));
    at("found").textContent = `${state.rows.length} completions, page ${state.page + 1} of ${pages}`;
    at("previous").disabled = state.page === 0;
    at("next").disabled = state.page === pages - 1;
    at("list").replaceChildren();
    const start = state.page * PAGE_SIZE;
    state.rows.slice(start, start + PAGE_SIZE).forEach(showCompletion);
  }

  function contains(row, text) {
    const texts = [row.completion].flat().flatMap((each) => (each.replies ? [each.text, ...each.replies] : each));
    row.searched ??= [data.runs[row.run].prompts[row.prompt], ...texts].join("\n").toLowerCase();
    return row.searched.includes(text);
  }

  function select() {
    const text = at("search").value.toLowerCase();
    const run = at("run").value;
    const key = at("sort").value;
    const direction = at("descending").checked ? -1 : 1;
    state.rows = all.filter((row) => (run === "" || row.run === Number(run)) &&
      (!at("valued").checked || row.tokens) && (text === "" || contains(row, text)));
    // Completions without that number come last in both directions; equal ones keep their order.
    state.rows.sort((a, b) => {
      if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null);
      return direction * (a[key] - b[key]);
    });
    state.page = 0;
    showPage();
  }

  function showBrowser() {
    at("browser").hidden = all.length === 0;
    add(at("run"), "option", "all").value = "";
    data.runs.forEach((run, i) => { add(at("run"), "option", run.name).value = i; });
    let typed;
    at("search").addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(select, 150); });
    for (const id of ["run", "sort", "descending", "valued"]) at(id).addEventListener("change", select);
    at("color").addEventListener("change", () => { showLegend(); showPage(); });
    at("previous").addEventListener("click", () => { state.page -= 1; showPage(); });
    at("next").addEventListener("click", () => { state.page += 1; showPage(); });
    showLegend();
    select();
  }

  const all = data.runs.flatMap((run, i) => run.completions.map((row) => ({ ...row, run: i })));
  at("runs").textContent = data.runs.map((run) => run.summary).join(" ");
  at("sampled").textContent = data.runs.map((run) => run.sampled).join(" ");
  draw(at("curves"), data.curves, "The journal has no steps.");
  draw(at("phases"), data.phases, "The journal has no times and no memory.");
  at("more").hidden = data.others.length === 0;
  at("more").addEventListener("toggle", () => draw(at("others"), data.others, ""), { once: true });
  for (const run of data.runs.filter((each) => each.phases.length)) {
    add(at("tables"), "h3", run.name);
    addTable(at("tables"), data.phase_columns, run.phases);
  }
  const events = data.runs.flatMap((run) => run.events.map((e) => [run.name, e.step, e.time, e.event, e.details]));
  if (events.length) addTable(at("events"), ["run", "step", "time", "event", "details"], events);
  else add(at("events"), "p", "No run was resumed, and no engine was lost.", "note");
  showBrowser();
})();
