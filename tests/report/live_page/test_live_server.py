"""The live page's server: access control, limits and answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.cli import fault_injection
from planaria.common.errors import UserError
from planaria.control.facts import events as e
from planaria.control.log.state_file import LiveWorker, StateFile, start_ticks
from planaria.control.log.writer import RunLog
from planaria.report.live_page import http_server, limits
from planaria.report.live_page.app import exposition
from planaria.report.live_page.frames import apply_patch
from planaria.report.live_page.guard import new_token
from planaria.report.observe.tally import RunTally
from planaria.runtime.preparation import run_folders
from support.hostile_json import hostile
from support.report.live_server import TOKEN, Client, served
from support.report.served_runs import folder, run_in


def test_the_token_is_in_the_address_once_and_then_in_a_cookie_of_this_server_alone(tmp_path: Path) -> None:
    with served([run_in(tmp_path / "run")]) as client:
        assert client.url.endswith(f"/?token={TOKEN}")
        first = client.request(f"/?token={TOKEN}", token=None)
        assert first.status == 200 and "<title>planaria</title>" in first.body
        cookie = first.headers["set-cookie"]
        assert f"planaria-{client.port}=" in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert "script-src 'self'" in first.headers["content-security-policy"]
        assert "unsafe" not in first.headers["content-security-policy"]
        kept = cookie.partition(";")[0]
        assert client.request("/api/runs", token=None, cookie=kept).status == 200
        assert client.request("/", token=None, cookie=kept).status == 200
        assert "set-cookie" not in client.request("/", token=None, cookie=kept).headers
        for path in ("/", "/api/runs", "/api/runs/0/frames", "/static/app.js", "/metrics", "/?token=wrong", "/?token="):
            answer = client.request(path, token=None)
            assert answer.status == 403 and "Authorization: Bearer TOKEN" in answer.body, path
            assert "set-cookie" not in answer.headers, path
        assert client.request(f"/api/runs?token={TOKEN}", token=None).status == 403, "a token in the address of data"
        assert client.request("/api/runs", token=None, cookie=f"planaria-{client.port}={new_token()}").status == 403
        assert client.request("/api/runs", token="é").status == 403


def test_the_page_needs_no_script_or_style_but_its_own_files(tmp_path: Path) -> None:
    with served([run_in(tmp_path / "run")]) as client:
        page = client.request("/").body
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|https?://", page)
        linked = re.findall(r'(?:src|href)="(/[^"]+)"', page)
        modules = [file.name for file in (Path(limits.__file__).parent / "static").glob("*.js")]
        assert len(modules) > 5
        for path in [*linked, *(f"/static/{name}" for name in modules)]:
            assert client.request(path).status == 200, path
        assert client.request("/static/app.js").headers["content-type"].startswith("text/javascript")
        for path in ("/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/nothing", "/nothing"):
            assert client.request(path).status == 404, path


@pytest.mark.parametrize("path", ["/", "/api/runs", "/health", "/ready", "/metrics"])
def test_unknown_hosts_and_origins_are_refused_token_or_not(tmp_path: Path, path: str) -> None:
    with served([run_in(tmp_path / "run")], names=("proxy.example:8443",)) as client:
        own = f"127.0.0.1:{client.port}"
        assert client.request(path).status in (200, 503)
        for host in (
            "evil.example",
            f"evil.example:{client.port}",
            "127.0.0.1",
            f"127.0.0.1.evil.example:{client.port}",
        ):
            assert client.request(path, host=host).status == 403, host
        for host in (f"localhost:{client.port}", "proxy.example:8443"):
            assert client.request(path, host=host).status in (200, 503), host
        for origin in ("http://evil.example", "null", f"http://{own}.evil.example", "http://127.0.0.1:1"):
            assert client.request(path, origin=origin).status == 403, origin
        assert client.request(path, origin=f"http://{own}").status in (200, 503)
        assert client.request(path, sec_fetch_site="cross-site", sec_fetch_mode="cors").status == 403


def test_a_giant_address_or_head_is_refused(tmp_path: Path) -> None:
    with served([run_in(tmp_path / "run")]) as client:
        assert client.request(f"/{'a' * limits.MAX_TARGET}").status == 414
        assert client.request(f"/?{'a' * limits.MAX_TARGET}").status == 414
        with suppress(ConnectionError):  # the rest of it may not even be read
            assert client.request(f"/{'a' * 10 * limits.MAX_HEAD}").status in (400, 414)
        with socket.create_connection((client.host, client.port)) as line:
            line.settimeout(20)
            try:
                line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (limits.MAX_HEAD // 2))
                answer = line.recv(100)
            except ConnectionError:
                answer = b""
            assert not answer or b" 400 " in answer
        assert client.request("/health").status == 200


def test_a_thousand_idle_connections_do_not_block_requests(tmp_path: Path) -> None:
    """Those that were idle for longest make room; a watcher of a stream is not idle."""
    with served([run_in(tmp_path / "run")]) as client, ExitStack() as held:
        watching = client.frames(until=lambda _: False)
        assert next(watching)["n"] == 0
        lines = [held.enter_context(socket.create_connection((client.host, client.port))) for _ in range(1000)]
        began = time.monotonic()
        assert client.request("/health").status == 200 and client.request("/api/runs").status == 200
        assert time.monotonic() - began < limits.REQUEST_TIMEOUT_S, "idle connections block no client"
        for line in lines[: -limits.MAX_CONNECTIONS]:
            assert _dropped(line)
        assert "planaria_watchers 1\n" in client.request("/metrics").body
        watching.close()


def test_a_connection_without_a_request_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    with (
        served([run_in(tmp_path / "run")]) as client,
        socket.create_connection((client.host, client.port)) as silent,
        socket.create_connection((client.host, client.port)) as slow,
    ):
        slow.sendall(b"GET /health HT")
        assert _dropped(silent) and _dropped(slow)


def _dropped(line: socket.socket) -> bool:
    line.settimeout(20)
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.slow
def test_a_reader_that_does_not_receive_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.3)
    run = run_in(tmp_path / "run")
    log = RunLog(run)
    for number in range(3000):
        log.event(60.0 + number, e.Trouble(detail=f"{number} " + "x" * 3000))
    log.close()
    with served([run]) as client:
        with socket.create_connection((client.host, client.port)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"host: 127.0.0.1:{client.port}\r\nauthorization: Bearer {TOKEN}\r\n"
            line.sendall(f"GET /api/runs/0/frames HTTP/1.1\r\n{head}\r\n".encode())
            over = time.monotonic() + 30
            while "planaria_watchers 1\n" not in client.request("/metrics").body:
                assert time.monotonic() < over
            while "planaria_watchers 0\n" not in client.request("/metrics").body:
                assert time.monotonic() < over, "it is waited for without end"
                time.sleep(0.05)
        assert sum(1 for frame in client.frames() if "line" in frame) == 3000


def test_streams_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planaria.report.live_page import app

    monkeypatch.setattr(app, "MAX_STREAMS", 1)
    with served([run_in(tmp_path / "run")]) as client:
        stream = client.frames(until=lambda _: False)
        assert next(stream)["n"] == 0
        refused = client.request("/api/runs/0/frames")
        assert refused.status == 503 and "streams are in use" in refused.body
        stream.close()


def test_frames_lead_to_the_state_and_a_reader_resumes(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with served([run]) as client:
        frames = list(client.frames())
        state: dict[str, object] = {}
        for frame in frames:
            state = apply_patch(state, frame["set"])
        assert (
            state["schema"] == 2
            and state["step"] == 1
            and state["loss"] == {"step": 0, "value": 2.5, "tokens_per_s": 10.0}
        )
        assert {w["status"] for w in state["workers"].values()} == {"member"}  # type: ignore[attr-defined]
        assert frames[-1]["t"] == 4.0
        assert list(client.frames(after=frames[3]["n"])) == frames[4:]
        log = RunLog(run)
        log.event(60.0, e.WorkerLost(worker="w1", incarnation=1, cause="exit", detail="pid 4001"))
        (lost,) = list(client.frames(after=frames[-1]["n"], until=lambda f: "line" in f))
        assert lost["line"]["tone"] == "loss" and lost["set"]["nodes"]["1"]["state"] == "empty"
        log.close()


def test_several_runs_have_stories_of_their_own(tmp_path: Path) -> None:
    with served([run_in(tmp_path / "a"), run_in(tmp_path / "b")]) as client:
        listed = json.loads(client.request("/api/runs").body)
        assert [run["name"] for run in listed["runs"]] == ["a", "b"] and listed["faults"] == []
        assert len(list(client.frames(0))) == len(list(client.frames(1))) > 5
        assert client.request("/api/runs/2/frames").status == 404
        assert 'planaria_steps_committed{run="b"} 1\n' in client.request("/metrics").body


def test_a_log_that_is_broken_ends_its_stream_with_the_reason(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with (run / "events.jsonl").open("a") as file:
        file.write("nonsense\n")
    with served([run]) as client:
        assert list(client.frames(until=lambda frame: frame["t"] >= 4.0)), "earlier frames are sent as well"
        line = http.client.HTTPConnection(client.host, client.port, timeout=30)
        line.request("GET", "/api/runs/0/frames", headers={"authorization": f"Bearer {TOKEN}"})
        assert "broken line" in line.getresponse().read().decode()
        assert client.request("/ready").status == 503 and client.request("/health").status == 200


def test_health_readiness_and_metrics(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with served([run]) as client:
        list(client.frames())
        assert client.request("/health", token=None).body == "up\n"
        assert client.request("/ready", token=None).body == "ready\n"
        metrics = client.request("/metrics").body
        assert 'planaria_workers{run="run",state="member"} 3\n' in metrics
        assert 'planaria_loss{run="run"} 2.5' in metrics
        long_ago = time.time() - 2 * limits.READY_S
        os.utime(run / "events.jsonl", (long_ago, long_ago))
        assert client.request("/ready", token=None).body == "not ready\n"
    with served([folder(tmp_path / "empty")]) as client:
        assert client.request("/ready", token=None).status == 503
        assert client.request("/health", token=None).status == 200


def test_names_of_runs_cannot_break_out_of_the_metrics() -> None:
    page = exposition([('a"} 1\nevil{x="\\', RunTally(), 0.0), ("b", RunTally(), 1.0), ("b", RunTally(), 2.0)], 0)
    assert all(
        re.fullmatch(r'(# .*|\w+(\{\w+="(\\.|[^"\\\n])*"(,\w+="[^"]*")*\})? \S+)', line) for line in page.splitlines()
    )
    assert "\nevil" not in page


def test_without_leave_the_page_only_looks(tmp_path: Path) -> None:
    with served([run_in(tmp_path / "run")]) as client:
        refused = client.inject("w1", 1, "kill")
        assert refused.status == 403 and "read-only" in refused.body
        assert client.request("/api/runs/0/faults").status == 405


def test_an_order_is_carried_out_for_the_token_its_origin_and_a_known_fault_alone(tmp_path: Path) -> None:
    done: list[tuple[str, int, str]] = []

    def inject_fault(run: Path, worker: str, incarnation: int, fault: str) -> str:
        if worker == "w9":
            raise UserError("w9 has already exited")
        done.append((worker, incarnation, fault))
        return f"{fault} for {worker}"

    with served([run_in(tmp_path / "run")], inject_fault) as client:
        own = f"http://127.0.0.1:{client.port}"
        cookie = f"planaria-{client.port}={TOKEN}"
        assert client.inject("w1", 1, "kill", token="wrong").status == 403
        assert client.inject("w1", 1, "kill", origin="http://evil.example").status == 403
        body = json.dumps({"worker": "w1", "incarnation": 1, "fault": "kill"})
        assert client.request("/api/runs/0/faults", "POST", body, token=None, cookie=cookie).status == 403, "no origin"
        for bad in ("", "[]", "null", '{"worker": 1}', "{" * 500, body.replace("kill", "nuke"), body + " " * 2000):
            assert client.request("/api/runs/0/faults", "POST", bad).status == 400, bad
        for changed in ({"worker": "\ud800"}, {"incarnation": True}, {"incarnation": -1}, {"incarnation": 1 << 64}):
            answer = client.request("/api/runs/0/faults", "POST", json.dumps(json.loads(body) | changed))
            assert answer.status == 400 and answer.body.startswith("set worker, incarnation and fault"), changed
        assert not done
        assert client.inject("w9", 1, "kill").status == 409
        assert client.request("/api/runs/7/faults", "POST", body).status == 404
        answer = client.request("/api/runs/0/faults", "POST", body, token=None, cookie=cookie, origin=own)
        assert answer.status == 200 and json.loads(answer.body) == {"done": "kill for w1"}
        assert done == [("w1", 1, "kill")]


def test_hostile_requests_are_refused_in_a_line_and_never_fail(tmp_path: Path) -> None:
    """Any body of a fault request, and any path, query and header that HTTP can carry."""
    good = {"worker": "w1", "incarnation": 1, "fault": "kill"}
    paths = st.sampled_from(
        ["/api/runs/%s/frames?after=%s", "/api/runs/%s/faults", "/static/%s", "/%s?token=%s", "/%s"]
    )
    parts = st.sampled_from(["9" * 400, "-1", "1e999", "%00", "%ff", "%ed%a0%80", "%0d%0ax: y", "..%2f", "\xb2", "0"])
    headers = st.dictionaries(
        st.sampled_from(["last_event_id", "origin", "cookie", "content_length", "sec_fetch_site"]),
        st.sampled_from(["", "9" * 400, "1e999", "\xb2", "\xff", "NaN", "a=b; c", "-1"]),
        max_size=2,
    )
    with served([run_in(tmp_path / "run")], lambda *order: f"{order[1]}") as client:

        @settings(max_examples=60)
        @given(hostile(good))
        def any_body(body: bytes) -> None:
            answer = client.request("/api/runs/0/faults", "POST", body.decode("latin-1"))
            assert answer.status in (200, 400) and answer.body.count("\n") <= 1

        @settings(max_examples=60)
        @given(paths, parts, headers)
        def any_address(path: str, part: str, more: dict[str, str]) -> None:
            with suppress(http.client.HTTPException, ConnectionError, UnicodeError):  # h11 may only hang up
                assert client.status(path.replace("%s", part), **more) < 500, (path, part, more)

        any_body()
        any_address()
        assert client.request("/health").status == 200


def test_a_process_that_is_not_the_worker_gets_no_fault(tmp_path: Path) -> None:
    """The process id may belong to another process, or the worker may have been restarted."""
    run = run_in(tmp_path / "run")
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        other = LiveWorker(worker="w1", incarnation=2, pid=bystander.pid, start_ticks=1, node=1, stage=1)
        state = StateFile(controller=1, generation=1, step=0, phase="run", workers=[other])
        (run / "state.json").write_text(state.model_dump_json())
        with run_folders.lock_for_training(run):
            with pytest.raises(UserError, match=r"incarnation 1.*already exited"):
                fault_injection.require_incarnation(run, "w1", 1)
            fault_injection.require_incarnation(run, "w1", 2)
            with pytest.raises(UserError, match="already exited"):
                fault_injection.send_signal(run, "kill", "worker=w1")
        assert bystander.poll() is None and start_ticks(bystander.pid) != 1
    finally:
        bystander.kill()
        bystander.wait()


def test_closing_the_pipe_stops_the_server(tmp_path: Path) -> None:
    import threading

    from planaria.report.live_page.app import FolderFollower, Page
    from planaria.report.live_page.http_server import Server, ServerAddress, serve

    read, write = os.pipe()
    announced: list[str] = []
    page = Page([FolderFollower(run_in(tmp_path / "run"), "run")], None)
    thread = threading.Thread(target=serve, args=(Server(page, ServerAddress(), TOKEN, announced.append), read))
    thread.start()
    while not announced:
        time.sleep(0.01)
    stream = Client(announced[0]).frames(until=lambda _: False)
    assert next(stream)["n"] == 0
    os.close(write)
    assert list(stream), "watchers get what there is, and the end"
    thread.join(30)
    assert not thread.is_alive()
    os.close(read)
