from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planaria import cli
from planaria.cli import entry
from planaria.cli.usage_errors import RENAMED_COMMANDS, WITH_RECIPE
from planaria.common.errors import RunStopped, UserError
from planaria.config import recipe
from planaria.config.shipped import find
from planaria.lab.commands.trace import trace
from support import command_line
from support.command_line import commands


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line on stderr with which a command fails, without its prefix."""
    return command_line.refused(capsys, *arguments, silent=True).removeprefix("planaria: ").strip()


def test_a_dry_run_prints_the_resolved_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "demo", "--dry-run", "--model.dim", "64", "--optim.lr=1e-4"]) == 0
    out = capsys.readouterr().out
    assert "dim = 64" in out
    assert "lr = 0.0001" in out


def test_a_dry_run_warns_of_too_few_steps_for_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"--exchange.replicas": "2", "--exchange.kind": "diloco", "--train.steps": "12"}
    assert cli.run(["train", "demo", "--dry-run", *(word for flag in flags.items() for word in flag)]) == 0
    assert "# no round of the exchange: exchange.options.every = 500, train.steps = 12; " in capsys.readouterr().out


RATES = ("--hourly", "0.1", "--step-seconds", "9", "--stages", "4", "--steps", "9")
MOST = 26
"""limit of the number of commands"""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "demo", "--modl.dim", "3"], "--modl.dim: unknown flag; did you mean '--model.dim'?"),
        (
            ["train", "demo", "--exchange.every", "3"],
            "--exchange.every: unknown flag; set an option of --exchange.kind as --exchange.options.every",
        ),
        (["train", "demo", "--model.dimm=3"], "--model.dimm: unknown flag; did you mean '--model.dim'?"),
        (["train"], "train: name a recipe such as demo (`planaria recipes` lists more), or pass --resume runs/NAME"),
        (["train", "demo", "--routing.kind", "ful", "--dry-run"], "did you mean 'full'?"),
        (["train", "demo", "--observe.trackers", "tensorbord", "--dry-run"], "did you mean 'tensorboard'?"),
        (["swarm", "train", "arithmetic_swarm", "--task.name", "sms", "--dry-run"], "did you mean 'sums'?"),
        (["train", "demo", "--recovery.strategy", "x", "--dry-run"], "known here: checkfree"),
        (["train", "demmo"], "demmo: no such recipe; did you mean 'demo'?"),
        (["compare", "demo"], "demo has no [compare] table; run it without one: `planaria train demo`"),
        (["recipes", "demmo"], "demmo: no such recipe; did you mean 'demo'?"),
        (["train", "demo", "extra"], "extra: unexpected argument; settings are flags, such as --train.steps 200; see"),
        (["train", "demo", "steps=20"], "steps=20: unexpected argument; use --train.steps 20"),
        (["train", "demo", "train.steps=20"], "train.steps=20: unexpected argument; use --train.steps 20"),
        (["generate", "runs/x", "a text"], "a text: unexpected argument; use --prompt 'a text'"),
        (["eval", "runs/x", "--omits", "3"], "--omits: unknown flag; did you mean '--omit'?"),
        (["serve", "model", "--port", "80"], "--port: unknown flag; use --at HOST:PORT, such as --at 127.0.0.1:8080"),
        (["train", "demo", "--live-port", "80"], "--live-port: unknown flag; use --live-at HOST:PORT"),
        (["train", "demo", "--resume", "runs/x"], "use a recipe or a run to resume, not both"),
        (["trian"], "trian: unknown command; did you mean 'train'?"),
        (["diagnoze"], "diagnoze: unknown command; "),
        (["measure"], "measure: unknown command; did you mean 'network measure'?"),
        (["swarm-audit", "x"], "swarm-audit: unknown command; did you mean 'swarm audit'?"),
        (["run", "cheek", "runs/x"], "run cheek: unknown command; did you mean 'check'?"),
        (["swarm", "realing"], "swarm realing: unknown command; did you mean 'realign'?"),
        (["run"], "run: use one of its commands: chaos, check; see `planaria run --help`"),
        (["run", "chaos", "nowhere", "--kill", "stage=1"], "nowhere"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere"),
        (["run", "chaos", "nowhere"], "run chaos: use one fault, such as --kill stage=1"),
        (
            ["run", "chaos", "x", "--kill", "stage=1", "--slow-host", "stage=1"],
            "--kill and --slow-host: use one fault",
        ),
        (["run", "check", "nowhere"], "nowhere"),
        (["run", "check", "nowhere", "--accept"], "nowhere"),
        (["report", "runs/x", "--perfetto", "trace.json"], "unexpected argument; use --perfetto --to trace.json"),
        (["report", "runs/x", "--waits", "--csv", "there"], "--csv there requires a report; remove --waits"),
        (["report", "runs/x", "--waits", "--to", "x"], "--to x cannot be combined with --waits"),
        ([trace, "x", *RATES, "--exempt", "1", "2"], "2: unexpected argument; use --exempt 2"),
        ([trace, "x", *RATES, "--failure-domain", "y"], "'y' is not one of 'stage', 'adjacent', 'machine', 'region'"),
        (["eval", "runs/x", "--worst"], "requires an ensemble; pass --experts RUN"),
        (["eval", "runs/x", "--floor", "0.1"], "--floor 0.1 requires --worst"),
        (["experts", "merge", "x", "--add", "y", "--to", "z"], "is now `planaria experts edit MODEL --add EXPERT --to"),
        (["swarm", "show", "x", "--credits", "--round", "1"], "--round 1 selects completions; remove --credits"),
        (["swarm", "show", "x", "--board", "y"], "--board y requires --certificate"),
        (["swarm", "show", "x", "--credits", "--certificate"], "--credits is about a run, --certificate about a model"),
        (["swarm", "drill", "--settlement"], "--settlement is now `python -m planaria.swarm.commands.settlement`"),
        (["compare", "drills", "--steps", "5"], "--steps 5 is for a comparison of training runs, and "),
        (["compare", "drills", "--dry-run", "--to", "x"], "--to x is for a comparison of training runs, and "),
        (["compare", "drills", "--train.steps", "3"], "--train.steps 3 is not a setting of a swarm, and "),
        (["compare", "recovery", "--rounds.count", "3"], "--rounds.count 3 is a setting of a swarm, and "),
        (["compare", "recovery", "--repair"], "--repair is for a drill, and "),
        (["compare", "drills", "--seeds", "1,1", "--quiet"], "use one or more distinct seeds"),
        (["compare", "arithmetic_swarm"], "is a recipe for `planaria swarm train`"),
        (["checkpoint", "convert", "x"], "checkpoint convert x: pass --to FOLDER, or --from FORMAT"),
        (["checkpoint", "convert", "x", "--to", "y", "--names", "z"], "--names z requires --from"),
        (["checkpoint", "convert", "x", "--from", "dcp"], "--from dcp: pass --recipe RECIPE"),
        (["checkpoint", "convert", "x", "--from", "dcp", "--to", "y"], "--to y is for a checkpoint of a run"),
        (["recipes", "--to", "mine.toml"], "name the recipe to copy, as in `planaria recipes demo --to mine.toml`"),
        (["plan", "demo", "--moves", "3"], "--moves 3 requires --update"),
        (["network", "relay"], "Missing option '--key-file'; see `planaria network relay --help`"),
        (["export", "runs/x"], "Missing option '--to'; see `planaria export --help`"),
        (["train", "demo", "--model.dim"], "--model.dim: requires a value"),
        (["train", "demo", "--train.start", "--quiet"], "--train.start has no value; use --train.start VALUE"),
        (["generate", "x", "--prompt", "--tokens", "3"], "--prompt has no value; use --prompt VALUE"),
        (["report", "x", "--perfetto=y"], "report --perfetto= is now `planaria report RUN --perfetto --to FILE`"),
        (["train", "demo", "--recovery.options.bits"], "--recovery.options.bits has no value"),
        (["advise", "demo", "--size.options.x", "1"], "--size.options.x: unknown flag; see `planaria advise --help`"),
        (["--color"], "--color: unknown flag; "),
        (["report", "nowhere"], "nowhere"),
        (["export", "nowhere", "--to", "there"], "nowhere"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[Any], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, *arguments)


@pytest.mark.parametrize("old", RENAMED_COMMANDS)
def test_an_earlier_spelling_is_refused_with_the_new_one(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    new, known = RENAMED_COMMANDS[old], dict(commands())
    if new.startswith("python -m "):
        assert all(find_spec(module) for module in re.findall(r"python -m ([\w.]+)", new))
        assert refused(capsys, *old.split(), "x") == f"{old} is now `{new}`"
        return
    name = " ".join(new.split()[:2])
    name = name if name in known else new.split()[0]
    flags = [flag for param in known[name].params for flag in param.opts] if name in known else []
    assert name in known or new in ("network", "--show-completion")
    assert not [word for word in new.split()[1:] if word.startswith("-") and word not in flags]
    for more in ([], ["runs/x"], ["--help"]):
        assert refused(capsys, *old.split(), *more) == f"{old} is now `planaria {new}`"


@pytest.mark.parametrize("group", WITH_RECIPE)
@pytest.mark.parametrize("word", ["demo", "mine.toml", "--dry-run", "runs"])
def test_a_recipe_after_a_group_is_refused_with_the_command(
    group: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert refused(capsys, group, word, "--quiet") == f"{group} {word} is now `planaria {group} train {word}`"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_lack_of_memory_or_threads_is_reported_in_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*given: object) -> None:
        raise error

    monkeypatch.setattr(entry, "run", short)
    assert refused(capsys, "report", "x").startswith("not enough memory")
    error.args = ("something else",)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="something else"):
            cli.main(["report", "x"])


@pytest.mark.parametrize("command", ["train", "plan", "compare", "swarm train", "experts train"])
def test_a_run_is_refused_as_a_recipe(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    line = f"{tmp_path} is a run, not a recipe; continue it with `planaria train --resume {tmp_path}`"
    assert refused(capsys, *command.split(), str(tmp_path)) == line
    (tmp_path / "config.json").unlink()
    assert f"{tmp_path} is a folder, not a recipe; use a TOML file" in refused(capsys, *command.split(), str(tmp_path))


def test_help_is_printed_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: planaria ")


def test_help_lists_at_most_20_commands_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    listed = re.findall(r"^  ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    known = dict(commands())
    assert len(listed) <= 20 and sorted(listed) == sorted({name.partition(" ")[0] for name in known})
    assert len(known) <= MOST


@pytest.mark.parametrize("group", ["run", "checkpoint", "experts", "swarm", "network", "lab"])
def test_the_help_of_a_group_lists_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([group, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    below = [name.partition(" ")[2] for name, _ in commands() if name.startswith(f"{group} ")]
    assert below and all(f"\n  {name} " in out for name in below)


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 45
    assert "--train.steps STEPS" in out and "--optim.eps" not in out and "--help-all" in out


def test_the_whole_help_of_a_process_leaves_the_short_one_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flag in ("--help", "--help-all", "--help"):
        assert cli.run(["train", flag]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[2] and "--optim.eps" in shown[1] and "; inline: all stages in this process" in shown[1]


def test_every_setting_is_in_the_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help-all"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    settings = [name for name, _ in recipe.fields() if not name.endswith(".options")]  # declared by each choice
    assert not [name for name in settings if f"--{name} " not in out]


@pytest.mark.parametrize("words", [[], ["--help"], ["trian"], ["chaos"], ["swarm", "--help"]])
def test_help_and_errors_import_neither_torch_nor_rich_nor_pydantic(words: list[str]) -> None:
    code = f"""
import sys
from planaria.cli import main
try:
    main({words!r})
except SystemExit:
    assert not {{"torch", "rich", "pydantic"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_error_in_an_arm_names_the_arm(tmp_path: Path) -> None:
    shipped = find("exchange").read_text(encoding="utf-8")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'{shipped}\n[compare.arms.wrong.exchange]\nkind = "noloco"\noptions.evry = 5\n')
    with pytest.raises(UserError, match=r"mine\.toml: compare\.arms\.wrong: exchange\.options\.evry: no option of"):
        cli.run(["compare", str(recipe)])


def test_messages_omit_the_number_of_an_os_error() -> None:
    with pytest.raises(OSError) as missing:
        Path("nowhere").read_text()
    assert str(missing.value).startswith("[Errno 2]")
    for kind in (UserError, RunStopped):
        shown = str(kind(f"cannot read it ({missing.value}); create it"))
        assert shown == "cannot read it (No such file or directory: 'nowhere'); create it"


def test_a_missing_run_is_refused_with_the_runs_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mine", "yours"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    expected = "runs/nope: not a run (no such folder); runs in runs: mine, yours"
    for command in (["report", "runs/nope"], ["train", "--resume", "runs/nope"]):
        assert refused(capsys, *command) == expected
