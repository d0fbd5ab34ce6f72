"""Shell completion: suggestions of bash, zsh and fish after TAB, and the scripts of all shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.cli.entry import COMPLETE

SOURCE = Path(__file__).parents[2] / "src"
SHELLS = ("bash", "zsh", "fish")
OFFERED = {
    "planaria tr": ["train"],
    "planaria ru": ["run"],
    "planaria run ": ["chaos", "check"],
    "planaria swarm j": ["join"],
    "planaria swarm train ": ["arithmetic_swarm", "code_swarm"],
    "planaria swarm  join a": ["arithmetic_swarm"],
    "planaria train swarm join ": [],
    "planaria train d": ["demo"],
    "planaria compare re": ["recovery"],
    "planaria compare drills/al": ["drills/alone"],
    "planaria experts edit r": ["runs/one"],
    "planaria report runs/on": ["runs/one"],
    "planaria train --resume runs/": ["runs/one"],
    "planaria train demo --optim.b": ["--optim.beta1", "--optim.beta2"],
    "planaria train demo --engine ": ["fleet", "inline", "simulate"],
    "planaria experts edit runs/one --merge d": ["dare", "dume"],
    "planaria train demo --recovery.options.bits 4 --see": ["--seed"],
    "planaria train demo --train.start --quiet --see": ["--seed"],
}
"""typed → offered; where nothing is offered, the shell completes files"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.json").touch()
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "mine.toml").touch()
    return tmp_path


def answer(shell: str, typed: str = "", folder: Path | None = None) -> str:
    """Return what planaria prints for a shell's request: its script, or with ``typed`` the words to offer."""
    variables = {
        COMPLETE: f"{'complete' if typed else 'source'}_{shell}",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(f"{typed}x".split()) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    words = [sys.executable, "-m", "planaria"]
    done = subprocess.run(words, env=os.environ | variables, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.strip("\n")


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("typed", OFFERED)
def test_the_valid_next_words_are_offered(typed: str, folder: Path) -> None:
    assert answer("bash", typed, folder).split() == OFFERED[typed]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    programs = tmp_path_factory.mktemp("bin")
    (programs / "planaria").write_text(f'#!/bin/sh\nexec {sys.executable} -m planaria "$@"\n')
    (programs / "planaria").chmod(0o755)
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}
    script = (
        'eval "$1"; COMP_WORDS=(planaria train d); COMP_CWORD=2; _planaria_completion planaria; echo "${COMPREPLY[*]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", answer("bash")], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "demo\n", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    script = answer(shell)
    assert COMPLETE in script and "planaria" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)


@pytest.mark.parametrize(("shell", "between"), [("zsh", '":"'), ("fish", "\t")])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("planaria tr", "train{}Train a recipe, or resume a run"),
        ("planaria swarm re", "realign{}Repair a model that learned unwanted"),
        ("planaria swarm train --log-l", "--log-level{}debug, info, warning or error"),
        ("planaria train demo --optim.beta1", "--optim.beta1{}decay of the first moment (default 0.9)"),
    ],
)
def test_zsh_and_fish_show_the_help_text_of_commands_and_flags(
    shell: str, between: str, typed: str, offered: str
) -> None:
    assert offered.format(between) in answer(shell, typed)
