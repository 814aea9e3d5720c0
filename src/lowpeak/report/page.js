"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PAGE_SIZES = { groups: 10, completions: 20 };
  const CONTROLS = ["axis", "smoothing", "view", "run", "sort", "step-from", "step-to", "reward-from", "reward-to", "descending",
    "valued", "color", "search"];
  const SCALES = {
    logprobs: { text: "log-prob", low: -5, high: 0, color: (x) => [220, 60, 40, 0.75 * (1 - x)] },
    entropy: { text: "entropy", low: 0, high: 3, color: (x) => [230, 120, 0, 0.75 * x] },
    mismatch: { text: "policy minus engine", low: -0.5, high: 0.5,
      color: (x) => (x < 0.5 ? [200, 40, 90, 1.5 * (0.5 - x)] : [30, 100, 200, 1.5 * (x - 0.5)]) },
    loss_mask: { text: "in the loss", low: 0, high: 1, color: (x) => [40, 150, 70, 0.45 * x] },
  };
  const state = { page: 0, rows: [], matching: new Set() };
  const drawn = [];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const at = (id) => document.getElementById(id);

  function add(parent, tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  function addTable(parent, heads, rows, differs = () => false) {
    const table = add(add(parent, "div", undefined, "table"), "table");
    const used = heads.map((_, column) => column === 0 || rows.some((row) => row[column] !== ""));
    const addCells = (line, tag, texts) => texts.forEach((text, column) => used[column] && add(line, text ? tag : "td", text));
    if (heads.some((text) => text)) addCells(add(table, "tr"), "th", heads);
    for (const row of rows) addCells(add(table, "tr", undefined, differs(row) ? "differs" : ""), "td", row);
  }

  function position(run, step) { // of a step on the chosen axis
    const axes = data.runs[run].axes;
    const axis = at("axis").value;
    if (axis === "step") return step;
    let [low, high] = [0, axes.step.length]; // steps ascend: find the first one after it
    while (low < high) {
      const middle = (low + high) >> 1;
      if (axes.step[middle] > step) high = middle; else low = middle + 1;
    }
    return low ? axes[axis][low - 1] : 0;
  }

  function smoothed(values, weight) { // an exponential mean without the bias of its start
    let sum = 0, total = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + 1 - weight;
      return sum / total;
    });
  }

  function traces(figure, weight) {
    return figure.data.flatMap((trace) => {
      const moved = { ...trace, x: trace.x.map((step) => position(trace.meta, step)), legendgroup: trace.name };
      if (!weight || trace.y.length < 20) return [moved]; // such as evaluations
      const raw = { ...moved, opacity: 0.25, showlegend: false, hoverinfo: "skip" };
      return [raw, { ...moved, y: smoothed(trace.y, weight) }];
    });
  }

  function layout(figure) {
    const [text, line, clear] = [dark.matches ? "#e6e8eb" : "#1a1a1a", dark.matches ? "#333941" : "#e4e6ea", "rgba(0,0,0,0)"];
    const { xaxis, yaxis } = figure.layout;
    const title = { ...xaxis.title, text: at("axis").selectedOptions[0].textContent };
    return { ...figure.layout, paper_bgcolor: clear, plot_bgcolor: clear, font: { color: text }, modebar: { color: text, bgcolor: clear },
      xaxis: { ...xaxis, title, gridcolor: line, zerolinecolor: line }, yaxis: { ...yaxis, gridcolor: line, zerolinecolor: line },
      shapes: (figure.layout.shapes ?? []).map((shape) => {
        const x = position(Number(shape.name), shape.x0);
        return { ...shape, x0: x, x1: x };
      }) };
  }

  function redraw() {
    for (const { element, figure, smooths } of drawn) {
      const weight = smooths ? Number(at("smoothing").value) : 0;
      Plotly.react(element, traces(figure, weight), layout(figure), { displaylogo: false, responsive: true });
    }
  }

  function draw(place, figures, absent, smooths = true) {
    if (!figures.length) add(place, "p", absent, "note");
    for (const figure of figures) {
      const element = add(place, "div", undefined, "figure");
      element.setAttribute("role", "figure");
      element.setAttribute("aria-label", figure.layout.title.text);
      drawn.push({ element, figure, smooths });
    }
    redraw();
  }

  function shade(name, value) {
    const scale = SCALES[name];
    if (!scale || value === null || value === undefined) return "";
    const share = Math.min(1, Math.max(0, (value - scale.low) / (scale.high - scale.low)));
    return `rgba(${scale.color(share).join(",")})`;
  }

  function number(value) {
    if (value === null || value === undefined) return "none";
    return Math.abs(value) >= 1e4 ? value.toFixed(0) : String(Number.isInteger(value) ? value : Number(value.toPrecision(4)));
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
        `${number(tokens.mismatch[i])}, loss mask ${number(tokens.loss_mask[i])}` +
        (bare ? "; part of a character" : "");
    });
  }

  function showFacts(place, entries) {
    const facts = add(place, "div", undefined, "facts");
    for (const [name, value, color] of entries) {
      add(facts, "span", `${name} `);
      add(facts, "b", `${value}`).style.backgroundColor = color ?? "";
      facts.append("  ");
    }
  }

  function tint(advantage, most) { // green above the group's mean, red below
    if (!advantage || !most) return "";
    return `rgba(var(--${advantage > 0 ? "good" : "bad"}), ${0.15 + 0.5 * Math.min(1, Math.abs(advantage) / most)})`;
  }

  function facts(row, most, others = row.facts) {
    const rewards = Object.entries(row.rewards).map(([name, value]) => [name, number(value)]);
    return [["reward", number(row.reward)], ["advantage", number(row.advantage), tint(row.advantage, most)],
      ["length", number(row.length)], ["finish", row.finish], ...rewards, ...others].filter((each) => each[1] !== "");
  }

  function showPrompt(place, text) {
    const prompt = add(place, "div", text, "prompt");
    if (text.length < 600 && text.split("\n").length < 7) return;
    const button = add(place, "button", "show the whole prompt");
    button.addEventListener("click", () => { prompt.classList.add("whole"); button.remove(); });
  }

  function addReply(place, text, summary, length) {
    if (length <= 300) return add(place, "div", text, "reply"); // characters, or tokens
    const reply = add(place, "details", undefined, "reply");
    add(reply, "summary", `${summary} \u2026`);
    return add(reply, "div", text);
  }

  // A turn that begins a branch has the messages before it as its context; those before others are replies to the last one.
  function showTurn(place, turn, previous, following, tokens) {
    const showText = (text) => addReply(place, text, text.split("\n")[0].slice(0, 100), text.length);
    const showRange = (start, stop, what) => {
      if (stop > start) showTokens(addReply(place, undefined, `${stop - start} tokens of the ${what}`, stop - start), tokens, start, stop);
    };
    const stop = turn.start + turn.length;
    showFacts(place, turn.facts);
    if (turn.context && tokens && previous) showRange(previous.start + previous.length, turn.start, "branch before the turn");
    else if (turn.context && !tokens) turn.context.forEach(showText);
    const said = add(place, "div", tokens ? undefined : turn.text, "completion");
    if (!tokens) return turn.replies.forEach(showText);
    showTokens(said, tokens, turn.start, stop);
    if (following && !following.context) showRange(stop, following.start, "reply");
  }

  function showAnswer(place, row) {
    if (typeof row.completion !== "string") {
      row.completion.forEach((turn, i) =>
        showTurn(add(place, "div", undefined, "turn"), turn, row.completion[i - 1], row.completion[i + 1], row.tokens));
      return;
    }
    const completion = add(place, "div", row.tokens ? undefined : row.completion, "completion");
    if (row.tokens) showTokens(completion, row.tokens);
  }

  function place(row) {
    const several = data.runs.length > 1 ? [["run", data.runs[row.run].name]] : [];
    return [...several, ["step", row.step], ["group", row.group]].filter((each) => each[1] !== "");
  }

  function showCompletion(row) {
    const article = add(at("list"), "article");
    showFacts(article, [...place(row), ...facts(row, Math.abs(row.advantage))]);
    showPrompt(article, data.runs[row.run].prompts[row.prompt]);
    showAnswer(article, row);
  }

  function showGroup(rows) {
    const article = add(at("list"), "article");
    const rewards = rows.map((row) => row.reward).filter((value) => value !== null);
    const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
    const has = (row, [name, value]) => row.facts.some((each) => each[0] === name && each[1] === value);
    // Such as the dataset's columns.
    const shared = rows[0].facts.filter((fact) => fact[1] !== "" && rows.every((row) => has(row, fact)));
    showFacts(article, [...place(rows[0]), ["answers", rows.length], ["mean reward", number(mean)], ...shared]);
    showPrompt(article, data.runs[rows[0].run].prompts[rows[0].prompt]);
    const most = Math.max(...rows.map((row) => Math.abs(row.advantage ?? 0)));
    for (const row of [...rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity))) {
      const answer = add(article, "div", undefined, state.matching.has(row) ? "answer" : "answer other");
      answer.style.borderColor = tint(row.advantage, most);
      showFacts(answer, facts(row, most, row.facts.filter(([name]) => !shared.some((each) => each[0] === name))));
      showAnswer(answer, row);
    }
  }

  function showPage() {
    const view = at("view").value;
    const size = PAGE_SIZES[view];
    const pages = Math.max(1, Math.ceil(state.rows.length / size));
    state.page = Math.min(pages - 1, Math.max(0, state.page));
    at("found").textContent = `${state.rows.length} ${view}, page ${state.page + 1} of ${pages}`;
    at("previous").disabled = state.page === 0;
    at("next").disabled = state.page === pages - 1;
    at("list").replaceChildren();
    state.rows.slice(state.page * size, (state.page + 1) * size).forEach(view === "groups" ? showGroup : showCompletion);
  }

  function contains(row, text) {
    const texts = [row.completion].flat().flatMap((each) => (each.replies ? [...(each.context ?? []), each.text, ...each.replies] : each));
    row.searched ??= [data.runs[row.run].prompts[row.prompt], ...texts].join("\n").toLowerCase();
    return row.searched.includes(text);
  }

  function within(value, name) { // whether the limits of that name contain a number
    const [from, to] = ["from", "to"].map((end) => at(`${name}-${end}`).value);
    return (from === "" || (value !== null && value >= Number(from))) && (to === "" || (value !== null && value <= Number(to)));
  }

  function key(row) { // the number that rows are sorted by
    const name = at("sort").value;
    return name.startsWith("rewards/") ? row.rewards[name.slice(8)] ?? null : row[name];
  }

  function mean(rows) {
    const values = rows.map(key).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  }

  function select() {
    const text = at("search").value.toLowerCase();
    const run = at("run").value;
    const direction = at("descending").checked ? -1 : 1;
    const matching = all.filter((row) => (run === "" || row.run === Number(run)) && within(row.step, "step") &&
      within(row.reward, "reward") && (text === "" || contains(row, text)));
    state.matching = new Set(matching);
    const rows = matching.filter((row) => !at("valued").checked || row.tokens);
    const shown = at("view").value === "groups" ? [...new Set(rows.map((row) => row.members))] : rows;
    const keyed = shown.map((each) => [Array.isArray(each) ? mean(each) : key(each), each]);
    // What has no such number comes last in both directions; equal ones keep their order.
    keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : direction * (a - b)));
    state.rows = keyed.map(([, each]) => each);
    state.page = 0;
    showPage();
  }

  function showBrowser() {
    at("browser").hidden = all.length === 0;
    at("of-runs").hidden = data.runs.length === 1;
    add(at("run"), "option", "all").value = "";
    data.runs.forEach((run, i) => { add(at("run"), "option", run.name).value = i; });
    const functions = new Set(all.flatMap((row) => Object.keys(row.rewards)));
    functions.forEach((name) => { add(at("sort"), "option", name).value = `rewards/${name}`; });
    if (all.every((row) => row.members.length === 1)) at("view").value = "completions";
    keepControls();
    let typed;
    at("search").addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(select, 150); });
    const selecting = ["view", "run", "sort", "step-from", "step-to", "reward-from", "reward-to", "descending", "valued"];
    for (const id of selecting) at(id).addEventListener("change", select);
    at("color").addEventListener("change", () => { showLegend(); showPage(); });
    at("previous").addEventListener("click", () => { state.page -= 1; showPage(); });
    at("next").addEventListener("click", () => { state.page += 1; showPage(); });
    showLegend();
    select();
  }

  function keepControls() { // of a live page, which loads itself again
    const kept = JSON.parse(sessionStorage.getItem(location.pathname) ?? "{}");
    for (const id of CONTROLS.filter((each) => each in kept)) {
      at(id)[at(id).type === "checkbox" ? "checked" : "value"] = kept[id];
    }
    if (data.reload_seconds) setTimeout(() => {
      const values = CONTROLS.map((id) => [id, at(id).type === "checkbox" ? at(id).checked : at(id).value]);
      sessionStorage.setItem(location.pathname, JSON.stringify(Object.fromEntries(values)));
      location.reload();
    }, 1000 * data.reload_seconds);
  }

  const all = data.runs.flatMap((run, i) => run.completions.map((row) => ({ ...row, run: i })));
  const groups = new Map();
  all.forEach((row, i) => {
    const name = JSON.stringify([row.run, row.step, row.group === "" ? i : row.group]);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
    row.members = groups.get(name);
  });
  const names = data.runs.map((run) => run.name);
  const differs = (row) => names.length > 1 && new Set(row.slice(1)).size > 1;
  at("name").textContent = document.title = names.join(", ");
  addTable(at("header"), ["", ...(names.length > 1 ? names : [""])], data.header);
  at("set").hidden = data.arguments.length === 0;
  addTable(at("arguments"), ["argument", ...(names.length > 1 ? names : ["value"])], data.arguments, differs);
  at("runs").textContent = data.runs.map((run) => run.summary).join(" ");
  at("sampled").textContent = data.runs.map((run) => run.sampled).join(" ");
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
  draw(at("curves"), data.curves, "The journal has no steps.");
  draw(at("phases"), data.phases, "The journal has no times and no memory.", false);
  for (const id of ["axis", "smoothing"]) at(id).addEventListener("change", redraw);
  dark.addEventListener("change", redraw);
})();
