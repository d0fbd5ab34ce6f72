"""Shell completion: commands, flags and their values, recipes, and the folders of runs.

The shell runs the program at each TAB (argcomplete), so the completions match the installed version.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from planaria.cli.flags import SET, Commands, command, explain, fill
from planaria.config import shipped

REQUEST = "_ARGCOMPLETE"
"""set by the shell when it requests completions"""
SHELLS = ("bash", "zsh", "fish")
DESCRIBING = ("zsh", "fish")
"""shells that show the help text of a flag beside it"""
RUNS = Path("runs")
TABLES = {
    "compare": "compare",
    "experts train": "experts",
    "swarm drill": "drill",
    "swarm train": "swarm",
    "swarm join": "swarm",
}
"""command → kind of its recipes; default: train"""
Completer = Callable[..., Iterator[str]]


def add(commands: Commands) -> None:
    completion = command(commands, "completion", "print the completion script of a shell", _completion, code=False)
    completion.add_argument("shell", choices=SHELLS, help="for bash: source <(planaria completion bash)")


def _completion(given: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["planaria"], shell=given.shell).strip())
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's request, and end the process."""
    from argcomplete import autocomplete

    _attach(parser, [], os.environ["COMP_LINE"].split())
    autocomplete(parser, always_complete_options=False)


def _attach(parser: argparse.ArgumentParser, words: list[str], typed: list[str]) -> None:
    """Attach a completer to each argument of the parsers below ``parser`` whose command, ``words``, was typed."""
    fill(parser)
    if os.environ.get("_ARGCOMPLETE_SHELL") in DESCRIBING:
        explain(parser, every=True)
    by_dest: Mapping[str, Completer] = {
        "recipe": _recipes(TABLES.get(" ".join(words), "train")),
        "source": _recipes(None),
        "run": _paths("run"),
        "resume": _paths("run"),
        "experts": _paths("run"),
    }
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word in typed[len(words) + 1 : len(words) + 2]:
                if word in action.choices:
                    _attach(action.choices[word], [*words, word], typed)
        elif action.dest in by_dest:
            action.completer = by_dest[action.dest]  # type: ignore[attr-defined]
        elif action.dest.startswith(SET) and "|" in str(action.metavar):
            action.completer = _one_of(str(action.metavar).split("|"))  # type: ignore[attr-defined]


def _one_of(values: list[str]) -> Completer:
    return lambda **_: iter(values)


def _recipes(kind: str | None) -> Completer:
    """Complete with the shipped recipes of a kind (None: all), and TOML files."""

    def candidates(prefix: str, **_: Any) -> Iterator[str]:
        from planaria.config import recipe

        for name in shipped.names():
            if kind is None or kind in recipe.kinds_of(recipe.read(shipped.find(name))):
                yield name
        yield from _paths("toml")(prefix)

    return candidates


def _paths(wanted: Literal["run", "toml"]) -> Completer:
    """Complete with folders, and runs or TOML files; for an empty prefix, also with runs below ``runs``."""

    def candidates(prefix: str, **_: Any) -> Iterator[str]:
        head = prefix[: prefix.rfind("/") + 1]
        if wanted == "run" and not head and RUNS.is_dir():
            yield from (str(path) for path in sorted(RUNS.iterdir()) if _is_run(path))
        folder = Path(head or ".").expanduser()
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir() and not path.name.startswith("."):
                yield f"{head}{path.name}{'' if wanted == 'run' and _is_run(path) else '/'}"
            elif path.suffix == ".toml" and wanted == "toml":
                yield head + path.name

    return candidates


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "experts.json"))
