"""Function trees, with scripted writers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from planaria import cli
from planaria.common.errors import UserError
from planaria.swarm.policy.tree import CHOICES, DEPTH, Tree
from planaria.swarm.sandbox.sandbox import run
from planaria.swarm.tasks import calls as calling
from planaria.swarm.tasks.programs import Programs
from support.swarm.task_builders import needs_sandbox, written

pytestmark = needs_sandbox
PROBLEM = {
    "prompt": 'def spread(xs):\n    """ Largest less smallest of the absolute values of xs. """\n',
    "entry_point": "spread",
    "test": "def check(candidate):\n    assert candidate([1, -5, 3]) == 4\n    assert candidate([-2, -2]) == 0\n",
}
HIDDEN = "assert spread([-7, 2, 9, 0]) == 9\nassert spread([4]) == 0"
ONCE = "def spread(xs):\n    return max(xs) - min(xs)"
FIRST = {
    "spread": 'def sizes(xs):\n    """ All absolute values. """\n    pass\n\n'
    "def spread(xs):\n    found = sizes(xs)\n    return max(found) - min(found)",
    "sizes": 'def size(x):\n    """ The absolute value of x. """\n    raise NotImplementedError\n\n'
    "def sizes(xs):\n    return [size(x) for x in xs]",
    "size": "def size(x):\n    return x",
}
RIGHT = {name: text.rpartition("\n\n")[2] for name, text in FIRST.items()} | {
    "size": "def size(x):\n    return -x if x < 0 else x"
}
WRONG = {"spread": ONCE, "sizes": "def sizes(xs):\n    return [", "size": "def size(x):\n    return x"}
CALLS = {"sizes": "sizes([1, -2])\nsizes([-3, 4, 0])\n", "size": "size(3)\nsize(-4)\nnothing\nsize(0)\n"}


@dataclass
class Scripted:
    """Writes three right versions of every five when it rewrites a function."""

    reserved: Sequence[str] = ()
    prompts: list[str] = field(default_factory=list)

    def write(self, requests: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        self.prompts += requests
        return [self.one(request, n) for n, request in enumerate(requests)]

    def one(self, request: str, n: int) -> str | None:
        if found := re.search(r"eight calls of (\w+)", request):
            return CALLS[found[1]]
        (name,) = re.findall(r"Write the function (\w+)", request)
        if "alone" in request:
            return f"So:\n```python\n{(RIGHT if n % 5 in (0, 2, 4) else WRONG)[name]}\n```\nand so on"
        return f"```python\n{FIRST[name] if 'declare' in request else ONCE}\n```"


def problems(path: Path) -> Programs:
    return Programs(path=str(written(path / "one.jsonl", PROBLEM, PROBLEM)))


@pytest.mark.slow
def test_a_tree_of_three_levels_solves_what_whole_programs_do_not(tmp_path: Path) -> None:
    task, writer = problems(tmp_path), Scripted()
    calls = task.calls(0, 5)
    tree = Tree(writer, writer)
    once = tree.once(PROBLEM["prompt"], "spread")
    assert run(once, HIDDEN).kind == "failed"
    assert run(tree.vote(PROBLEM["prompt"], "spread", calls), HIDDEN).kind == "failed", "all whole programs are alike"
    found = tree.tree(PROBLEM["prompt"], "spread", calls)
    assert run(found, HIDDEN).kind == "ok"
    assert re.findall(r"def (\w+)", found) == ["size", "sizes", "spread"], "parts come first"
    assert tree.runs and tree.requests == len(writer.prompts)


def test_agreement_counts_calls_and_plurality_counts_whole_behaviours() -> None:
    wrong = [f"def f(x):\n    return 9 if x == {n} else x" for n in (1, 2, 3)]
    same = ["def f(x):\n    return 7 if x < 4 else x"] * 2
    calls = [calling.parse_call(f"f({n})", "f") for n in range(1, 6)]
    right = "def f(x):\n    return x"
    chosen = {
        choose: Tree(Scripted(), Scripted(), choose=choose)._choose_program([*same, *wrong, right], calls)
        for choose in CHOICES
    }
    assert chosen == {"agreement": right, "plurality": same[0]}


class Endless(Scripted):
    """Every function it writes declares another one."""

    def one(self, request: str, n: int) -> str | None:
        if "eight calls of" in request:
            return None
        (name,) = re.findall(r"Write the function (\w+)", request)
        number = int(name[1:])
        return f"```python\ndef f{number + 1}(x):\n    pass\n\ndef f{number}(x):\n    return x\n```"


def test_endless_stubs_end_at_the_maximum_depth() -> None:
    writer = Endless()
    Tree(writer, writer, versions=2).tree("def f0(x):", "f0", [])
    divided = [re.findall(r"function (f\d+)", text)[0] for text in writer.prompts if "declare" in text]
    assert divided == [f"f{n}" for n in range(DEPTH + 1)]


def test_mutually_recursive_functions_are_written_once() -> None:
    class Round(Endless):
        def one(self, request: str, n: int) -> str | None:
            (name,) = re.findall(r"Write the function (\w+)", request) or ["f0"]
            other = "f1" if name == "f0" else "f0"
            return f"```python\ndef {other}(x):\n    pass\n\ndef {name}(x):\n    return x\n```"

    writer = Round()
    found = Tree(writer, writer, versions=1).tree("def f0(x):", "f0", [])
    assert sum("declare" in text for text in writer.prompts) == 2 and run(found, "assert f0(3) == 3").kind == "ok"


def test_a_silent_writer_gives_an_empty_program() -> None:
    class Silent(Scripted):
        def one(self, request: str, n: int) -> str | None:
            return None

    tree = Tree(Silent(), Silent())
    assert tree.tree("def f(x):", "f", []) == tree.once("def f(x):", "f") == tree.vote("def f(x):", "f", []) == ""


@pytest.mark.parametrize("how", ["once", "tree"])
def test_the_command_reports_a_model_that_writes_no_program(
    tmp_path: Path, pupil: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    problems(tmp_path)
    words = ["generate", str(pupil), "--task", f"programs:{tmp_path / 'one.jsonl'}", "--problem", "0", "--as", how]
    assert cli.run([*words, "--tokens", "8"]) == 0
    assert "the model wrote no Python" in capsys.readouterr().err, "the request exceeds the model's context"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model"], "pass --prompt TEXT, --chat, or --task programs:PATH --problem N"),
        (["model", "--prompt", "x", "--as", "vote"], "pass --prompt TEXT, --chat, or"),
        (["model", "--prompt", "x", "--choose", "plurality"], "pass --prompt TEXT, --chat, or"),
        (["model", "--task", "programs:PATH", "--problem", "0", "--choose", "plurality"], "requires --as vote"),
        (["model", "--task", "sums", "--problem", "0"], "use programs:PATH"),
        (["model", "--task", "programs:PATH"], "pass --problem"),
        (["model", "--task", "programs:PATH", "--problem", "7"], "has problems 0 to 1"),
        (["model", "--task", "programs:PATH", "--problem", "0", "--tokens", "0"], "--tokens 0: use 1 or more"),
        (["model", "--task", "programs:PATH", "--problem", "0", "--temperature", "1"], "be combined with --task"),
        (["model", "--task", "programs:PATH", "--problem", "0", "--prompt", "x"], "cannot be combined with --task"),
    ],
)
def test_invalid_options_are_reported_in_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    problems(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)) as found:
        cli.run(["generate", *(word.replace("PATH", str(tmp_path / "one.jsonl")) for word in words)])
    assert "\n" not in str(found.value)
