"""Function trees: divide a program into functions, write several versions of each, and keep one by consensus.

FunCoder (arXiv 2405.20092): a first version, at a low temperature, may declare stubs, and each stub is solved in the
same way. Given its finished parts, the function is then rewritten several times at a higher temperature. Versions are
compared by their results on calls; the model writes the calls of a part. The default rule is the paper's equation 1;
``choose = "plurality"`` counts whole behaviours instead. Prompts differ from the released code. No model is trained.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planaria.swarm.checks.prompted_judge import Writer
from planaria.swarm.checks.votes import most_agreeing, most_common
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.sandbox.sandbox import LIMITS, Limits, parse_python
from planaria.swarm.tasks import calls as calling
from planaria.swarm.tasks.base import Behaviour
from planaria.swarm.tasks.calls import Call
from planaria.swarm.tasks.programs import FENCE, OPENING

DEPTH = 6
"""maximum depth; stubs declared below it are not written"""
PARTS = 6
"""maximum parts of one function"""
VERSIONS = 10
"""versions of a function besides the first"""
Selection = Literal["agreement", "plurality"]
CHOICES: Mapping[Selection, Callable[[Sequence[Behaviour]], int]] = {
    "agreement": most_agreeing,
    "plurality": most_common,
}
"""rules that select one of several versions"""


@dataclass
class Tree:
    """Program writer. ``sure`` and ``bold`` are one model at a low and a high temperature."""

    sure: Writer
    bold: Writer
    seed: int = 0
    versions: int = VERSIONS
    limits: Limits = LIMITS
    choose: Selection = "agreement"
    requests: int = 0
    """requests to the model so far"""
    runs: int = 0
    """programs executed so far; one execution makes all calls"""
    _visited: set[str] = field(default_factory=set)

    def once(self, prompt: str, name: str) -> str:
        """Write one program; empty if the model wrote none."""
        return next(iter(self._write_programs(self.sure, _whole_prompt(prompt, name), [name], 1)), "")

    def vote(self, prompt: str, name: str, calls: Sequence[Call]) -> str:
        """Write several whole programs and return the one that ``choose`` selects; empty if none was written."""
        request = _whole_prompt(prompt, name)
        first = self._write_programs(self.sure, request, [name], 1)
        return self._choose_program([*first, *self._write_programs(self.bold, request, [name], self.versions)], calls)

    def tree(self, prompt: str, name: str, calls: Sequence[Call]) -> str:
        """Write a program by division and voting; empty if none was written."""
        self._visited = set()
        return self._solve(prompt, name, calls, 0)

    def _solve(self, wanted: str, name: str, calls: Sequence[Call], depth: int) -> str:
        """Write the function ``name`` with all its parts."""
        self._visited.add(name)
        (first, *_) = [*self._write_programs(self.sure, _divide_prompt(wanted, name), [name, str(depth)], 1), ""]
        parts = []
        for stub in _stubs(first, name)[:PARTS]:
            if depth < DEPTH and stub.name not in self._visited:
                of_part = self._write_calls(ast.unparse(stub), stub.name)
                parts.append(self._solve(ast.unparse(stub), stub.name, of_part, depth + 1))
        done = "\n\n".join(filter(None, parts))
        again = self._write_programs(
            self.bold, _conquer_prompt(wanted, name, done), [name, str(depth), "again"], self.versions
        )
        candidates = [_join_parts(done, version, name) for version in [*filter(None, [first]), *again]]
        return self._choose_program(candidates, calls)

    def _choose_program(self, programs: Sequence[str], calls: Sequence[Call]) -> str:
        """Return the program that ``choose`` selects by its results on ``calls``; the first if there are no calls.

        It executes each of N programs once, on all |X| calls together.
        """
        compared = list(calls)[: calling.MAX_CALLS]
        if not compared or len(programs) < 2:
            return next(iter(programs), "")
        self.runs += len(programs)
        return programs[CHOICES[self.choose]([calling.run_calls(each, compared, self.limits) for each in programs])]

    def _write_calls(self, stub: str, name: str) -> list[Call]:
        """Return calls of a part written by the model, and variants of them."""
        (text,) = self._request_texts(self.sure, _calls_prompt(stub, name), [name, "calls"], 1)
        result = {}
        for line in (text or "").splitlines()[: calling.MAX_CALLS]:
            try:
                call = calling.parse_call(line.strip(), name)
            except ValueError:
                continue
            result[call.source] = call
        own = list(result.values())[: calling.MAX_CALLS // 2]
        return [*own, *calling.variants(own, derive_seed(self.seed, "tree", name), len(own))]

    def _write_programs(self, writer: Writer, request: str, purpose: Sequence[str], count: int) -> list[str]:
        results = [_program(text or "") for text in self._request_texts(writer, request, purpose, count)]
        return [program for program in results if parse_python(program).body]

    def _request_texts(self, writer: Writer, request: str, purpose: Sequence[str], count: int) -> list[str | None]:
        self.requests += count
        return writer.write([request] * count, [derive_seed(self.seed, "tree", *purpose, n) for n in range(count)])


def _program(text: str) -> str:
    """Return the last fenced block of Python in a text; the whole text if it has no fence."""
    if OPENING not in text:
        return "" if FENCE in text else text
    return text.rpartition(OPENING)[2].partition(FENCE)[0].strip("\n")


def _stubs(program: str, name: str) -> list[ast.FunctionDef]:
    functions = [node for node in parse_python(program).body if isinstance(node, ast.FunctionDef) and node.name != name]
    return [node for node in functions if all(_is_placeholder(line) for line in node.body)]


def _is_placeholder(line: ast.stmt) -> bool:
    if isinstance(line, ast.Raise):
        return "NotImplemented" in ast.unparse(line)
    return isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))


def _join_parts(done: str, version: str, name: str) -> str:
    """Return the finished parts followed by a version that uses them, without its copies of the parts."""
    finished = {node.name for node in parse_python(done).body if isinstance(node, ast.FunctionDef)} - {name}
    lines = parse_python(version).body
    own = [ast.unparse(n) for n in lines if not (isinstance(n, ast.FunctionDef) and n.name in finished)]
    return "\n".join([*filter(None, [done]), *own])


def _whole_prompt(prompt: str, name: str) -> str:
    return f"{prompt.rstrip()}\n\nWrite the function {name} in Python, as one block that begins with {OPENING}.\n"


def _divide_prompt(wanted: str, name: str) -> str:
    return (
        f"{wanted.rstrip()}\n\nWrite the function {name} in Python, as one block that begins with {OPENING}. Where a "
        "part of it is a task of its own, call a function for it, and declare that function in the same block with a "
        "docstring and the body `pass`: it will be written later.\n"
    )


def _conquer_prompt(wanted: str, name: str, done: str) -> str:
    available = f"These functions are there and may be called:\n\n{OPENING}\n{done}\n{FENCE}\n\n" if done else ""
    return (
        f"{available}{wanted.rstrip()}\n\nWrite the function {name} alone, as one block that begins with {OPENING}.\n"
    )


def _calls_prompt(stub: str, name: str) -> str:
    return (
        f"{OPENING}\n{stub}\n{FENCE}\n\nWrite eight calls of {name} with unlike arguments, all of them literals, one "
        "in each line and nothing else.\n"
    )
