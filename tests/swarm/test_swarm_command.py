"""``planaria swarm train``, ``swarm join``, ``swarm show`` and ``report``."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from planaria import __version__, cli
from planaria.swarm.commands import drill as module
from planaria.swarm.commands.settlement import settle
from planaria.swarm.drill_arms import Drill
from planaria.trials import result_cache
from support.command_line import exit_code, refused
from support.processes import Command, planaria
from support.swarm.swarms import until

RECIPE = """
size = 2
policy = {{ kind = "pretrained", options.path = "{pupil}" }}
rounds = {{ count = 3, prompts = 4, group = 4 }}
evaluate = {{ problems = 20, every = 0 }}
task.reward = "consensus"
optim.lr = 1e-3
"""


@pytest.fixture(scope="module")
def done(pupil: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a finished run on a separate board, and its printed output."""
    folder = tmp_path_factory.mktemp("swarm")
    (folder / "tiny.toml").write_text(RECIPE.format(pupil=pupil))
    ran = planaria("swarm", "train", "tiny.toml", "--board", str(folder / "board"), cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return folder, ran.stdout


@pytest.fixture
def there(done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(done[0])
    return done[0]


@pytest.mark.slow
def test_a_swarm_reports_the_benefit_of_collaboration(done: tuple[Path, str]) -> None:
    folder, printed = done
    assert "did collaborating help?" in printed and "p1" in printed and "3/3" in printed
    assert "report        runs/tiny/report.html" in printed
    report = (folder / "runs/tiny/report.html").read_text()
    assert "Did collaborating help me?" in report and "<h2>Agreement</h2>" in report


@pytest.mark.slow
def test_keys_on_a_shared_board_are_private(there: Path) -> None:
    files = [there / f"runs/tiny/peers/{name}/identity.pem" for name in ("p0", "p1")]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2
    assert files[0].read_bytes() != files[1].read_bytes()


def test_explain_lists_all_training_completions(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["swarm", "show", "runs/tiny", "--peer", "p0", "--round", "1"])
    assert "p0: 16 completions" in capsys.readouterr().out
    lines = (there / "runs/tiny/peers/p0/samples.jsonl").read_text().splitlines()
    problem = json.loads(lines[0])["problem"]
    cli.run(["swarm", "show", "runs/tiny", "--peer", "p1", "--round", "0", "--problem", str(problem)])
    shown = capsys.readouterr().out
    assert "p1: 4 completions" in shown and "text" in shown
    cli.run(["swarm", "show", "runs/tiny", "--round", "1", "--source", "p1"])
    assert "p0: 8 completions" in capsys.readouterr().out
    cli.run(["swarm", "show", "runs/tiny", "--rejected"])
    count = sum(bool(json.loads(line)["layer"]) for line in lines)
    assert f"p0: {count} completions, 0 learned from" in capsys.readouterr().out


def test_unknown_peers_sources_and_rounds_are_mistakes(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'p1'?" in refused(capsys, "swarm", "show", "runs/tiny", "--peer", "p7")
    assert "--source p7" in refused(capsys, "swarm", "show", "runs/tiny", "--source", "p7")
    assert "--round 9: p0 recorded rounds 0 to 2" in refused(capsys, "swarm", "show", "runs/tiny", "--round", "9")
    assert "not a swarm's run" in refused(capsys, "swarm", "show", "runs")


def test_a_report_without_records_is_a_mistake(tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers").mkdir()
    assert "not a swarm's run" in refused(capsys, "report", str(tmp_path))
    (tmp_path / "config.json").write_bytes((there / "runs/tiny/config.json").read_bytes())
    assert "wait for the first evaluation" in refused(capsys, "report", str(tmp_path))
    (tmp_path / "config.json").write_text("{}}")
    assert "config.json: Invalid JSON" in refused(capsys, "report", str(tmp_path))


def test_a_dry_run_prints_the_recipe_and_starts_nothing(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((there / "runs").iterdir())
    assert cli.run(["swarm", "train", "tiny.toml", "--dry-run", "--rounds.count", "77"]) == 0
    assert "count = 77" in capsys.readouterr().out
    assert sorted((there / "runs").iterdir()) == before


def test_joining_the_wrong_run_is_refused_in_one_line(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "this board has no run" in refused(capsys, "swarm", "join", "--board", "nowhere")
    assert "pass --board" in refused(capsys, "swarm", "join")
    assert "nowhere://" in refused(capsys, "swarm", "join", "--board", "nowhere://x")
    assert "task.name = 'gsm8k'" in refused(capsys, "swarm", "join", "--board", "board", "--task", "gsm8k")
    assert "problems is" in refused(capsys, "swarm", "join", "--board", "board", "--task.options.digits", "3")
    assert "--seed 9: the run was created with 1" in refused(capsys, "swarm", "join", "--board", "board", "--seed", "9")
    assert not (there / "nowhere").exists()


def test_a_board_cannot_set_a_peers_paths(tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from planaria.swarm.board.board import Board
    from planaria.swarm.board.identity import PeerIdentity

    rules = json.loads(json.loads((there / "board/rules.json").read_text())["body"])["rules"]
    Board(str(tmp_path / "board"), PeerIdentity.generate()).create_run(rules | {"out": str(tmp_path / "elsewhere")})
    assert "out is only there" in refused(capsys, "swarm", "join", "--board", str(tmp_path / "board"))
    assert not (tmp_path / "elsewhere").exists()


SIZES: list[tuple[str, Any]] = [
    ("rounds.prompts", 4 * 10**9),
    ("rounds.group", 2 * 65),
    ("size", 10**6),
    ("sampling.max_new", 10**6),
    ("seed", 2**70),
]


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_excessive_rules_are_refused_in_one_line(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    from planaria.swarm.board.board import Board
    from planaria.swarm.board.identity import PeerIdentity

    rules = json.loads(json.loads((there / "board/rules.json").read_text())["body"])["rules"]
    section, _, name = key.rpartition(".")
    (rules[section] if section else rules)[name] = value
    Board(str(tmp_path / "board"), PeerIdentity.generate()).create_run(rules)
    found = refused(capsys, "swarm", "join", "--board", str(tmp_path / "board"))
    assert key in found and str(tmp_path / "board") in found and "at most" in found


@pytest.mark.slow
def test_a_second_run_gets_its_own_folder_and_can_be_joined(
    there: Path, pupil: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The joiner comes late, and takes part from the newest round on."""
    (there / "long.toml").write_text(RECIPE.format(pupil=pupil).replace("count = 3", "count = 40"))
    running = Command("swarm", "train", "long.toml", "--name", "tiny", "--quiet", cwd=there)
    try:
        log = there / "runs/tiny-2/peers/p0/log.jsonl"
        until(lambda: log.is_file() and log.read_text().count('"kind":"round"') >= 3)
        code = cli.run(
            ["swarm", "join", "--board", "runs/tiny-2/board", "--model", str(pupil), "--as", "late", "--name", "guest"]
        )
        assert code == 0 and running.wait(100) == 0
    finally:
        running.kill()
        running.communicate()
    records = [json.loads(line) for line in (there / "runs/guest/peers/late/log.jsonl").read_text().splitlines()]
    assert records[0]["first_round"] >= 2 and records[-1]["kind"] == "finished" and not records[-1]["reason"]
    assert "did collaborating help?" in capsys.readouterr().out
    cli.run(["swarm", "show", "runs/guest", "--peer", "late"])
    round_records = [json.loads(line) for line in log.read_text().splitlines() if '"kind":"round"' in line]
    assert any(records[0]["id"] in record["sent"] for record in round_records)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_swarm_leaves_no_process(there: Path, pupil: Path, number: signal.Signals) -> None:
    (there / "endless.toml").write_text(RECIPE.format(pupil=pupil).replace("count = 3", "count = 99999"))
    name = f"stopped-{number.name}"
    running = Command("swarm", "train", "endless.toml", "--name", name, "--quiet", cwd=there)
    try:
        logs = [there / f"runs/{name}/peers/{peer}/log.jsonl" for peer in ("p0", "p1")]
        until(lambda: all(log.is_file() and '"kind":"round"' in log.read_text() for log in logs))
        assert len(_session(running.pid)) >= 3
        if number == signal.SIGINT:  # as a terminal does
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        _, output = running.communicate(timeout=60)
        assert (running.returncode, output) == (130, "planaria: interrupted\n")
        until(lambda: not _session(running.pid))
    finally:
        if _session(running.pid):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def _session(leader: int) -> list[int]:
    """Processes of a session that are there and no zombies."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(process.name))
    return found


def test_settle_prints_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(settle, "--hops", "3", "--seeds", "3") == 0
    output = capsys.readouterr().out
    assert (
        "f = 1 of 4 members Byzantine" in output
        and "hop 1 is dry" in output
        and "an honest party lost credits" in output
    )
    assert "164" in output, "messages of three hops"


@pytest.mark.parametrize("wrong", [["--hops", "0"], ["--faulty", "-1"], ["--seeds", "0"]])
def test_invalid_settle_arguments_are_refused_in_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "use " in refused(capsys, settle, *wrong)


DRILL = """
size = 2
policy = {{ kind = "pretrained", options.path = "{pupil}" }}
rounds = {{ count = 2, prompts = 2, group = 4 }}
evaluate = {{ every = 1, problems = 10, watch = ["text"] }}

[drill]
seeds = [1, 2]
last = 1

[drill.arms."control"]
peers.p1.attack = {{ kind = "text", dose = 0.0 }}

[drill.arms."attacked"]
peers.p1.attack = {{ kind = "text" }}
defence.checks = "surprisal, duplicates, steps"

[drill.controls]
"attacked" = "control"
"""


def test_a_dry_run_of_a_drill_prints_its_arms_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["compare", "drills/schools", "--dry-run", "--seeds", "7", "--arms", "ORDER, defended,STYLE"]) == 0
    shown = capsys.readouterr().out
    assert "schools: 3 arms, seed 7" in shown and "would be in   runs/schools-drill" in shown
    rows = [line.split("  ")[1].strip() for line in shown.splitlines() if "0 of 1" in line]
    assert rows == ["control", "ORDER, defended", "STYLE"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_drill_reports_its_arms_and_is_resumed_after_moving(
    tmp_path: Path, pupil: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(DRILL.format(pupil=pupil))
    assert cli.run(["compare", "tiny.toml", "--seeds", "1", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "attacked" in shown and "TEXT success" in shown and "every peer's accuracy" in shown
    found = Drill.model_validate_json(Path("runs/tiny-drill/drill.json").read_text())
    assert [(arm.name, arm.control, arm.attackers) for arm in found.arms] == [
        ("control", "", []),
        ("attacked", "control", ["p1"]),
    ]
    stopped, misjudged = found.arm("attacked").layer("all layers")
    assert stopped.eligible > 0 == misjudged.eligible, "the only other peer attacks"
    assert Path("runs/tiny-drill/report.html").stat().st_size > 10_000

    Path("runs").rename("elsewhere")
    monkeypatch.setattr(module, "LiveSwarm", None)  # running an arm would fail
    assert cli.run(["compare", "tiny.toml", "--seeds", "1", "--quiet", "--out", "elsewhere"]) == 0
    again = Drill.model_validate_json(Path("elsewhere/tiny-drill/drill.json").read_text())
    assert again == found

    monkeypatch.setattr(result_cache, "__version__", "9.9")
    capsys.readouterr()
    with pytest.raises(TypeError):  # it is run
        cli.run(["compare", "tiny.toml", "--seeds", "1", "--out", "elsewhere"])
    assert f"run again, it was made by planaria {__version__}, this is 9.9" in capsys.readouterr().out
