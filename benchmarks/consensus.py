"""What most peers do, in the place of labels, and as a filter of programs that pass their tests.

vote      HumanEval's right programs and mutants of them: how often the vote's choice is right, by calls alone
filter    programs that look their tests' inputs up in a table, among honest ones: how many are refused
colluders how often the vote's choice is right with colluders among honest candidates (toy families)
learn     four peers learn sums from what they agree on, against verified rewards; from a worse start; too fast, braked
collude   the same with one or two of the four colluding on wrong answers

--parts chooses among them. Vote and filter need the folder of data that PLANARIA_DATA names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start

NAME = "consensus"
CHECKS = "claims, support, duplicates"
"""no judge, for it would know what is right, and nothing that tells a colluder's answer by its odd look"""
GOOD, BAD = {"steps": 1500, "noise": 0.1, "strays": 0.0}, {"steps": 800, "noise": 0.2, "strays": 0.0}
SLOW = {"lr": 2e-4, "warmup": 5}
FAST = {"lr": 1e-3, "warmup": 0}


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="which of them")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of learning")
    flags.add_argument("--rounds", type=int, default=60, help="of learning")
    given = flags.parse_args()
    rows = [row for part in given.parts for row in PARTS[part](given)]
    notes = ["accuracy: held-out sums solved, one draw each, mean of four peers and their last two evaluations"]
    return conclude(NAME, given, rows, notes if {"learn", "collude"} & {*given.parts} else [])


# Learning


def swarm(name: str, seed: int, rounds: int, school: dict[str, Any], optim: dict[str, Any], **more: Any) -> Any:
    """The outcome and the votes of one swarm, run unless that was done before: (outcome, Agreed of each round)."""
    import torch

    from planaria.commands.swarm import prepare
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.live import LiveSwarm
    from planaria.swarm.records.lines import LOG, PEERS, RoundDone, read_log
    from planaria.swarm.records.outcome import read_outcome

    torch.set_num_threads(1)
    plain: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "school": school | {"seed": seed},
        "rounds": {"count": rounds, "keep": 0},
        "optim": optim,
        "loss": {"kind": "f_tis"},
        "evaluate": {"every": 10, "problems": 300},
        "defence": {"checks": CHECKS, "quarantine": 0.0},
    }
    config = SwarmConfig.model_validate(plain | more)
    folder = RUNS / NAME / f"{name}-{seed}-{rounds}"
    done = folder / "done"
    if not done.is_file() or done.read_text() != config.model_dump_json():
        shutil.rmtree(folder, ignore_errors=True)
        prepare(config, quiet=True)
        LiveSwarm(config, folder).run(lambda peer, record: None, lambda peer, why: print(f"{name}: {peer}: {why}"))
        done.write_text(config.model_dump_json())
    log = read_log(folder / PEERS / "p0" / LOG)
    return read_outcome(folder), [r.agreed for r in log if isinstance(r, RoundDone) and r.agreed is not None]


def before(outcome: Any) -> float:
    return fmean(peer.points[0].accuracy.rate or 0.0 for peer in outcome.honest)


def after(outcome: Any) -> float:
    found: float = outcome.accuracy(2)
    return found


def right(votes: list[Any]) -> float:
    """Of all labels, how many are right."""
    return sum(vote.right.hits for vote in votes) / max(1, sum(vote.right.eligible for vote in votes))


CONSENSUS = {"task": {"reward": "consensus"}}


def learn(given: Any) -> Iterator[Row]:
    verified = [swarm("verified", seed, given.rounds, GOOD, SLOW) for seed in given.seeds]
    agreed = [swarm("agreed", seed, given.rounds, GOOD, SLOW, **CONSENSUS) for seed in given.seeds]
    gains = [
        ((after(ours) - before(ours)), (after(theirs) - before(theirs)))
        for (ours, _), (theirs, _) in zip(agreed, verified, strict=True)
    ]
    yield Row("learn, accuracy at the start", [before(outcome) for outcome, _ in agreed], "")
    yield Row("learn, accuracy, verified reward", [after(outcome) for outcome, _ in verified], "")
    yield Row("learn, accuracy, agreement", [after(outcome) for outcome, _ in agreed], "")
    yield Row("learn, gain by agreement over gain by labels", [a / b for a, b in gains], "", Claim(low=0.7))
    yield Row("learn, labels right", [right(votes) for _, votes in agreed], "", Claim(low=0.95))
    shares = [sum(v.labelled for v in votes) / sum(v.groups for v in votes) for _, votes in agreed]
    yield Row("learn, groups with a label", shares, "")


def limits(given: Any) -> Iterator[Row]:
    """Where it does not win: a start that is right less than half of the time, and updates that are too large."""
    from planaria.swarm.records.kept import rounds_kept

    seed, rounds = given.seeds[0], given.rounds
    for name, more in (("verified", {}), ("agreement", CONSENSUS)):
        outcome, votes = swarm(f"low-{name}", seed, rounds, BAD, SLOW, **more)
        yield Row(f"from a worse start, {name}", [after(outcome)], f"start {before(outcome):.3f}")
        if votes:
            yield Row("from a worse start, labels right", [right(votes)], "")
    for name, more in (("verified", {}), ("agreement", CONSENSUS)):
        outcome, votes = swarm(f"fast-{name}", seed, rounds, GOOD, FAST, **more)
        yield Row(f"lr 1e-3 at once, {name}", [after(outcome)], f"start {before(outcome):.3f}")
        if votes:
            yield Row("lr 1e-3 at once, labels right", [right(votes)], "")
    braked = {"task": {"reward": "consensus", "brake": 0.1}}
    outcome, _ = swarm("fast-braked", seed, rounds, GOOD, FAST, **braked)
    late, lost = [], []
    for peer in outcome.honest:
        rates = [point.accuracy.rate or 0.0 for point in peer.points]
        below = next((n for n, rate in enumerate(rates) if max(rates[: n + 1]) - rate > 0.1), len(rates))
        late.append(len(rates) - 1 - below)
        (kept,) = rounds_kept(RUNS / NAME / f"fast-braked-{seed}-{rounds}" / "peers" / peer.name)
        lost.append(max(rates) - next(rate for p, rate in zip(peer.points, rates, strict=True) if p.round == kept))
    told = f"stopped after {outcome.rounds} of {rounds} rounds"
    yield Row("lr 1e-3 at once, braked: evaluations below the limit before", late, told, Claim(high=1), judged="worst")
    yield Row("lr 1e-3 at once, braked: best accuracy less that kept", lost, "", Claim(high=0.02), judged="worst")


def collude(given: Any) -> Iterator[Row]:
    """No layer but the vote tells a lie from a mistake here: what the vote alone withstands."""
    seed, rounds = given.seeds[0], given.rounds
    bare = {"defence": {"checks": "claims, duplicates", "quarantine": 0.0}}
    for reward, more in (("verified", {}), ("agreement", CONSENSUS)):
        control = 0.0
        for liars in (0, 1, 2):
            peers = {f"p{3 - n}": {"attack": {"kind": "collude"}} for n in range(liars)}
            outcome, votes = swarm(f"collude-{reward}-{liars}", seed, rounds, GOOD, SLOW, peers=peers, **bare, **more)
            control = control if liars else after(outcome)
            said, claim = f"{reward}, {liars} of 4 collude", Claim(low=-0.06) if liars == 1 else None
            gained = after(outcome) - control
            yield Row(f"{said}: accuracy above the control", [gained], f"accuracy {after(outcome):.3f}", claim)
            if votes:
                yield Row(f"{said}: labels right", [right(votes)], "")
                shares = sum(v.labelled for v in votes) / sum(v.groups for v in votes)
                yield Row(f"{said}: groups with a label", [shares], "")


PARTS: dict[str, Callable[[Any], Iterator[Row]]] = {"learn": learn, "limits": limits, "collude": collude}

if __name__ == "__main__":
    start(main)
