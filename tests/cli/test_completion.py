"""Shell completion: the words that bash offers after TAB, and the scripts of all shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import refused
from planaria import cli
from planaria.cli.completion import DESCRIBING, REQUEST, SHELLS

SOURCE = Path(__file__).parents[2] / "src"
OFFERED = {
    "planaria tr": ["train "],
    "planaria ru": ["run "],
    "planaria run ": ["accept", "replay", "chaos", "diagnose"],
    "planaria swarm j": ["join "],
    "planaria swarm train ": ["arithmetic_swarm", "code_swarm", "mine.toml", "runs/"],
    "planaria swarm  join a": ["arithmetic_swarm "],
    "planaria train swarm join ": [],
    "planaria train d": ["demo "],
    "planaria compare re": ["recovery "],
    "planaria swarm drill drills/al": ["drills/alone "],
    "planaria experts add r": ["runs/one", "runs/"],
    "planaria report runs/on": ["runs/one "],
    "planaria train --resume runs/": ["runs/one", "runs/other/"],
    "planaria train demo --optim.b": ["--optim.beta1", "--optim.beta2"],
    "planaria train demo --engine ": ["fleet", "inline", "simulate"],
    "planaria train demo --pipeline.order=g": ["gpipe "],
}
"""typed → offered"""
ASK = """
source <(planaria completion bash)
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:' COMPREPLY=()
    _python_argcomplete planaria
    (IFS=,; echo "${COMPREPLY[*]}")
done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.json").touch()
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "mine.toml").touch()
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_the_valid_next_words(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    programs = tmp_path_factory.mktemp("bin")
    (programs / "planaria").write_text(f'#!/bin/sh\nexec {sys.executable} -m planaria "$@"\n')
    (programs / "planaria").chmod(0o755)
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}
    typed = "\n".join(OFFERED) + "\n"
    done = subprocess.run(
        ["bash", "-c", ASK], input=typed, cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    offered = [line.split(",") if line else [] for line in done.stdout.splitlines()]
    assert dict(zip(OFFERED, offered, strict=True)) == OFFERED


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert REQUEST in script and "planaria" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)


@pytest.mark.parametrize("shell", DESCRIBING)
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("planaria sw", "swarm{}peers that do not trust each other: train, join"),
        ("planaria swarm re", "realign{}repair a model that learned unwanted behaviour"),
        ("planaria swarm train --log-l", "--log-level{}debug, info, warning or error"),
        ("planaria train demo --optim.beta1", "--optim.beta1{}decay of the first moment (default 0.9)"),
    ],
)
def test_zsh_and_fish_show_the_help_text_of_commands_and_flags(
    shell: str, typed: str, offered: str, tmp_path: Path
) -> None:
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": shell,
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "offered"),
        "COMP_LINE": typed,
        "COMP_POINT": str(len(typed)),
    }
    if shell == "fish":
        asked["_ARGCOMPLETE_DFS"] = "\t"
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "planaria"], env=os.environ | asked | {"PYTHONPATH": path}, check=True, timeout=60
    )
    (line,) = (tmp_path / "offered").read_text().splitlines()
    assert line.startswith(offered.format(":" if shell == "zsh" else "\t"))


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "completion", "tcsh")
