"""Servers with a real vLLM: what they answer, who may ask, that weights reach them, and that nothing of them stays behind."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from urllib.error import HTTPError
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import pytest
import torch
from peft import LoraConfig

from lowpeak import GRPOTrainer
from lowpeak.arguments.sampling import Sampling
from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.parallel.parameters import adapter_parameters
from lowpeak.ranks import Ranks
from lowpeak.records import Prompt
from lowpeak.vllm.compatibility import check_same_model
from lowpeak.vllm.engine import EngineSharing, PolicyFacts, VllmEngine
from lowpeak.vllm.protocol import Request
from lowpeak.vllm.server import ServerVllm, connect_servers
from tiny_models import char_tokenizer
from turn_programs import converse, ids_of
from vllm_in_process import logprobs_of, slices
from vllm_runs import DATA, grpo_arguments, grpo_trainer, spread, steps_of
from vllm_servers import SECRET, environment, members, metric, model_in, model_of, serving, until

EOS, RUNNING = 1, "num_requests_running"
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
pytestmark = pytest.mark.timeout(600)  # a server takes half a minute to start, minutes where others compute beside it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_in(tmp_path_factory.mktemp("server") / "model")


@pytest.fixture(scope="module")
def servers(folder):
    """Two servers, started side by side; the second can serve three adapters at once."""
    adapters = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3")
    first_log, second_log = folder.parent / "first.log", folder.parent / "second.log"
    with serving(folder, first_log) as first, serving(folder, second_log, *adapters) as second:
        first.vllm()
        second.vllm()
        yield first, second


@pytest.fixture(scope="module")
def vllm(servers):
    """The client of the first, which it asks by the route of arrays."""
    found = servers[0].vllm()
    assert found.info().serves_tokens
    return found


def request(first, length=24, **params):
    return Request((first, 5, 6), {"max_tokens": length, "stop_token_ids": [EOS], "ignore_eos": True, **params})


def long_wave():
    return [request(2 + i % 8, 900, min_tokens=900, seed=i) for i in range(32)]


@contextmanager
def losing_a_wave(vllm):
    """A block that runs while requests are under way; the error with which they end."""
    lost = []

    def ask():
        try:
            vllm.complete(long_wave(), 120)
        except EngineError as error:
            lost.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: metric(vllm.url, RUNNING), 30, "requests run")
    yield lost
    asking.join(20)


def largest_error(model, requests, answers, temperature=1.0):
    pairs = zip(requests, answers, strict=True)
    return max(
        float(
            (logprobs_of(model, sent.prompt_ids, list(got.ids), temperature) - torch.tensor(got.logprobs)).abs().max()
        )
        for sent, got in pairs
    )


# what it is, and who may ask


def test_it_says_what_it_is(vllm, folder):
    facts = vllm.info()
    assert (facts.model, facts.dtype, facts.max_model_len, facts.max_num_seqs) == (str(folder), "float32", 1024, 32)
    assert facts.version.split(".")[0] == "0"
    assert facts.kv_tokens > 1000
    check_same_model(facts, model_of(seed=3), char_tokenizer())


@pytest.mark.parametrize(
    "path",
    ["collective_rpc", "pause", "v1/completions", "inference/v1/generate", "lowpeak_tokens", "metrics", "server_info"],
)
def test_no_route_but_health_answers_without_the_token(vllm, path):
    for headers in ({}, {"Origin": "https://example.com", "Content-Type": "text/plain"}):
        with pytest.raises(HTTPError) as refused:
            urlopen(UrlRequest(f"{vllm.url}/{path}", data=b"{}", headers=headers), timeout=10)
        assert refused.value.code == 401
    assert urlopen(f"{vllm.url}/health", timeout=10).status == 200


MALFORMED = {
    "a number": b"5\n",
    "a mapping": b'{"a":1}\n',
    "brackets": b"[" * 60_000 + b"\n",
    "no text": bytes(range(256)) * 200,
    "a handshake of TLS": bytes.fromhex("16030100a5010000a10303") + bytes(161),
    "another version": b"GET /health HTTP/9.9\r\n\r\n",
    "a header without end": b"POST /pause HTTP/1.1\r\nX: " + b"x" * 200_000,
    "a length below 0": b"POST /pause HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"POST /pause HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "half a body": b"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n{",
    "a token that is no text": b"POST /pause HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
}


@pytest.mark.release
@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_malformed_bytes_on_its_port_neither_act_nor_stop_it(vllm, sent):
    host, port = vllm.url.removeprefix("http://").split(":")
    hung_up = suppress(ConnectionError)  # it may before it has read all
    with socket.create_connection((host, int(port)), timeout=10) as line, hung_up:
        line.sendall(sent)
        line.shutdown(socket.SHUT_WR)
        while answer := line.recv(1 << 16):
            assert not answer.startswith(b"HTTP/1.1 2"), answer
    assert vllm.complete([request(2, 4)], 60)


@pytest.mark.release
@pytest.mark.parametrize("body", [b"", b"5", b"[" * 60_000, b'{"a":1}', b"\xff\xfe", b'{"token_ids": "x"}'])
@pytest.mark.parametrize("path", ["inference/v1/generate", "lowpeak_tokens", "collective_rpc"])
def test_malformed_requests_with_the_token_are_refused_and_it_goes_on(vllm, path, body):
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    with pytest.raises(HTTPError) as refused:
        urlopen(UrlRequest(f"{vllm.url}/{path}", data=body, headers=headers), timeout=30)
    assert 400 <= refused.value.code < 600
    assert vllm.complete([request(2, 4)], 60)


def test_a_client_with_another_token_is_told_so(servers):
    with pytest.raises(EngineError, match="vllm_server_token"):
        ServerVllm(servers[0].url, "guessed").info()


# what it answers


ROUTES = ("/lowpeak_tokens", "/inference/v1/generate", "/v1/completions")


def test_token_ids_come_back_with_the_log_probs_of_transformers_the_same_bits_by_each_route(vllm):
    requests = [request(2 + i % 8, seed=i, temperature=1.0, top_p=0.9, logprobs=0) for i in range(24)]
    answers = vllm.complete(requests, 120)
    by_route = []
    for vllm._route in ROUTES[::-1]:
        one_by_one = [vllm.complete([each], 60)[0] for each in requests[:6]]
        by_route.append([(each.ids, each.logprobs, each.finish_reason) for each in one_by_one])
    assert by_route[0] == by_route[1] == by_route[2]
    assert largest_error(model_of(), requests, answers) < 1e-4
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}
    assert all((answer.ids[-1] == EOS) == (answer.finish_reason == "stop") for answer in answers)
    assert len({answer.ids for answer in answers}) > 12


def test_log_probs_are_at_the_sampling_temperature_once_it_was_told(vllm):
    vllm.call("lowpeak_score_at_temperature", {}, 60.0)
    requests = [request(2 + i % 8, seed=i, temperature=0.5, top_k=5) for i in range(8)]
    assert largest_error(model_of(), requests, vllm.complete(requests, 60), temperature=0.5) < 1e-4


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (Request((2, 99), {"max_tokens": 4}), "99"),
        (request(2, temperature=-1.0), "temperature"),
        (Request((2,) * 1100, {"max_tokens": 4}), "1024"),
    ],
)
def test_what_vllm_refuses_is_an_error_in_its_words_and_it_goes_on(vllm, refused, words):
    with pytest.raises(EngineError, match=words) as found:
        vllm.complete([refused], 60)
    assert not isinstance(found.value, LostEngineError)
    assert vllm.complete([request(2)], 60)


def test_a_pause_gives_requests_up_and_afterwards_it_answers_again(vllm):
    with losing_a_wave(vllm) as lost, vllm.paused():
        pass
    assert isinstance(lost[0], LostEngineError)
    assert vllm.url in str(lost[0])
    assert vllm.complete([request(2)], 60)


def test_a_wave_that_takes_too_long_is_given_up_on_both_sides(vllm):
    with pytest.raises(LostEngineError, match="/lowpeak_tokens"):
        vllm.complete(long_wave(), 1.0)
    until(lambda: metric(vllm.url, RUNNING) == 0, 20, "requests are aborted")


# weights, and two of them


def test_two_servers_share_the_prompts_and_answer_with_the_weights_that_were_sent(servers):
    policy, settings = model_of(seed=8), VllmSettings(ServerSettings(tuple(each.url for each in servers), token=SECRET))
    engine = VllmEngine(
        lambda: connect_servers(settings.where),
        settings,
        PolicyFacts(lambda sampling: {EOS}, 13),
        EngineSharing(Ranks()),
    )
    prompts = [Prompt(i, (2 + i, 5, 6), f"{i}") for i in range(6)]
    engine.wake()
    engine.load(slices(policy), 4)
    groups = engine.generate(prompts, Sampling(num_generations=2, max_new_tokens=12, temperature=0.0))
    assert engine.policy_version == 4
    for group in groups:
        for completion in group.completions:
            expected = logprobs_of(policy, group.prompt.ids, completion.ids.tolist())
            torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-4)
    assert all(metric(server.url, "generation_tokens_total") > 0 for server in servers)


def test_conversations_over_two_servers_draw_what_one_draws_by_the_policys_log_probs(servers):
    policy, found = model_of(seed=8), []
    requests = [
        Prompt(i, (2 + i, *range(2, 13)) * 30, f"{i}") for i in range(4)
    ]  # longer than a block of the prefix cache
    sampling = Sampling(num_generations=2, max_new_tokens=12, seed=5)
    for urls in ((servers[0].url,), tuple(each.url for each in servers)):
        settings = VllmSettings(ServerSettings(urls, token=SECRET))
        engine = VllmEngine(
            partial(connect_servers, settings.where),
            settings,
            PolicyFacts(lambda sampling: {EOS}, 13),
            EngineSharing(Ranks()),
        )
        engine.wake()
        engine.load(slices(policy), 4)
        found.append(converse(engine, requests, sampling, delay=lambda key, turn: 0.05 * ((sum(key) + turn) % 3)))
    assert ids_of(found[0]) == ids_of(found[1])
    assert len(found[1]) == 8
    for ids, turn in (each for turns in found[1].values() for each in turns):
        expected = logprobs_of(policy, ids, turn.ids)
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected, rtol=0, atol=1e-4)
    completions = [turns[0][1].ids for turns in found[1].values()]
    groups = engine.generate(requests, sampling)
    assert completions == [each.ids.tolist() for group in groups for each in group.completions]
    hits = metric(servers[0].url, "prefix_cache_hits_total")
    assert hits > 0.5 * metric(servers[0].url, "prefix_cache_queries_total")


def test_a_lora_run_sends_its_base_once_and_then_adapters_alone(servers, tmp_path):
    settings = {"vllm_mode": "server", "vllm_server_base_url": servers[1].url, "vllm_server_token": SECRET}
    trainer = grpo_trainer(grpo_arguments(tmp_path, **settings), model=model_of(), peft_config=LORA)
    trainer.train()
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps_of(trainer))
    pushed = [row["push/bytes"] for row in map(json.loads, lines_in(tmp_path / "journal/steps.jsonl"))]
    adapter = sum(4 * each.numel() for each in adapter_parameters(trainer.model).values())
    assert pushed[1:] == [adapter] * 2
    assert pushed[0] > 2 * adapter


@pytest.mark.parametrize(
    ("staleness", "lora"), [(0, None), pytest.param(1, None, marks=pytest.mark.release), (2, None), (2, LORA)]
)
def test_rollouts_ahead_have_the_log_probs_of_their_recorded_versions(servers, tmp_path, staleness, lora):
    """One server holds all versions of an adapter."""
    urls = [each.url for each in servers[lora is not None :]]
    settings = {"vllm_mode": "server", "vllm_server_base_url": urls, "vllm_server_token": SECRET, "max_steps": 4}
    args = grpo_arguments(tmp_path, max_staleness=staleness, **settings)
    trainer = GRPOTrainer(model_of(), spread, args, DATA, processing_class=char_tokenizer(), peft_config=lora)
    snapshots, collect, versions = {}, trainer._collect_rollout, []

    def collect_and_compare():
        snapshots[trainer.state.global_step] = copy.deepcopy(trainer.model).eval()
        collect()
        rows = trainer.rollout.rows
        versions.append({row["policy_version"] for row in rows})
        for record, row in zip(trainer.rollout.records, rows, strict=True):
            expected = logprobs_of(snapshots[row["policy_version"]], record.prompt_ids, record.completion.ids.tolist())
            torch.testing.assert_close(record.completion.logprobs, expected.detach(), rtol=0, atol=2e-5)

    trainer._collect_rollout = collect_and_compare
    trainer.train()
    assert versions == [{max(0, number - staleness)} for number in range(4)]
    assert all(step["grad_norm"] > 0 for step in steps_of(trainer))


# the end; these tests come last, they end the servers


def end_under_load(server, number, of):
    """End all of the server's processes by a signal to one of them; requests under way are lost, not waited for."""
    group = server.group
    assert len(members(group)) >= 3  # API server, engine, worker
    with losing_a_wave(server.vllm()) as lost:
        os.kill(of, number)
        until(lambda: not members(group), 60, "all have ended")
    assert isinstance(lost[0], LostEngineError)


def test_sigterm_with_requests_under_way_ends_everything(servers):
    end_under_load(servers[0], signal.SIGTERM, servers[0].process.pid)
    assert servers[0].process.wait(10) == 0


def test_no_process_outlives_a_front_that_was_killed(servers):
    end_under_load(servers[1], signal.SIGKILL, servers[1].process.pid)


# one command, which starts a server that dies


ROWS, LENGTH, STEPS = 16, 400, 4


@pytest.fixture
def command(folder, tmp_path):
    """`lowpeak grpo` with its own server; rewards are counted in a file, a line for each completion."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}{i}="}}\n' for i in range(10)))
    (tmp_path / "judge.py").write_text(
        # The last rollout but one is rewarded after the server was killed, so that a later one always finds it dead.
        "import os, time\n"
        "def judge(prompts, completion_ids, trainer_state, **columns):\n"
        f"    while trainer_state.global_step == {STEPS - 2} and not os.path.exists('{tmp_path}/killed'):\n"
        f"        open('{tmp_path}/waits', 'a').close()\n"
        "        time.sleep(0.1)\n"
        f"    with open('{tmp_path}/judged', 'a') as file:\n"
        "        file.writelines(f'{len(ids)}\\n' for ids in completion_ids)\n"
        "    return [float(sum(ids) % 5) for ids in completion_ids]\n"
    )
    settings = {
        "model": folder, "dataset": tmp_path / "rows.jsonl", "reward": f"{tmp_path}/judge.py:judge",
        "output_dir": tmp_path / "out", "use_vllm": "true", "vllm_devices": "cpu", "kv_cache_bytes": 16 << 20,
        "vllm_engine_kwargs": json.dumps({"enforce_eager": True, "max_num_seqs": 32}), "use_cpu": "true",
        "per_device_train_batch_size": ROWS, "num_generations": 4, "max_completion_length": LENGTH,
        "generation_kwargs": json.dumps({"min_tokens": LENGTH}), "max_steps": STEPS, "report_to": "none",
        "save_strategy": "no",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "lowpeak", "grpo", *words]


def started(err):
    """Url and process of the server, from what the command says."""
    line = err.read_text().split("vLLM starts on cpu at ", 1)[1].split(", log in", 1)[0]
    url, _, number = line.partition(" (process ")
    return url, int(number.rstrip(")"))


def lines_in(path):
    return path.read_text().splitlines() if path.exists() else []


def test_one_command_trains_on_although_its_server_is_killed_and_no_row_is_lost_or_doubled(command, tmp_path):
    err, steps = tmp_path / "err", tmp_path / "out/journal/steps.jsonl"
    with err.open("wb") as out:
        run = subprocess.Popen(command, env=environment(), stdout=out, stderr=out, cwd=tmp_path, start_new_session=True)
    try:
        until(lambda: lines_in(steps) or run.poll() is not None, 280, "the first step")
        assert run.poll() is None, err.read_text()[-3000:]
        url, group = started(err)
        waits = tmp_path / "waits"
        until(lambda: metric(url, RUNNING) > 0 or waits.exists(), 60, "a later rollout is being written, or rewarded")
        os.killpg(group, signal.SIGKILL)
        (tmp_path / "killed").touch()
        assert run.wait(280) == 0, err.read_text()[-3000:]
    finally:
        run.kill()
        run.wait()
    assert "is started again (process " in err.read_text()
    assert [json.loads(line)["step"] for line in lines_in(steps)] == list(range(1, STEPS + 1))
    judged = lines_in(tmp_path / "judged")
    assert len(judged) == ROWS * STEPS
    assert set(judged) == {str(LENGTH)}
    rollouts = [json.loads(line) for line in lines_in(tmp_path / "out/journal/rollouts.jsonl")]
    assert len(rollouts) == ROWS * STEPS
    assert len({row["completion"] for row in rollouts}) == ROWS * STEPS
    drift = [json.loads(line)["sampling/sampling_logp_difference/max"] for line in lines_in(steps)]
    assert max(drift) < 1e-3
    again = int(err.read_text().rsplit("is started again (process ", 1)[1].split(")", 1)[0])
    assert not members(group)
    assert not members(again)
