"""What a run withstands without losing anybody who is well, and how soon it replaces those who are not.

busy: a model with stages of 135M-parameter shapes trains beside 40 busy loops; the claim: no worker counts as dead
but the one that is killed, and its death is noticed within 1 s. paused: the controller of a small run is stopped by
SIGSTOP for 1, 3 and 8 s; the claim: no worker is lost. strangers: 1,000 idle connections and 100 that send garbage are
opened to all ports of a run; the claim: it keeps 95 % of its pace. stuck: main threads hang in a step, a commit, a
save, a hand-over, a link and a round between replicas; disk: what a worker saves goes to a pipe that nobody reads, so
that its write never ends; the claim for both: each is replaced within its limit and 3 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import bytes_data, require_finished, run_fleet
from benchmarks.watched_run import training

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.control.logs import RunRecord


NAME = "hardships"
PARTS = ("busy", "paused", "strangers", "stuck", "disk")
PAUSES_S = (1.0, 3.0, 8.0)
LIMIT_S = 3.0
PLACES = ("forward", "commit", "save", "transfer", "link", "settle")
SAVED_EVERY = 50
NOTICED, REPLACED, NOBODY, PACE = Claim(high=1.0), Claim(high=LIMIT_S + 3.0), Claim(high=0), Claim(low=0.95)


def recipe(name: str, steps: int, **sections: dict[str, Any]) -> RunConfig:
    """A model of four small block stages; ``sections`` change single fields."""
    from planaria.config.schema import RunConfig

    plain: dict[str, Any] = {
        "name": name,
        "out": str(RUNS),
        "model": {"vocab": 512, "dim": 64, "layers": 4, "heads": 4, "hidden": 176, "context": 64},
        "pipeline": {"stages": 4, "microbatches": 4, "microbatch_size": 1},
        "data": bytes_data().model_dump(),
        "train": {"steps": steps, "eval_every": 0},
        "recovery": {"strategy": "checkfree, checkpoint"},
        "checkpoint": {"every": 0},
    }
    return RunConfig.model_validate(plain | {name: plain.get(name, {}) | given for name, given in sections.items()})


def busy(given: argparse.Namespace) -> list[Row]:
    """Stages of the 135M-parameter shape (width 576, 30 layers in 6 stages), two microbatches of 32 tokens."""
    from planaria.control import events as e
    from planaria.faults.trace import Fault

    shape = {"vocab": 512, "dim": 576, "layers": 30, "heads": 9, "kv_heads": 3, "hidden": 1536, "context": 32}
    config = recipe(
        f"{NAME}-busy", given.steps, model=shape, pipeline={"stages": 6, "microbatches": 2, "microbatch_size": 1}
    )
    with ExitStack() as ending:
        for _ in range(given.load):
            loop = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            ending.callback(loop.kill)
        record = run_fleet(config, (Fault(step=given.steps * 3 // 4, stage=3, moment="forward", offset=0.5),))
    require_finished(record)
    killed = next(fact.worker for _, fact in record.history if isinstance(fact, e.FaultInjected))
    lost = [fact for _, fact in record.history if isinstance(fact, e.WorkerLost)]
    false = [fact for fact in lost if fact.worker != killed]
    broken = sum(isinstance(fact, e.EdgeBroken) for _, fact in record.history)
    beside = {"load": os.getloadavg()[0], "edges broken": broken, "steps": given.steps}
    return [
        Row(f"load {given.load}: workers lost that were well", [len(false)], "none: 0", NOBODY, beside),
        Row(f"load {given.load}: SIGKILL noticed after, s", noticed(record), "a closed connection: 0", NOTICED),
    ]


def noticed(record: RunRecord) -> list[float]:
    """Seconds from each fault to the loss of its worker."""
    from planaria.control import events as e

    struck, found = {}, []
    for t, fact in record.history:
        if isinstance(fact, e.FaultInjected):
            struck[fact.worker] = t
        elif isinstance(fact, e.WorkerLost) and fact.worker in struck:
            found.append(t - struck.pop(fact.worker))
    return found


def paused(given: argparse.Namespace) -> list[Row]:
    """``planaria train`` in a process of its own, stopped again and again."""
    from planaria.control import events as e

    found = dict.fromkeys(PAUSES_S, 0)
    with training(recipe(f"{NAME}-paused", 10**6)) as run:
        for seconds in PAUSES_S:
            for _ in range(given.pauses):
                before = sum(isinstance(fact, e.WorkerLost) for fact in run.facts())
                os.kill(run.process.pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(run.process.pid, signal.SIGCONT)
                run.steps_more(5)
                found[seconds] += sum(isinstance(fact, e.WorkerLost) for fact in run.facts()) - before
    return [
        Row(f"controller stopped {seconds:g} s, {given.pauses} times: workers lost", [lost], "none: 0", NOBODY)
        for seconds, lost in found.items()
    ]


def strangers(given: argparse.Namespace) -> list[Row]:
    """Windows with and without them take turns in one run."""
    from planaria.control import events as e
    from planaria.runtime.fleet.joining import read_door

    ratios, lost = [], 0
    with training(recipe(f"{NAME}-strangers", 10**6)) as run:
        ports = [read_door(run.folder).at, *(f.at for f in run.facts() if isinstance(f, e.WorkerJoined))]
        for _ in range(given.windows):
            alone = run.pace(given.seconds)
            with ExitStack() as ending:
                for number in range(1100):
                    host, _, port = ports[number % len(ports)].rpartition(":")
                    caller = ending.enter_context(socket.create_connection((host, int(port)), 10))
                    with suppress(OSError):
                        caller.sendall(os.urandom(512) if number % 11 == 0 else b"")
                ratios.append(run.pace(given.seconds) / alone)
        lost = sum(isinstance(fact, e.WorkerLost) for fact in run.facts())
    return [
        Row("pace beside 1,100 strangers over alone", ratios, "nobody there: 1", PACE),
        Row("workers lost beside strangers", [lost], "none: 0", NOBODY),
    ]


def stuck(given: argparse.Namespace) -> list[Row]:
    """Each place of a main thread, several times in one run."""
    from planaria.faults.trace import Fault

    rows = []
    for place in PLACES:
        faults = []
        for number in range(given.stuck):
            step = 4 + 6 * number
            if place in ("transfer", "link"):  # somebody has to die before there is a state to give, a place to take
                faults.append(Fault(step=step, stage=3))
            faults.append(Fault.model_validate({"step": step, "stage": 2, "signal": "stuck", "moment": place}))
        config = recipe(
            f"{NAME}-stuck-{place}",
            8 + 6 * given.stuck,
            fleet={"timeout_s": LIMIT_S, "disk_timeout_s": LIMIT_S, "spares": 2},
            checkpoint={"every": 3},
            exchange={"replicas": 2, "kind": "noloco", "options": {"every": 3}} if place == "settle" else {},
        )
        record = run_fleet(config, tuple(faults))
        require_finished(record)
        found = noticed_stuck(record)
        what = f"stuck in {place}, {len(found)} of {given.stuck} replaced: s until lost"
        rows.append(Row(what, found, f"the limit: {LIMIT_S:g} s", REPLACED, judged="worst"))
        rows.append(Row(f"stuck in {place}: replaced", [len(found) / given.stuck], "all: 1", Claim(low=1)))
    return rows


def noticed_stuck(record: RunRecord) -> list[float]:
    """Seconds from each main thread's fault to the loss of its worker."""
    from planaria.control import events as e

    struck, found = {}, []
    for t, fact in record.history:
        if isinstance(fact, e.FaultInjected) and fact.signal == "stuck":
            struck[fact.worker] = t
        elif isinstance(fact, e.WorkerLost) and fact.cause == "stuck" and fact.worker in struck:
            found.append(t - struck.pop(fact.worker))
    return found


def disk(given: argparse.Namespace) -> list[Row]:
    """The stage file that one worker of a run is about to write is a pipe, again and again."""
    from planaria.control import decisions as d
    from planaria.control import events as e
    from planaria.control.statefile import read_state
    from planaria.runtime.checkpoint.stage_file import stage_file
    from planaria.runtime.checkpoint.store import CheckpointStore

    found: list[float] = []
    fleet = {"timeout_s": LIMIT_S, "disk_timeout_s": LIMIT_S, "spares": 2}
    with training(recipe(f"{NAME}-disk", 10**6, fleet=fleet, checkpoint={"every": SAVED_EVERY})) as run:
        store = CheckpointStore(run.folder / "checkpoints")
        for _ in range(given.stuck):
            state = read_state(run.folder)
            holder = next(worker for worker in state.workers if worker.stage == 2)
            before = store.reached()
            # Sealing a checkpoint tidies up what is left of others.
            run.wait(lambda before=before: store.reached() != before, "a checkpoint", every=0.02)  # type: ignore[misc]
            time.sleep(0.3)  # it tidies up after the checkpoint has appeared; the next one takes seconds
            step = store.reached() + SAVED_EVERY
            folder = store.unfinished(step, state.generation)
            folder.mkdir(parents=True)
            os.mkfifo(stage_file(folder, 2).with_suffix(f".{holder.pid}.unfinished"))
            who = holder.worker, holder.incarnation
            run.wait(lambda who=who: any(_is_lost(fact, *who) for fact in run.facts()), "a loss")  # type: ignore[misc]
            lost = [t for t, fact in run.history() if _is_lost(fact, *who)]
            asked = [t for t, fact in run.history() if isinstance(fact, d.Save) and fact.step == step]
            found.append(lost[0] - asked[0])
            run.steps_more(2 * SAVED_EVERY)
        stuck = [fact for fact in run.facts() if isinstance(fact, e.WorkerLost)]
    others = sum(fact.cause != "stuck" for fact in stuck) + abs(len(stuck) - given.stuck)
    what = f"disk hangs in a save, {len(found)} of {given.stuck} replaced: s until lost"
    return [
        Row(what, found, f"the limit: {LIMIT_S:g} s", REPLACED, judged="worst"),
        Row("disk hangs: workers lost for another reason", [others], "none: 0", NOBODY),
    ]


def _is_lost(fact: object, worker: str, incarnation: int) -> bool:
    from planaria.control import events as e

    return isinstance(fact, e.WorkerLost) and (fact.worker, fact.incarnation) == (worker, incarnation)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    flags.add_argument("--load", type=int, default=40, help="busy loops")
    flags.add_argument("--steps", type=int, default=200, help="beside them; the kill comes at three quarters")
    flags.add_argument("--pauses", type=int, default=10, help="of each length")
    flags.add_argument("--windows", type=int, default=7, help="with strangers, and as many without")
    flags.add_argument("--seconds", type=float, default=10.0, help="of a window")
    flags.add_argument("--stuck", type=int, default=5, help="main threads that hang at each place")
    given = flags.parse_args()
    rows: list[Row] = []
    for part in given.parts:
        rows += {"busy": busy, "paused": paused, "strangers": strangers, "stuck": stuck, "disk": disk}[part](given)
    notes = [f"recipe: fleet.timeout_s = fleet.disk_timeout_s = {LIMIT_S:g} where main threads hang, else as usual"]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
