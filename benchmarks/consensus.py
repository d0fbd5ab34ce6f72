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

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.common import ROOT, RUNS, Claim, Row, conclude, parser, start
from benchmarks.consensus_programs import sift, vote

if TYPE_CHECKING:
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy
    from planaria.tasks.base import Task

NAME = "consensus"
CHECKS = "claims, support, duplicates"
"""no judge, for it would know what is right, and nothing that tells a colluder's answer by its odd look"""
GOOD, BAD = {"steps": 1500, "noise": 0.1, "strays": 0.0}, {"steps": 800, "noise": 0.2, "strays": 0.0}
SLOW = {"lr": 2e-4, "warmup": 5}
FAST = (1e-3, 5e-3)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="which of them")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of learning")
    flags.add_argument("--rounds", type=int, default=60, help="of learning")
    flags.add_argument("--short", type=int, default=30, help="rounds of fast, collude and low, which have one seed")
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
    receipts = SimpleNamespace(committee=None, signers=lambda *_: (), testify=lambda *_: None)

    def __init__(self, me: str) -> None:
        self.me, self.said, self.others = me, {}, list[Any]()

    def closed(self, number: int) -> bool:
        return False

    def publish(self, message: Any) -> None:
        self.said = {message.peer: message}

    def leave(self, after: int) -> None:
        self.said = {}

    def vouch(self, number: int, found: Any, rewards: Any) -> None:
        pass

    def overruled(self, number: int) -> None:
        return None

    def gather(self, number: int, closed: bool) -> Any:
        from planaria.swarm.board.attendance import Gathered
        from planaria.swarm.policy.fingerprints import weights_fingerprint
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
    from planaria.errors import RunStopped
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
    shares = [sum(v.labelled for v in votes) / sum(v.groups for v in votes) for _, votes, _ in agreed]
    yield Row("learn, groups with a label", shares, "")


def fast(given: Any) -> Iterator[Row]:
    """Updates that are too large: without a brake, with one, and with labels."""
    seed, rounds = given.seeds[0], given.short
    for lr in FAST:
        yield from both(f"lr {lr:g} at once", f"fast-{lr:g}", seed, rounds, GOOD, {"lr": lr, "warmup": 0})
    optim = {"lr": FAST[-1], "warmup": 0}
    looks, _, kept = swarm("braked", seed, rounds, GOOD, optim, task={"reward": "consensus", "brake": 0.1})
    rates = dict(looks)
    below = [n for n, rate in looks if max(rates.values()) - rate > 0.1]
    told = f"stopped after {looks[-1][0]} of {rounds} rounds, the state after {', '.join(map(str, kept))} kept"
    yield Row("the same, braked: evaluations below the limit", [len(below)], told, Claim(low=1, high=1))
    lost = [max(rates.values()) - rates[n] for n in kept]
    yield Row("the same, braked: best accuracy less that kept", lost, "", Claim(high=0.02))


def low(given: Any) -> Iterator[Row]:
    """A start that is right about half of the time."""
    yield from both("from a worse start", "low", given.seeds[0], given.short, BAD, SLOW)


def both(said: str, name: str, seed: int, rounds: int, school: dict[str, Any], optim: dict[str, Any]) -> Iterator[Row]:
    """Agreement and labels side by side: shown, nothing is claimed."""
    for reward, more in (("agreement", CONSENSUS), ("verified", {})):
        looks, votes, _ = swarm(f"{name}-{reward}", seed, rounds, school, optim, **more)
        yield Row(f"{said}, {reward}: accuracy", [after(looks)], f"start {before(looks):.3f}")
        if votes:
            yield Row(f"{said}: labels right", [right(votes)], "")
            shares = sum(v.labelled for v in votes) / sum(v.groups for v in votes)
            yield Row(f"{said}: groups with a label", [shares], "")


def collude(given: Any) -> Iterator[Row]:
    """No layer but the vote tells a lie from a mistake here: what the vote alone withstands."""
    seed, rounds, control = given.seeds[0], given.short, 0.0
    bare = {"defence": {"checks": "claims, duplicates", "quarantine": 0.0}}
    for liars in (0, 1, 2):
        peers = {f"p{3 - n}": {"attack": {"kind": "collude"}} for n in range(liars)}
        looks, votes, _ = swarm(f"collude-{liars}", seed, rounds, GOOD, SLOW, peers=peers, **bare, **CONSENSUS)
        control = control if liars else after(looks)
        said, claim = f"{liars} of 4 collude", Claim(low=-0.06) if liars == 1 else None
        told = f"accuracy {after(looks):.3f}, start {before(looks):.3f}"
        yield Row(f"{said}: accuracy above the control", [after(looks) - control], told, claim)
        yield Row(f"{said}: labels right", [right(votes)], "")
        shares = sum(v.labelled for v in votes) / sum(v.groups for v in votes)
        yield Row(f"{said}: groups with a label", [shares], "")


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
