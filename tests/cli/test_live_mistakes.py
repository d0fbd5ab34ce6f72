"""User errors of the live page: refused in one line before anything is served or trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.cli.commands import watch
from support.command_line import refused

CONFIGURED = '{"name": "run", "model": {"vocab": 300}, "data": {"source": "none"}}'


def complaint(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    return refused(capfd, *words, silent=True)


def run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(CONFIGURED)
    return folder


def test_folders_that_are_not_runs_are_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such folder" in complaint(capfd, "watch", str(tmp_path / "nowhere"))
    assert "not a run (no config.json)" in complaint(capfd, "watch", str(tmp_path))
    for file, kind in (("drill.json", "drill"), ("experts.json", "experts")):
        folder = tmp_path / f"with {file}"
        (folder / file).mkdir(parents=True)
        assert f"results of {kind!r}, which have no live page" in complaint(capfd, "watch", str(folder))
    good = str(run(tmp_path / "good"))
    assert "shows at most 8 runs, not 9" in complaint(capfd, "watch", *[good] * 9)
    assert "listed twice" in complaint(capfd, "watch", good, f"{good}/../good")


def test_runs_are_named_by_the_shortest_distinct_path() -> None:
    assert watch.display_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert watch.display_names([Path("/x/run"), Path("/y/run")]) == ["/x/run", "/y/run"]


@pytest.mark.parametrize("at", ["8080", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", ":80"])
def test_an_invalid_address_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path, at: str) -> None:
    assert "use HOST:PORT" in complaint(capfd, "watch", str(run(tmp_path / "run")), "--at", at)


def test_an_unavailable_address_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "192.0.2.1:9: cannot listen at this address" in complaint(
        capfd, "watch", str(run(tmp_path / "run")), "--at", "192.0.2.1:9"
    )


def test_an_invalid_or_public_token_file_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, folder = tmp_path / "token", str(run(tmp_path / "run"))
    assert "cannot be read" in complaint(capfd, "watch", folder, "--token-file", str(file))
    file.write_text("short")
    file.chmod(0o600)
    assert "openssl rand" in complaint(capfd, "watch", folder, "--token-file", str(file))
    file.write_text("x" * 40 + "\r\nset-cookie: a=b")
    assert "has no token" in complaint(capfd, "watch", folder, "--token-file", str(file))
    file.write_text("x" * 40)
    file.chmod(0o644)
    assert "chmod 600" in complaint(capfd, "watch", folder, "--token-file", str(file))


@pytest.mark.parametrize("flag", [["--live-chaos"], ["--live-at", "127.0.0.1:0"], ["--live-name", "a"]])
def test_flags_of_the_live_page_require_it(capfd: pytest.CaptureFixture[str], flag: list[str]) -> None:
    assert f"{flag[0]} requires --live" in complaint(capfd, "train", "demo", *flag)


def test_missing_packages_are_refused_before_a_run_begins(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.importlib.util, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    for words in (["watch", "runs/demo"], ["train", "demo", "--live"]):
        assert "pip install 'planaria[live]'" in complaint(capfd, *words)
    assert not (tmp_path / "runs").exists()
