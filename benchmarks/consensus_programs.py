"""Votes on programs: HumanEval's own, mutants of them, and programs that know their tests: for ``consensus``."""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.common import Claim, Row

if TYPE_CHECKING:
    from planaria.swarm.tasks.base import Behaviour
    from planaria.swarm.tasks.programs import Programs

POOLS = 40
"""drawn for each problem"""
WRONG = 6
"""mutants of a problem that fail its tests, at most"""
TRIED = 14
"""mutants of a problem that are run"""
SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
}


@dataclass(frozen=True)
class Mutants:
    """One problem's programs by what they do on its calls, half of its tests' and variants of those."""

    number: int
    right: Behaviour
    wrong: tuple[Behaviour, ...]


class Mutation(ast.NodeTransformer):
    """Changes one place of a program: an operator, a number, a truth value, or one bound of a range."""

    def __init__(self, place: int) -> None:
        self.left = place

    def visit(self, node: ast.AST) -> ast.AST:
        changed: ast.AST | None = None
        if type(node) in SWAPS:
            changed = SWAPS[type(node)]()
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            changed = ast.copy_location(ast.Constant(value), node)
        if changed is not None:
            self.left -= 1
            if self.left == -1:
                return changed
        return self.generic_visit(node)


def mutants(program: str) -> list[str]:
    """All programs that differ from this one in one place."""
    found = []
    for place in range(200):
        mutation = Mutation(place)
        text = ast.unparse(mutation.visit(ast.parse(program)))
        if mutation.left >= 0:
            break
        found.append(text)
    return found


def block(program: str) -> str:
    return f"```python\n{program}\n```"


def programs(folder: Path) -> Programs:
    from planaria.swarm.tasks.programs import Programs

    return Programs(path=str(folder / "humaneval" / "HumanEval.jsonl.gz"), seconds=2.0)


@functools.cache
def pools(folder: Path, every: int) -> list[Mutants]:
    """Of every so many problems: those whose own program and some failing mutants do something that can be compared."""
    task, found = programs(folder), []
    for number in range(0, task.training + task.held_out, every):
        problem = task.problem(number)
        own = own_program(task, number)
        right = task.behaviour(problem, block(own), 1)
        if len(right) - right.count(None) < 3:
            continue
        rng, wrong = random.Random(number), list[Any]()
        tried = mutants(own)
        rng.shuffle(tried)
        for mutant in tried[:TRIED]:
            if len(wrong) < WRONG and task.score(problem, block(mutant)) == 0:
                wrong.append(task.behaviour(problem, block(mutant), 1))
        if wrong:
            found.append(Mutants(number, right, tuple(wrong)))
    return found


def own_program(task: Programs, number: int) -> str:
    return str(task.solution(task.problem(number), random.Random(0))).removeprefix("```python\n").removesuffix("\n```")


def chosen(candidates: Sequence[Behaviour], rng: random.Random) -> int:
    """The candidate that the vote chooses; any where it finds nothing."""
    from planaria.swarm.checks.votes import Ballot, plurality

    found = plurality([Ballot(str(n), behaviour) for n, behaviour in enumerate(candidates)])
    holders = [n for n, behaviour in enumerate(candidates) if any(one.holds(behaviour) for one in found)]
    return rng.choice(holders or range(len(candidates)))


def vote(folder: Path, every: int) -> Iterator[Row]:
    """How often the choice is right, by plurality and by agreement (FunCoder, equation 1): ten candidates, each right
    with probability p; then colluders among more."""
    from planaria.swarm.checks.votes import most_agreeing

    found = pools(folder, every)
    for p, honest, colluders, claim in (
        (0.5, 10, 0, Claim(low=0.82)),
        (0.3, 10, 0, None),
        (0.5, 10, 2, Claim(low=0.75)),
        (0.5, 10, 6, Claim(high=0.45)),
    ):
        rates, agreeing, plain = [], list[float](), []
        for one in found:
            rng = random.Random(f"{one.number} {p} {colluders}")
            hits = []
            for _ in range(POOLS):
                right = [rng.random() < p for _ in range(honest)] + [False] * colluders
                lie = rng.choice(one.wrong)
                candidates = [one.right if ok else rng.choice(one.wrong) for ok in right[:honest]]
                candidates += [lie] * colluders
                hits.append(right[chosen(candidates, rng)])
                agreeing.append(right[most_agreeing(candidates)])
                plain.append(fmean(right))
            rates.append(fmean(hits))
        case = f"p = {p:g}, {honest} honest" + (f" and {colluders} who collude" if colluders else "")
        told = f"{len(rates)} problems x {POOLS} pools; any of them: {fmean(plain):.3f}"
        yield Row(f"vote, {case}", [fmean(rates)], told, claim)
        yield Row(f"agreement, {case}", [fmean(agreeing)], told)


def cheats(task: Programs, number: int) -> list[str]:
    """Programs that have a table of all calls that the tests make, and something else for all other calls."""
    from planaria.swarm.tasks.sandbox import run

    own, asked = own_program(task, number), task._checked[number].calls
    if not asked:
        return []
    printed = run(f"{own}\nprint([{', '.join(call.source for call in asked)}])").printed
    try:
        values = ast.literal_eval(printed.strip().split("\n")[-1])
    except (ValueError, SyntaxError):
        return []
    table = {repr((call.args, dict(call.named))): value for call, value in zip(asked, values, strict=True)}
    common = max(values, key=values.count)
    others = [
        "None",
        "args[0]",
        repr(common),
        repr(values[0]),
        f"[*{table!r}.values()][len(repr(args)) % {len(table)}]",
    ]
    name = asked[0].name
    return [f"def {name}(*args, **named):\n return {table!r}.get(repr((args, named)), {other})" for other in others]


def sift(folder: Path, every: int) -> Iterator[Row]:
    """Groups of 100 programs that pass their tests: 95 honest ones by 19 peers, 5 by a peer that cheats."""
    from planaria.swarm.checks.votes import Ballot, label

    task = programs(folder)
    caught, lost, survivors, groups = list[float](), list[float](), list[float](), 0
    for number in range(1, task.training + task.held_out, every):
        problem, own = task.problem(number), own_program(task, number)
        odd = [text for text in cheats(task, number) if task.score(problem, block(text)) == 1]
        if len(odd) < 5:
            continue
        others = mutants(own)
        random.Random(number).shuffle(others)
        alive = [text for text in others[: TRIED // 2] if task.score(problem, block(text)) == 1][:3]
        done = {text: task.behaviour(problem, block(text), 7, untested=True) for text in (own, *alive, *odd)}
        honest = [own if n % 10 or not alive else alive[n // 10 % len(alive)] for n in range(95)]
        ballots = [Ballot(f"h{n % 19}", done[text]) for n, text in enumerate(honest)]
        found = label([*ballots, *(Ballot("cheat", done[text]) for text in odd)], 0.5)
        groups += 1
        refused = {text: found is not None and not found.near(done[text]) for text in done}
        caught.append(sum(refused[text] for text in odd))
        lost.append(sum(refused[text] for text in honest))
        survivors += [float(refused[text]) for text in alive]
    told = f"{groups} problems"
    yield Row("filter, of 5 programs that know their tests, refused", [fmean(caught)], told, Claim(low=4))
    yield Row("filter, of 95 honest programs, refused", [fmean(lost)], told, Claim(high=2))
    yield Row(
        "filter, share of mutants that survive their tests, refused", [fmean(survivors)], f"{len(survivors)} mutants"
    )
