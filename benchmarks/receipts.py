"""Receipts of a committee: what a signature costs to check, whether equal peers stay equal when one is frozen for a
while, and how many programs a peer that comes back runs again.

Four processes learn; one is stopped (SIGSTOP) at a random moment and goes on (SIGCONT) rounds later, with and without a
committee. Equal: all four have the same weights at the end. Then four peers of one process write programs, one stops
two thirds of the way, and catches up when the others are done; cage runs are counted as calls of the task's score.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Claim, Row, conclude, parser, start

if TYPE_CHECKING:
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.peer import Peer
    from planaria.swarm.records.lines import RoundDone

NAME = "receipts"
ROUNDS = 8
PROBLEMS = [("first", "x[0]"), ("last", "x[-1]"), ("size", "len(x)"), ("total", "sum(x)")]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--repeats", type=int, default=20, help="frozen swarms, with and without a committee")
    flags.add_argument("--rounds", type=int, default=60, help="of programs; 0: none")
    given = flags.parse_args()
    rows = [Row("a signature checked", checking(), "", Claim(high=2.0), {"unit": "ms"})]
    for committee, claim in (("all", Claim(low=1.0)), ("", None)):
        with_it = "with" if committee else "without"
        found = [frozen(seed, committee) for seed in range(given.repeats)]
        rows.append(Row(f"one frozen, {with_it} receipts: equal", [e for e, _ in found], "1", claim, judged="least"))
        if committee:
            rows.append(Row("one frozen: rounds certified", [share for _, share in found], "1"))
    if not given.rounds:
        return conclude(NAME, given, rows)
    runs = {committee: caught_up(given.rounds, committee) for committee in ("all", "")}
    part = runs["all"][0] / max(1.0, runs[""][0])
    beside = {"with": runs["all"][0], "without": runs[""][0]}
    rows.append(Row("programs: part of the cage runs", [part], "0", Claim(high=0.5), beside))
    rows.append(Row("programs: ends equal", [runs["all"][1]], "1", Claim(low=1.0)))
    return conclude(NAME, given, rows)


def checking() -> list[float]:
    """Milliseconds of processor time for each of the receipts in a certificate, five times."""
    from planaria.swarm.board.envelope import seal
    from planaria.swarm.board.identity import Identity
    from planaria.swarm.board.message import Receipt, Rules
    from planaria.swarm.board.receipts import Certificate, check

    who = [Identity.fresh() for _ in range(7)]
    content: Any = {"receipts": {"committee": ",".join(one.peer for one in who)}}
    rules = Rules(peer=who[0].peer, nonce="ab" * 16, rules=content)
    said = [Receipt(run=rules.run, peer=one.peer, round=1, about="weights", digest="ab" * 32) for one in who]
    sealed = tuple(seal(one, receipt).decode() for one, receipt in zip(who, said, strict=True))
    made = Certificate(about="weights", round=1, digest="ab" * 32, rules=seal(who[0], rules).decode(), receipts=sealed)
    found = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(20):
            check(made)
        found.append((time.process_time() - began) / 20 / len(who) * 1e3)
    return found


def swarm(committee: str, **changes: Any) -> SwarmConfig:
    from planaria.swarm.config import SwarmConfig

    plain: dict[str, Any] = {
        "name": NAME,
        "size": 4,
        "policy": {"model": {"dim": 32, "hidden": 64}},
        "school": {"steps": 150, "lr": 0.01, "noise": 0.05, "strays": 0.0},
        "rounds": {"count": ROUNDS, "prompts": 4, "group": 8, "timeout_s": 1.0, "keep": 0},
        "evaluate": {"every": 0, "problems": 2},
        "receipts": {"committee": committee},
    }
    return SwarmConfig.model_validate(plain | changes)


def frozen(seed: int, committee: str) -> tuple[float, float]:
    """One peer of four processes stops for a while: whether all end equal, and the share of rounds certified."""
    from planaria.swarm.live import LiveSwarm
    from planaria.swarm.setting import names

    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder, config = Path(place), swarm(committee)
        live = LiveSwarm(config, folder)
        try:
            for name in names(config):
                live.start(name)
            until(lambda: len(done(folder, "p3")) > draw.randrange(1, 3) - 1 and bool(done(folder, "p3")))
            time.sleep(draw.uniform(0, 0.4))
            victim = live.processes["p3"].pid or 0
            os.kill(victim, signal.SIGSTOP)
            begun = len(done(folder, "p0"))
            until(lambda: len(done(folder, "p0")) >= min(ROUNDS, begun + draw.randrange(1, 4)))
            os.kill(victim, signal.SIGCONT)
            for process in live.processes.values():
                process.join(120)
        finally:
            live.stop()
        last = {done(folder, name)[-1].weights for name in names(config)}
        whole = all(len(done(folder, name)) == ROUNDS for name in names(config))
        certified = [bool(record.certified) for record in done(folder, "p0")]
        return float(len(last) == 1 and whole), sum(certified) / len(certified)


def caught_up(rounds: int, committee: str) -> tuple[float, float]:
    """A peer stops after two thirds of the rounds and comes back: programs it runs then, and whether it ends equal."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = programs(folder, rounds, committee)
        others = [threading.Thread(target=peer(config, name, folder).run) for name in ("p0", "p1", "p3")]
        mortal = peer(config, "p2", folder)
        others.append(threading.Thread(target=until_death, args=(mortal, 2 * rounds // 3)))
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        before = len(done(folder, "p2"))
        again, runs = peer(config, "p2", folder), [0]
        score = again.task.score

        def counted(problem: Any, text: str) -> float:
            runs[0] += 1
            return score(problem, text)

        again.scoring._task = Counting(counted)  # type: ignore[assignment]
        again.run()
        assert before < rounds
        return float(runs[0]), float(done(folder, "p2")[-1].weights == done(folder, "p0")[-1].weights)


class Counting:
    """A task as scoring sees it."""

    def __init__(self, score: Callable[[Any, str], float]) -> None:
        self.score = score


def programs(folder: Path, rounds: int, committee: str) -> SwarmConfig:
    import json

    lines = [
        {
            "text": f"{name} of x",
            "code": f"def {name}(x):\n    return {body}",
            "test_list": [f"assert {name}([1, 2]) == {eval(body, {'x': [1, 2]})}"],
        }
        for name, body in PROBLEMS
        for _ in range(4)
    ]
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return swarm(
        committee,
        task={"name": "programs", "options": {"path": str(file)}},
        policy={"model": {"dim": 48, "hidden": 96, "context": 192}},
        school={"steps": 250, "lr": 0.01, "noise": 0.0, "strays": 0.0},
        sampling={"max_new": 80},
        rounds={"count": rounds, "prompts": 2, "group": 4, "timeout_s": 2.0, "keep": 0},
    )


def until_death(mortal: Peer, rounds: int) -> None:
    class Death(Exception):
        pass

    def count() -> None:
        count.done += 1  # type: ignore[attr-defined]
        if count.done == rounds:  # type: ignore[attr-defined]
            raise Death

    count.done = 0  # type: ignore[attr-defined]
    with suppress(Death):
        mortal.run(count)


def peer(config: SwarmConfig, name: str, folder: Path) -> Peer:
    from planaria.swarm.assemble import assemble
    from planaria.swarm.live import board_of, own_identity
    from planaria.swarm.setting import names, of_peer

    known = frozenset(own_identity(config, other, folder).peer for other in names(config))
    me = own_identity(config, name, folder)
    return assemble(of_peer(config, name), name, folder, board_of(config, folder), me, known=known)


def done(folder: Path, name: str) -> list[RoundDone]:
    """The rounds that a peer has noted, in order."""
    from planaria.swarm.records.lines import LOG, PEERS, RoundDone, read_log

    file = folder / PEERS / name / LOG
    found = read_log(file) if file.is_file() else []
    return sorted((r for r in found if isinstance(r, RoundDone)), key=lambda record: record.round)


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    from planaria.common.errors import RunStopped

    for _ in ticks(seconds):
        if condition():
            return
    raise RunStopped(f"nothing happened for {seconds:g} s")


def ticks(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.01)


if __name__ == "__main__":
    start(main)
