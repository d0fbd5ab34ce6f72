"""What most peers do, in the place of labels, and as a filter of programs that pass their tests.

vote      HumanEval's programs and mutants of them: how often the vote's choice is right; colluders among them
filter    programs that look their tests' inputs up in a table, among honest ones: how many are refused
learn     four peers learn sums from what they agree on, against verified rewards
fast      the same with updates that are too large, without and with a brake
collude   the same with one or two of the four colluding on wrong answers
low       the same from a start that is right about half of the time

--parts chooses among them. Vote and filter need the folder of data that PLANARIA_DATA names.
"""

from __future__ import annotations

import ast
import functools
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.common import ROOT, RUNS, Claim, Row, conclude, parser, start

if TYPE_CHECKING:
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy
    from planaria.swarm.tasks.base import Behaviour, Task
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


NAME = "consensus"
CHECKS = "claims, support, duplicates"
"""no judge, for it would know what is right, and nothing that tells a colluder's answer by its odd look"""
GOOD, BAD = {"steps": 1500, "noise": 0.1, "strays": 0.0}, {"steps": 800, "noise": 0.2, "strays": 0.0}
SLOW = {"lr": 2e-4, "warmup": 5}
FAST = (1e-3, 5e-3)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="which of them")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of learning")
    flags.add_argument("--rounds", type=int, default=60, help="of learning")
    flags.add_argument("--short", type=int, default=30, help="rounds of fast, collude and low")
    flags.add_argument("--every", type=int, default=8, help="of HumanEval's problems, one in so many")
    given = flags.parse_args()
    rows = [row for part in given.parts for row in PARTS[part](given)]
    notes = ["accuracy: held-out sums solved, one draw each, mean of the last two evaluations of 1,000"]
    return conclude(NAME, given, rows, notes if {"learn", "collude"} & {*given.parts} else [])


# Learning


class Table:
    """A board at which all peers of a swarm sit in one process.

    Peers with equal weights make the same update (tests/swarm/test_consensus.py holds real ones to that), so one of
    them reads and learns, and all write with its policy, each with its own draws.
    """

    run = "0" * 32
    unsettled = False

    def __init__(self, me: str) -> None:
        from planaria.swarm.board.receipts import Agreement

        self.me, self.said, self.others = me, {}, list[Any]()
        self.receipts = Agreement(None, me, None, 0.0)  # type: ignore[arg-type]  # no committee: it asks no board

    def closed(self, number: int) -> bool:
        return False

    def publish(self, message: Any) -> None:
        self.said = {message.peer: message}

    def leave(self, after: int) -> None:
        self.said = {}

    def overruled(self, number: int) -> None:
        """Nobody certifies rounds here."""

    def rewards(self, number: int, found: Any) -> dict[Any, float]:
        return {}

    def vouch(self, number: int, found: Any, rewards: Any) -> None:
        """Nobody certifies rewards here."""

    def gather(self, number: int, closed: bool) -> Any:
        from planaria.swarm.board.attendance import Gathered
        from planaria.swarm.policy.base import weights_fingerprint
        from planaria.swarm.rollout import ask

        found = dict(self.said)
        for peer in self.others:
            asked = [ask(peer.task.problem(n), peer.policy) for n in peer._problems(number)]
            peer._publish(number, asked, weights_fingerprint(peer.policy.module))
            found |= peer.meeting.said
        return Gathered(found, (), {})


def swarm(name: str, seed: int, rounds: int, school: dict[str, Any], optim: dict[str, Any], **more: Any) -> Any:
    """What one peer of four noted: (its evaluations, the votes of each round, the rounds it kept)."""
    import torch

    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.records.kept import rounds_kept
    from planaria.swarm.records.lines import LOG, Evaluated, RoundDone, read_log

    torch.set_num_threads(1)
    plain: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "school": school | {"seed": seed},
        "rounds": {"count": rounds, "keep": 0},
        "optim": optim,
        "loss": {"kind": "f_tis"},
        "evaluate": {"every": 10, "problems": 1000},
        "defence": {"checks": CHECKS, "quarantine": 0.0},
    }
    config = SwarmConfig.model_validate(plain | more)
    folder = RUNS / NAME / f"{name}-{seed}-{rounds}"
    done = folder / "done"
    if not done.is_file() or done.read_text() != config.model_dump_json():
        shutil.rmtree(folder, ignore_errors=True)
        play(config, folder)
        done.write_text(config.model_dump_json())
    log = read_log(folder / "p0" / LOG)
    votes = [r.agreed for r in log if isinstance(r, RoundDone) and r.agreed is not None]
    looks = [(r.round, r.accuracy.rate or 0.0) for r in log if isinstance(r, Evaluated)]
    return looks, votes, rounds_kept(folder / "p0")


def play(config: SwarmConfig, folder: Path) -> None:
    """All rounds of a swarm, as its first peer lives through them."""
    from planaria.swarm.assemble import policy_of, task_of

    task = task_of(config)
    together(config, folder, task, policy_of(config, task))


def together(config: SwarmConfig, folder: Path, task: Task, policy: Policy) -> None:
    """The same with this task and policy, which learns."""
    from planaria.common.errors import RunStopped
    from planaria.swarm.checks import layers
    from planaria.swarm.peer import Peer
    from planaria.swarm.setting import names, of_peer

    peers = []
    for peer in names(config):
        own, table = of_peer(config, peer), Table(f"{peer[1:]:0>32}")
        peers.append(Peer(own, peer, folder / peer, table, task, policy, layers(own)))  # type: ignore[arg-type]
    first, *others = peers
    first.meeting.others = others  # type: ignore[attr-defined]
    try:
        first.run()
    except RunStopped as error:
        print(error)


def before(looks: Any) -> float:
    found: float = looks[0][1]
    return found


def after(looks: Any) -> float:
    """Mean of the last two evaluations."""
    return fmean(rate for _, rate in looks[-2:])


def right(votes: list[Any]) -> float:
    """Of all labels, how many are right."""
    return sum(vote.right.hits for vote in votes) / max(1, sum(vote.right.eligible for vote in votes))


CONSENSUS = {"task": {"reward": "consensus"}}


def labelled(votes: list[Any]) -> float:
    """Share of the groups that got a label."""
    found: float = sum(v.labelled for v in votes) / sum(v.groups for v in votes)
    return found


def on_labels(said: str, runs: list[Any]) -> Iterator[Row]:
    """What all votes of each run came to."""
    yield Row(f"{said}: labels right", [right(votes) for _, votes, _ in runs], "")
    yield Row(f"{said}: groups with a label", [labelled(votes) for _, votes, _ in runs], "")


def learn(given: Any) -> Iterator[Row]:
    verified = [swarm("verified", seed, given.rounds, GOOD, SLOW) for seed in given.seeds]
    agreed = [swarm("agreed", seed, given.rounds, GOOD, SLOW, **CONSENSUS) for seed in given.seeds]
    gains = [
        ((after(ours[0]) - before(ours[0])), (after(theirs[0]) - before(theirs[0])))
        for ours, theirs in zip(agreed, verified, strict=True)
    ]
    yield Row("learn, accuracy at the start", [before(looks) for looks, *_ in agreed], "")
    yield Row("learn, accuracy, verified reward", [after(looks) for looks, *_ in verified], "")
    yield Row("learn, accuracy, agreement", [after(looks) for looks, *_ in agreed], "")
    yield Row("learn, gain by agreement over gain by labels", [a / b for a, b in gains], "", Claim(low=0.7))
    yield Row("learn, labels right", [right(votes) for _, votes, _ in agreed], "", Claim(low=0.95))
    yield Row("learn, groups with a label", [labelled(votes) for _, votes, _ in agreed], "")


def fast(given: Any) -> Iterator[Row]:
    """Updates that are too large: without a brake, with one, and with labels."""
    for lr in FAST:
        yield from both(f"lr {lr:g} at once", f"fast-{lr:g}", given, GOOD, {"lr": lr, "warmup": 0})
    optim, brake = {"lr": FAST[-1], "warmup": 0}, {"reward": "consensus", "brake": 0.1}
    runs = [swarm("braked", seed, given.short, GOOD, optim, task=brake) for seed in given.seeds]
    best = [max(rate for _, rate in looks) for looks, *_ in runs]
    below = [sum(top - rate > 0.1 for _, rate in looks) for top, (looks, *_) in zip(best, runs, strict=True)]
    lost = [
        max((top - dict(looks)[n] for n in kept), default=math.nan)
        for top, (looks, _, kept) in zip(best, runs, strict=True)
    ]
    ended = ", ".join(f"{looks[-1][0]} ({', '.join(map(str, kept))})" for looks, _, kept in runs)
    told = f"rounds until it stopped, of {given.short}, and those after which a state was kept: {ended}"
    yield Row("the same, braked: evaluations below the limit", below, told, Claim(high=1), judged="worst")
    yield Row("the same, braked: best accuracy less that kept", lost, "", Claim(high=0.02), judged="worst")


def low(given: Any) -> Iterator[Row]:
    """A start that is right about half of the time."""
    yield from both("from a worse start", "low", given, BAD, SLOW)


def both(said: str, name: str, given: Any, school: dict[str, Any], optim: dict[str, Any]) -> Iterator[Row]:
    """Agreement and labels side by side: shown, nothing is claimed."""
    for reward, more in (("agreement", CONSENSUS), ("verified", {})):
        runs = [swarm(f"{name}-{reward}", seed, given.short, school, optim, **more) for seed in given.seeds]
        starts = ", ".join(f"{before(looks):.3f}" for looks, *_ in runs)
        yield Row(f"{said}, {reward}: accuracy", [after(looks) for looks, *_ in runs], f"start {starts}")
        if more:
            yield from on_labels(said, runs)


def collude(given: Any) -> Iterator[Row]:
    """No layer but the vote tells a lie from a mistake here: what the vote alone withstands."""
    bare = {"defence": {"checks": "claims, duplicates", "quarantine": 0.0}}
    control: list[float] = []
    for liars in (0, 1, 2):
        more = {"peers": {f"p{3 - n}": {"attack": {"kind": "collude"}} for n in range(liars)}} | bare | CONSENSUS
        runs = [swarm(f"collude-{liars}", seed, given.short, GOOD, SLOW, **more) for seed in given.seeds]
        reached = [after(looks) for looks, *_ in runs]
        control = control or reached
        said, claim = f"{liars} of 4 collude", Claim(low=-0.06) if liars == 1 else None
        told = "accuracy " + ", ".join(
            f"{before(looks[0]):.3f} → {a:.3f}" for looks, a in zip(runs, reached, strict=True)
        )
        above = [mine - honest for mine, honest in zip(reached, control, strict=True)]
        yield Row(f"{said}: accuracy above the control", above, told, claim, judged="least")
        yield from on_labels(said, runs)


def on_programs(what: Callable[[Path, int], Iterator[Row]]) -> Callable[[Any], Iterator[Row]]:
    """A part that needs real programs; nothing where they are not."""

    def rows(given: Any) -> Iterator[Row]:
        folder = Path(os.environ.get("PLANARIA_DATA", ROOT.parent / "shared" / "data"))
        if not (folder / "humaneval").is_dir():
            print(f"{what.__name__}: left out, {folder} has no humaneval (set PLANARIA_DATA)")
            return
        yield from what(folder, given.every)

    return rows


PARTS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "vote": on_programs(vote),
    "filter": on_programs(sift),
    "learn": learn,
    "fast": fast,
    "collude": collude,
    "low": low,
}


if __name__ == "__main__":
    start(main)
