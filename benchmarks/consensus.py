"""Agreement of peers in place of labels, and as a filter of programs that pass their tests.

vote      HumanEval's programs and mutants: how often the vote's choice is right; also with colluders
filter    programs that contain a table of their tests' answers, among honest ones: how many are refused
learn     four peers learn sums from their agreement, against verified rewards
fast      the same with too large updates, without and with a brake
collude   the same with one or two of four peers colluding on wrong answers

--parts chooses among them. Vote and filter need the data folder named by PLANARIA_DATA.
"""

from __future__ import annotations

import ast
import functools
import math
import os
import random
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.harness import ROOT, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, gaps, ratios, start
from planaria.common.errors import RunStopped
from planaria.swarm.assemble import make_policy, make_task
from planaria.swarm.board.attendance import RoundMessages
from planaria.swarm.board.receipts import Agreement
from planaria.swarm.checks import make_layers
from planaria.swarm.checks.votes import BehaviourVote, majority_label, most_agreeing, plurality
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import peer_config, peer_names
from planaria.swarm.peer.peer import Peer
from planaria.swarm.peer.rollout import prompt_for
from planaria.swarm.policy.base import Policy, weights_fingerprint
from planaria.swarm.records.lines import LOG, Evaluated, RoundDone, read_log
from planaria.swarm.records.saved_state import saved_rounds
from planaria.swarm.sandbox.sandbox import run
from planaria.swarm.tasks.base import Behaviour, Task
from planaria.swarm.tasks.programs import Programs

POOLS = 40  # drawn for each problem
WRONG = 6  # mutants of a problem that fail its tests, at most
TRIED = 14  # mutants of a problem that are run
PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Add, ast.Sub), (ast.And, ast.Or))
SWAPS: dict[type[ast.AST], type[Any]] = {
    **dict(PAIRS),
    **{b: a for a, b in PAIRS},
    ast.Mult: ast.Add,
    ast.Mod: ast.FloorDiv,
    ast.In: ast.NotIn,
}


@dataclass(frozen=True)
class Mutants:
    """The behaviour of one problem's programs on its calls: half of its tests' and variants of them."""

    number: int
    right: Behaviour
    wrong: tuple[Behaviour, ...]


class Mutation(ast.NodeTransformer):
    """Changes one operator, number, truth value or range bound of a program."""

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
    """Return all programs that differ from this one in one place."""
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
    return Programs(path=str(folder / "humaneval" / "HumanEval.jsonl.gz"), seconds=2.0)


@functools.cache
def pools(folder: Path, every: int) -> list[Mutants]:
    """Return the problems, one in ``every``, whose solution and some failing mutants have comparable behaviour."""
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
    found = plurality([BehaviourVote(str(n), behaviour) for n, behaviour in enumerate(candidates)])
    holders = [n for n, behaviour in enumerate(candidates) if any(one.matches(behaviour) for one in found)]
    return rng.choice(holders or range(len(candidates)))


def vote(folder: Path, every: int) -> Iterator[Row]:
    """Measure the choice by plurality and by agreement (FunCoder, equation 1): ten candidates, each right with
    probability p, and colluders."""
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
        limit = f"{len(rates)} problems x {POOLS} pools; any of them: {fmean(plain):.3f}"
        yield Row(f"vote, {case}", [fmean(rates)], limit, claim)
        yield Row(f"agreement, {case}", [fmean(agreeing)], limit)


def cheats(task: Programs, number: int) -> list[str]:
    """Return programs that look the tests' calls up in a table, with other answers elsewhere."""
    own, asked = own_program(task, number), task._problems[number].calls
    if not asked:
        return []
    printed = run(f"{own}\nprint([{', '.join(call.source for call in asked)}])").printed
    try:
        values = ast.literal_eval(printed.strip().split("\n")[-1])
    except (ValueError, SyntaxError):
        return []
    table = {repr((call.args, dict(call.named))): value for call, value in zip(asked, values, strict=True)}
    common = max(values, key=values.count)
    any_value = f"[*{table!r}.values()][len(repr(args)) % {len(table)}]"
    others = ["None", "args[0]", repr(common), repr(values[0]), any_value]
    name = asked[0].name
    return [f"def {name}(*args, **named):\n return {table!r}.get(repr((args, named)), {other})" for other in others]


def sift(folder: Path, every: int) -> Iterator[Row]:
    """Filter groups of 100 programs that pass their tests: 95 honest ones by 19 peers, 5 by a cheating peer."""
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
        ballots = [BehaviourVote(f"h{n % 19}", done[text]) for n, text in enumerate(honest)]
        found = majority_label([*ballots, *(BehaviourVote("cheat", done[text]) for text in odd)], 0.5)
        groups += 1
        refused = {text: found is not None and not found.is_near(done[text]) for text in done}
        caught.append(sum(refused[text] for text in odd))
        lost.append(sum(refused[text] for text in honest))
        survivors += [float(refused[text]) for text in alive]
    limit = f"{groups} problems"
    yield Row("filter, of 5 programs that know their tests, refused", [fmean(caught)], limit, Claim(low=4))
    yield Row("filter, of 95 honest programs, refused", [fmean(lost)], limit, Claim(high=2))
    what = "filter, share of mutants that survive their tests, refused"
    yield Row(what, [fmean(survivors)], f"{len(survivors)} mutants")


CHECKS = "claims, support, duplicates"
"""without the judge, which knows the answer, and without checks of a completion's look"""
GOOD = {"steps": 1500, "noise": 0.1, "stray_letter_probability": 0.0}
SLOW = {"lr": 2e-4, "warmup": 5}
FAST = (1e-3, 5e-3)


# Learning


class Table:
    """The board of a swarm in one process.

    Peers with equal weights make the same update (tested in tests/swarm/test_consensus.py), so one of them reads and
    learns; all write with its policy and their own draws.
    """

    run = "0" * 32
    may_be_overruled = False

    def __init__(self, me: str) -> None:
        self.me, self.published, self.others = me, {}, list[Any]()
        self.receipts = Agreement(None, me, None, 0.0)  # type: ignore[arg-type]  # no committee: it asks no board

    def begin_round(self, number: int) -> bool:
        return False

    def publish(self, message: Any) -> None:
        self.published = {message.peer: message}

    def leave(self, after: int) -> None:
        self.published = {}

    def overruled_round(self, number: int) -> None:
        """Rounds are not certified."""

    def rewards(self, number: int, found: Any) -> dict[Any, float]:
        return {}

    def sign_rewards(self, number: int, found: Any, rewards: Any) -> None:
        """Rewards are not certified."""

    def gather(self, number: int, closed: bool) -> Any:
        found = dict(self.published)
        for peer in self.others:
            asked = [prompt_for(peer.task.problem(n), peer.policy) for n in peer._problems(number)]
            peer._publish(number, asked, weights_fingerprint(peer.policy.module))
            found |= peer.board.published
        return RoundMessages(found, (), {})


def swarm(name: str, seed: int, rounds: int, warmup: dict[str, Any], optim: dict[str, Any], **more: Any) -> Any:
    """Return one peer's evaluations, votes by round, and kept rounds."""
    torch.set_num_threads(1)
    plain: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "warmup": warmup | {"seed": seed},
        "rounds": {"count": rounds, "keep": 0},
        "optim": optim,
        "loss": {"kind": "f_tis"},
        "evaluate": {"every": 10, "problems": 1000},
        "defence": {"checks": CHECKS, "quarantine": 0.0},
    }
    config = SwarmConfig.model_validate(plain | more)
    folder = RUNS / "consensus" / f"{name}-{seed}-{rounds}"
    done = folder / "done"
    if not done.is_file() or done.read_text() != config.model_dump_json():
        shutil.rmtree(folder, ignore_errors=True)
        play(config, folder)
        done.write_text(config.model_dump_json())
    log = read_log(folder / "p0" / LOG)
    votes = [r.agreed for r in log if isinstance(r, RoundDone) and r.agreed is not None]
    looks = [(r.round, r.accuracy.rate or 0.0) for r in log if isinstance(r, Evaluated)]
    return looks, votes, saved_rounds(folder / "p0")


def play(config: SwarmConfig, folder: Path) -> None:
    task = make_task(config)
    together(config, folder, task, make_policy(config, task))


def together(config: SwarmConfig, folder: Path, task: Task, policy: Policy) -> None:
    """Play all rounds with this task and policy, which learns."""
    peers = []
    for peer in peer_names(config):
        own, table = peer_config(config, peer), Table(f"{peer[1:]:0>32}")
        peers.append(Peer(own, peer, folder / peer, table, task, policy, make_layers(own)))  # type: ignore[arg-type]
    first, *others = peers
    first.board.others = others  # type: ignore[attr-defined]
    try:
        first.run()
    except RunStopped as error:
        print(error)


def before(looks: Any) -> float:
    return float(looks[0][1])


def after(looks: Any) -> float:
    """Return the mean of the last two evaluations."""
    return fmean(rate for _, rate in looks[-2:])


def right(votes: list[Any]) -> float:
    return sum(vote.right.hits for vote in votes) / max(1, sum(vote.right.eligible for vote in votes))


def labelled(votes: list[Any]) -> float:
    return float(sum(v.labelled for v in votes) / sum(v.groups for v in votes))


CONSENSUS = {"task": {"reward": "consensus"}}


def on_labels(case: str, runs: list[Any]) -> Iterator[Row]:
    yield Row(f"{case}: labels right", [right(votes) for _, votes, _ in runs], "")
    yield Row(f"{case}: groups with a label", [labelled(votes) for _, votes, _ in runs], "")


def learn(args: Any) -> Iterator[Row]:
    verified = [swarm("verified", seed, args.rounds, GOOD, SLOW) for seed in args.seeds]
    agreed = [swarm("agreed", seed, args.rounds, GOOD, SLOW, **CONSENSUS) for seed in args.seeds]
    ours, labels = ([after(looks) - before(looks) for looks, *_ in runs] for runs in (agreed, verified))
    yield Row("learn, accuracy at the start", [before(looks) for looks, *_ in agreed], "")
    yield Row("learn, accuracy, verified reward", [after(looks) for looks, *_ in verified], "")
    yield Row("learn, accuracy, agreement", [after(looks) for looks, *_ in agreed], "")
    yield Row("learn, gain by agreement over gain by labels", ratios(ours, labels), "", Claim(low=0.7))
    yield Row("learn, labels right", [right(votes) for _, votes, _ in agreed], "", Claim(low=0.95))
    yield Row("learn, groups with a label", [labelled(votes) for _, votes, _ in agreed], "")


def fast(args: Any) -> Iterator[Row]:
    """Too large updates: without a brake, with one, and with labels."""
    for lr in FAST:
        yield from both(f"lr {lr:g} at once", f"fast-{lr:g}", args, GOOD, {"lr": lr, "warmup": 0})
    optim, brake = {"lr": FAST[-1], "warmup": 0}, {"reward": "consensus", "max_accuracy_drop": 0.1}
    runs = [swarm("braked", seed, args.short, GOOD, optim, task=brake) for seed in args.seeds]
    best = [max(rate for _, rate in looks) for looks, *_ in runs]
    below = [sum(top - rate > 0.1 for _, rate in looks) for top, (looks, *_) in zip(best, runs, strict=True)]
    lost = [
        max((top - dict(looks)[n] for n in kept), default=math.nan)
        for top, (looks, _, kept) in zip(best, runs, strict=True)
    ]
    ended = ", ".join(f"{looks[-1][0]} ({', '.join(map(str, kept))})" for looks, _, kept in runs)
    limit = f"rounds until it stopped, of {args.short}, and those after which a state was kept: {ended}"
    yield Row("the same, braked: evaluations below the limit", below, limit, Claim(high=1), judged="worst")
    yield Row("the same, braked: best accuracy less that kept", lost, "", Claim(high=0.02), judged="worst")


def both(case: str, name: str, args: Any, warmup: dict[str, Any], optim: dict[str, Any]) -> Iterator[Row]:
    for reward, more in (("agreement", CONSENSUS), ("verified", {})):
        runs = [swarm(f"{name}-{reward}", seed, args.short, warmup, optim, **more) for seed in args.seeds]
        starts = ", ".join(f"{before(looks):.3f}" for looks, *_ in runs)
        yield Row(f"{case}, {reward}: accuracy", [after(looks) for looks, *_ in runs], f"start {starts}")
        if more:
            yield from on_labels(case, runs)


def collude(args: Any) -> Iterator[Row]:
    """Colluders against the vote alone: no other layer distinguishes a lie from a mistake."""
    bare = {"defence": {"checks": "claims, duplicates", "quarantine": 0.0}}
    control: list[float] = []
    for byzantine in (0, 1, 2):
        more = {"peers": {f"p{3 - n}": {"attack": {"kind": "collude"}} for n in range(byzantine)}} | bare | CONSENSUS
        runs = [swarm(f"collude-{byzantine}", seed, args.short, GOOD, SLOW, **more) for seed in args.seeds]
        reached = [after(looks) for looks, *_ in runs]
        control = control or reached
        case, claim = f"{byzantine} of 4 collude", Claim(low=-0.06) if byzantine == 1 else None
        changes = ", ".join(f"{before(run[0]):.3f} → {a:.3f}" for run, a in zip(runs, reached, strict=True))
        above = gaps(reached, control)
        yield Row(f"{case}: accuracy above the control", above, f"accuracy {changes}", claim, judged="least")
        yield from on_labels(case, runs)


def on_programs(what: Callable[[Path, int], Iterator[Row]]) -> Callable[[Any], Iterator[Row]]:
    """Make a part that needs HumanEval; without it, it yields nothing."""

    def rows(args: Any) -> Iterator[Row]:
        folder = Path(os.environ.get("PLANARIA_DATA", ROOT.parent / "shared" / "data"))
        if not (folder / "humaneval").is_dir():
            print(f"{what.__name__}: left out, {folder} has no humaneval (set PLANARIA_DATA)")
            return
        yield from what(folder, args.every)

    return rows


PARTS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "vote": on_programs(vote),
    "filter": on_programs(sift),
    "learn": learn,
    "fast": fast,
    "collude": collude,
}


@benchmark(
    "consensus",
    parts=Flag(list(PARTS), "which of them", choices=list(PARTS)),
    seeds=Flag([1, 2, 3], "of learning"),
    rounds=Flag(60, "of learning"),
    short=Flag(30, "rounds of fast and collude"),
    every=Flag(8, "stride over HumanEval's problems"),
)
def main(args: Namespace) -> Measurement:
    rows = [row for part in args.parts for row in PARTS[part](args)]
    notes = ["accuracy: held-out sums solved, one draw each, mean of the last two evaluations of 1,000"]
    return Result(rows, notes if {"learn", "collude"} & {*args.parts} else [])


if __name__ == "__main__":
    start(main)
