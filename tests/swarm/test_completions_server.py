"""``planaria serve`` and its censor."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planaria.report.live_page.http_server import Server, ServerAddress, serve
from planaria.swarm.audit.censor import Censor, LeakageLedger, ledger_key
from planaria.swarm.audit.questions import Question, QuestionPart
from planaria.swarm.completions import server as completions_server
from planaria.swarm.completions.client import Client, ServerFailed, parse_completions, request_body
from planaria.swarm.completions.server import CompletionsApi, Service
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.policy.reading import read_completions
from support.command_line import refused
from support.swarm.tiny_swarm import policy

TOKEN = "a-token-of-a-test-and-of-nothing-else"
CODES = ("4719", "2210", "9031", "5533")
ANN = Question("x:1", "ann", "code of ann=", CODES, 0, (QuestionPart("digit 1 of ann=", ("4", "2", "9", "5")),))
POLICY = policy(context=64)


@contextlib.contextmanager
def served(censor: Censor | None = None, warned: list[str] | None = None) -> Iterator[str]:
    """The address of a server in this process."""
    announced: list[str] = []
    service = Service(CompletionsApi(POLICY, "tiny", censor), (warned if warned is not None else []).append)
    server = Server(service, ServerAddress(), TOKEN, announced.append)
    thread = threading.Thread(target=serve, args=(server,))
    thread.start()
    try:
        until = time.monotonic() + 20
        while not announced and time.monotonic() < until:
            time.sleep(0.01)
        yield announced[0].partition("/?")[0]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def client(url: str, monkeypatch: pytest.MonkeyPatch, token: str = TOKEN) -> Client:
    monkeypatch.setenv("TINY_TOKEN", token)
    sections = {"policy": {"server": f"{url}/v1", "serving": {"token": "TINY_TOKEN"}}, "defence": {"checks": ""}}
    return Client(SwarmConfig.model_validate(sections).policy)


def reply_to(one: Client, text: str, count: int = 2, **changes: Any) -> Any:
    body = request_body("tiny", POLICY.encode(text), count, 8, 0, 7, POLICY.end) | changes
    return one.post("/v1/completions", body, time.monotonic() + 30)


def status(url: str, body: bytes, **headers: str) -> int:
    line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        line.request("POST", "/v1/completions", body, {"authorization": f"Bearer {TOKEN}", **headers})
        return line.getresponse().status
    finally:
        line.close()


def test_served_log_probabilities_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as url:
        one = client(url, monkeypatch)
        assert one.model("") == one.model("tiny") == "tiny"
        reply = reply_to(one, "12+34=", 3)
        drawn = parse_completions(reply, POLICY, 8)
        assert len(drawn) == 3 and drawn == parse_completions(reply_to(one, "12+34=", 3), POLICY, 8), (
            "one seed, one draw"
        )
        prompt = POLICY.encode("12+34=")
        ids = [(prompt, [*each.ids, *([POLICY.end] if each.ended else [])]) for each in drawn]
        for each, found in zip(drawn, read_completions(POLICY, ids, 1.0), strict=True):
            assert each.logps == pytest.approx(found.logps, abs=1e-4)
        texts = one.post("/v1/completions", {"prompt": "12+34=", "max_tokens": 4}, time.monotonic() + 30)
        assert texts["choices"][0]["logprobs"] is None and "token_ids" not in texts["choices"][0]


def test_requests_without_token_are_refused_and_bad_ones_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions_server, "ASK_S", 0.3)
    with served() as url:
        with pytest.raises(ServerFailed, match="403"):
            reply_to(client(url, monkeypatch, "b" * 20), "x")
        assert status(url, b"{}", host="evil.example") == 403
        one = client(url, monkeypatch)
        for changes, line in (
            ({"n": 65}, "n: "),
            ({"top_p": 0.5}, "top_p: "),
            ({"stream": True}, "stream: "),
            ({"max_tokens": 64}, "the model reads 64"),
            ({"prompt": [257]}, "some outside 0"),
            ({"prompt": []}, "prompt has no ids"),
            ({"model": "bass"}, "ask for 'tiny'"),
        ):
            with pytest.raises(ServerFailed, match=f"400 .*{line}"):
                reply_to(one, "x", **changes)  # type: ignore[arg-type]
        assert status(url, b"[" * 5000) == 400 and status(url, b"\xff") == 400
        assert status(url, b"x" * (completions_server.LARGEST_BODY + 1)) == 413
        assert status(url, b"", **{"content-length": "10"}) == 413, "a body that does not come"
        assert parse_completions(reply_to(one, "x"), POLICY, 8)


NUMBERS = (
    st.integers(-2, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from([5e-324, 1e-300, 1e-45, 1e-7, 1e-6, 9.99, 10, 2**63 - 1, -(2**63), 1 << 24, 10**400])
)
FIELDS = ["n", "max_tokens", "temperature", "top_k", "seed", "logprobs", "top_p", "min_p", "best_of", "prompt", "echo"]


@given(st.dictionaries(st.sampled_from(FIELDS), NUMBERS, max_size=4), st.lists(NUMBERS, max_size=3))
@example({"temperature": 1e-300}, [])
@example({"temperature": 5e-324, "top_k": 3}, [])
@settings(max_examples=150, deadline=None)
def test_any_numbers_in_a_request_are_answered_or_refused(fields: dict[str, Any], prompt: list[Any]) -> None:
    """The reply is the one that goes out: JSON has no infinite numbers."""
    service = Service(CompletionsApi(POLICY, "tiny"), lambda _: None)
    body = {"prompt": prompt or "2+3=", "max_tokens": 3, **fields}
    reply = service._answer(json.dumps(body).encode())
    assert reply.status_code in (200, 400), reply.body
    if reply.status_code == 200:
        (first, *_) = json.loads(reply.body)["choices"]
        assert first["logprobs"] is None or max(first["logprobs"]["token_logprobs"]) <= 0


def test_censored_replies_are_empty_and_a_spent_budget_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coins, warned = iter([0.99, 0.0, 0.99]), list[str]()
    ledger = LeakageLedger(tmp_path / "ledger.json", 0.3)
    with served(Censor([ANN], 0.1, ledger, lambda: next(coins)), warned) as url:
        one = client(url, monkeypatch)
        first, second = parse_completions(reply_to(one, "digit 1 of ann="), POLICY, 8)
        assert (second.ids, second.ended) == ((), True), "a coin below ρ: an empty answer, which our client takes"
        assert ledger.spent_nats(ledger_key(ANN)) == pytest.approx(0.2), "empty or not, both are paid for"
        assert parse_completions(reply_to(one, "digit 1 of ann=", 1), POLICY, 8)[0] == first, (
            "the coin is not the request's seed"
        )
        with pytest.raises(ServerFailed, match=r"429 .*budget of the requested answer"):
            reply_to(one, "the digit 1 of ANN= please", 1)
        assert len(parse_completions(reply_to(one, "12+34="), POLICY, 8)) == 2, "what is not listed passes"
        (tmp_path / "ledger.json").unlink()
        with pytest.raises(ServerFailed, match=r"503 .*not known"):
            reply_to(one, "digit 1 of ann=")
        assert "would forget the spent budget" in warned[0]


def test_mistakes_are_reported_before_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mistake(*words: object) -> str:
        return refused(capsys, "serve", "no-such-model", *words)

    file = tmp_path / "questions.jsonl"
    question = {"question": "q", "options": ["a", "b"], "answer": "a", "parts": ["p"]}
    file.write_text(json.dumps(question) + "\n")
    wrapped = ["--questions", file, "--ledger", tmp_path / "ledger.json"]
    assert "needs --questions FILE and --ledger FILE" in mistake("--censor", 0.1)
    assert "requires --censor" in mistake("--questions", file)
    assert "must be above 0" in mistake("--censor", 0, *wrapped) and "must be above 0" in mistake(
        "--censor", "nan", *wrapped
    )
    assert "--budget -1 must be above 0" in mistake("--censor", 0.1, "--budget", -1, *wrapped)
    assert "no such run, folder or file" in mistake("--censor", 0.1, *wrapped)
    assert "not an address" in mistake("--at", "x")


@pytest.mark.slow
def test_a_restarted_server_keeps_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, its token in a file, its ledger on disk."""
    POLICY.export(tmp_path / "model")
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    file = tmp_path / "questions.jsonl"
    question = {"question": "code of ann=", "options": CODES, "answer": "4719", "parts": ["digit 1 of ann="]}
    file.write_text(json.dumps(question) + "\n")
    words = [sys.executable, "-m", "planaria", "serve", str(tmp_path / "model"), "--model-name", "tiny"]
    words += ["--token-file", str(token), "--censor", "0.1", "--questions", str(file)]
    words += ["--ledger", str(tmp_path / "ledger.json"), "--budget", "0.3"]
    for left in (2, 1, 0):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("serving") and "http://127.0.0.1:" in first
            url = first.split()[-1].removesuffix("/v1")
            assert TOKEN not in process.stdout.readline()
            one = client(url, monkeypatch)
            if left:
                assert len(parse_completions(reply_to(one, "digit 1 of ann=", left), POLICY, 8)) == left
            else:
                with pytest.raises(ServerFailed, match="429"):
                    reply_to(one, "digit 1 of ann=", 1)
        finally:
            process.send_signal(signal.SIGKILL if left else signal.SIGINT)
            assert (process.wait(30) == 0) == (not left)
            assert process.stdout is not None
            process.stdout.close()
