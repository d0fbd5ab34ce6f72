"""A tree of functions: a program is divided into functions that are declared and written later, and of every function
several versions are written, of which a vote keeps one.

FunCoder (arXiv 2405.20092): one version at a low temperature may declare stubs, each is solved in the same way, and the
function is then written anew several times at a higher temperature, given its finished parts. Versions are compared by
what they do on calls (:mod:`planaria.swarm.checks.votes`); of a part, the model writes the calls. Ours differ from the
released code in the vote (whole behaviours, not single results) and in the words of the requests.

It writes with a model and trains none.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from planaria.swarm.checks.prompted_judge import Writer
from planaria.swarm.checks.votes import Ballot, plurality
from planaria.swarm.draws import derived
from planaria.tasks import calls as calling
from planaria.tasks.calls import Call
from planaria.tasks.exam import parsed
from planaria.tasks.programs import FENCE, OPENING
from planaria.tasks.sandbox import LIMITS, Limits, run

DEPTH = 6
"""the deepest part: what it declares is not written any more"""
PARTS = 6
"""most parts that one function is divided into"""
VERSIONS = 10
"""written of a function, beside the first"""


@dataclass
class Tree:
    """Writes programs. ``sure`` writes what it thinks best, ``bold`` more variously: one model, colder and warmer."""

    sure: Writer
    bold: Writer
    seed: int = 0
    versions: int = VERSIONS
    limits: Limits = LIMITS
    requests: int = 0
    """that were made so far"""
    runs: int = 0
    """programs that were run so far"""
    _visited: set[str] = field(default_factory=set)

    def once(self, prompt: str, name: str) -> str:
        """A program in one go; empty if none was written."""
        return next(iter(self._written(self.sure, _whole(prompt, name), [name], 1)), "")

    def vote(self, prompt: str, name: str, calls: Sequence[Call]) -> str:
        """The program that most of several do as, all written in one go."""
        request = _whole(prompt, name)
        first = self._written(self.sure, request, [name], 1)
        return self._chosen([*first, *self._written(self.bold, request, [name], self.versions)], calls)

    def tree(self, prompt: str, name: str, calls: Sequence[Call]) -> str:
        """The program that comes of dividing and voting; empty if none was written."""
        self._visited = set()
        return self._solved(prompt, name, calls, 0)

    def _solved(self, wanted: str, name: str, calls: Sequence[Call], depth: int) -> str:
        """The function ``name`` with all that it is made of, as Python."""
        self._visited.add(name)
        (first, *_) = [*self._written(self.sure, _divide(wanted, name), [name, str(depth)], 1), ""]
        parts = []
        for stub in _stubs(first, name)[:PARTS]:
            if depth < DEPTH and stub.name not in self._visited:
                of_part = self._calls(ast.unparse(stub), stub.name)
                parts.append(self._solved(ast.unparse(stub), stub.name, of_part, depth + 1))
        done = "\n\n".join(filter(None, parts))
        again = self._written(self.bold, _conquer(wanted, name, done), [name, str(depth), "again"], self.versions)
        candidates = [_joined(done, version, name) for version in [*filter(None, [first]), *again]]
        return self._chosen(candidates, calls)

    def _chosen(self, programs: Sequence[str], calls: Sequence[Call]) -> str:
        """The first of those that most do as; the first of all where nothing can be compared."""
        calls, behaviours = list(calls)[: calling.MOST], []
        asked = calling.exam(calls)
        for program in programs if calls and len(programs) > 1 else ():
            told = run(program, asked, self.limits).told
            behaviours.append(tuple(line or None for line in told) + (None,) * (len(calls) - len(told)))
            self.runs += 1
        found = plurality([Ballot(str(n), behaviour) for n, behaviour in enumerate(behaviours)])
        holding = [n for n, behaviour in enumerate(behaviours) if any(one.holds(behaviour) for one in found)]
        return programs[holding[0] if holding else 0] if programs else ""

    def _calls(self, stub: str, name: str) -> list[Call]:
        """Calls of a part, as the model writes them, and variants."""
        (text,) = self._texts(self.sure, _ask_calls(stub, name), [name, "calls"], 1)
        found = {}
        for line in (text or "").splitlines()[: calling.MOST]:
            try:
                call = calling.read(line.strip(), name)
            except ValueError:
                continue
            found[call.source] = call
        own = list(found.values())[: calling.MOST // 2]
        return [*own, *calling.variants(own, derived(self.seed, "tree", name), len(own))]

    def _written(self, writer: Writer, request: str, what: Sequence[str], count: int) -> list[str]:
        """The programs in what was written, those alone that are Python."""
        found = [_program(text or "") for text in self._texts(writer, request, what, count)]
        return [program for program in found if parsed(program).body]

    def _texts(self, writer: Writer, request: str, what: Sequence[str], count: int) -> list[str | None]:
        self.requests += count
        return writer.write([request] * count, [derived(self.seed, "tree", *what, n) for n in range(count)])


def _program(text: str) -> str:
    """The last fenced block of Python in a text; all of it where there is no fence."""
    if OPENING not in text:
        return "" if FENCE in text else text
    return text.rpartition(OPENING)[2].partition(FENCE)[0].strip("\n")


def _stubs(program: str, name: str) -> list[ast.FunctionDef]:
    """The functions that a program declares and leaves to be written."""
    functions = [node for node in parsed(program).body if isinstance(node, ast.FunctionDef) and node.name != name]
    return [node for node in functions if all(_empty(line) for line in node.body)]


def _empty(line: ast.stmt) -> bool:
    """Whether a line does nothing: a text, three dots, pass, or what says that it is not written yet."""
    if isinstance(line, ast.Raise):
        return "NotImplemented" in ast.unparse(line)
    return isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))


def _joined(done: str, version: str, name: str) -> str:
    """Finished parts, then a version of what uses them; what it declares of them again is left out."""
    known = {node.name for node in parsed(done).body if isinstance(node, ast.FunctionDef)} - {name}
    lines = parsed(version).body
    own = [ast.unparse(n) for n in lines if not (isinstance(n, ast.FunctionDef) and n.name in known)]
    return "\n".join([*filter(None, [done]), *own])


def _whole(prompt: str, name: str) -> str:
    return f"{prompt.rstrip()}\n\nWrite the function {name} in Python, as one block that begins with {OPENING}.\n"


def _divide(wanted: str, name: str) -> str:
    return (
        f"{wanted.rstrip()}\n\nWrite the function {name} in Python, as one block that begins with {OPENING}. Where a "
        "part of it is a task of its own, call a function for it, and declare that function in the same block with a "
        "docstring and the body `pass`: it will be written later.\n"
    )


def _conquer(wanted: str, name: str, done: str) -> str:
    given = f"These functions are there and may be called:\n\n{OPENING}\n{done}\n{FENCE}\n\n" if done else ""
    return f"{given}{wanted.rstrip()}\n\nWrite the function {name} alone, as one block that begins with {OPENING}.\n"


def _ask_calls(stub: str, name: str) -> str:
    return (
        f"{OPENING}\n{stub}\n{FENCE}\n\nWrite eight calls of {name} with unlike arguments, all of them literals, one "
        "in each line and nothing else.\n"
    )
