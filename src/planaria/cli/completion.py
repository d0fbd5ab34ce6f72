"""Shell completion: commands, flags and their values, recipes, and the folders of runs.

The shell runs the program at each TAB (argcomplete), so the completions match the installed version.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from planaria.cli.flags import SET, command, explain
from planaria.config import recipe, shipped

REQUEST = "_ARGCOMPLETE"
"""set by the shell when it requests completions"""
SHELLS = ("bash", "zsh", "fish")
DESCRIBING = ("zsh", "fish")
"""shells that show the help text of a flag beside it"""
RUNS = Path("runs")
TABLES = {"compare": "compare", "experts": "experts", "drill": "drill", "swarm": "swarm", "swarm join": "swarm"}
"""command → kind of its recipes; default: train"""
Completer = Callable[..., Iterator[str]]


def add(commands: Any) -> None:
    completion = command(commands, "completion", "print the completion script of a shell", _completion, code=False)
    completion.add_argument("shell", choices=SHELLS, help="for bash: source <(planaria completion bash)")


def _completion(given: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["planaria"], shell=given.shell).strip())
    return 0


def complete(parser: argparse.ArgumentParser, commands: Collection[str]) -> None:
    """Answer the shell's request, and end the process. Of a command of two words, a shell sees only the first."""
    from argcomplete import autocomplete

    second_words = tuple(name for name in commands if " " in name)
    line, point = joined(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]), second_words)
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(point)}
    _attach(parser, [], second_words, line)
    autocomplete(parser, always_complete_options=False, exclude=second_words)


def joined(line: str, point: int, second_words: tuple[str, ...]) -> tuple[str, int]:
    r"""Return the line and the cursor's position, with a command of two words as one (``swarm\\ join``)."""
    for first, second in (pair.split() for pair in second_words):
        if found := re.match(rf"(\s*\S+\s+{first})\s+(?={second}\s)", line[:point]):
            head = f"{found[1]}\\ "
            return head + line[found.end() :], point + len(head) - found.end()
    return line, point


def _attach(parser: argparse.ArgumentParser, words: list[str], second_words: tuple[str, ...], line: str) -> None:
    """Attach a completer to each argument below ``parser``, of the command ``words``, while ``line`` is completed."""
    name = " ".join(words)
    if os.environ.get("_ARGCOMPLETE_SHELL") in DESCRIBING and words and words[-1].replace(" ", "\\ ") in line:
        explain(parser, every=True)
    seconds = [pair.partition(" ")[2] for pair in second_words if pair.partition(" ")[0] == name]
    by_dest: Mapping[str, Completer] = {
        "recipe": _recipes(TABLES.get(name, "train"), seconds),
        "source": _recipes(None, []),
        "run": _paths("run"),
        "resume": _paths("run"),
        "experts": _paths("run"),
    }
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                _attach(below, [*words, word], second_words, line)
        elif action.dest in by_dest:
            action.completer = by_dest[action.dest]  # type: ignore[attr-defined]
        elif action.dest.startswith(SET) and "|" in str(action.metavar):
            action.completer = _one_of(str(action.metavar).split("|"))  # type: ignore[attr-defined]


def _one_of(values: list[str]) -> Completer:
    return lambda **_: iter(values)


def _recipes(kind: str | None, first: list[str]) -> Completer:
    """Complete with the words ``first``, the shipped recipes of a kind (None: all), and TOML files."""

    def candidates(prefix: str, **_: Any) -> Iterator[str]:
        yield from first
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
