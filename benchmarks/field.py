"""Beside the field: planaria, torchft and torchrun train the same model while their processes are killed.

All start from planaria's weights (a LLaMA of some million parameters that learns the bytes of Python's own library) and
read planaria's samples in planaria's order, handed over as files; batch, AdamW and clipping are the same, and nothing
is measured unless the first losses agree within 1e-4. Each system has four processes that train, one thread each. A
SIGKILL strikes one of them in every interval, at a time and place that the seed draws, the same for all systems;
coordinators (planaria's controller, torch's agents, torchft's lighthouse) are spared. The arms:

    pipeline   planaria: ends and three block stages, each with a twin at its neighbour, and a spare
    replicas   planaria: two replicas of two processes that average gradients in every step, and a spare
    torchft    four replicas of the whole model; lighthouse, limits and samples as its own pages have them
    tuned      the same with shorter limits, and samples given out so that none is passed over
    torchrun   DistributedDataParallel, all started again from the newest checkpoint; Daly's best interval

The time to the next step is from a kill to the first new update that began after it. The claims: planaria's is at most
a fifth of torchft's, tuned or not, and planaria loses no sample. What else differs is shown: throughput, memory, idle
processes. The trainers are benchmarks/field_torchrun.py and field_torchft.py. torchft lives in an environment of its
own, and is never imported here; it is a nightly build, as its DistributedDataParallel of 0.2.0 takes all replicas down
with one. To make it, in the repository's root:

    python3 -m venv ../venv-torchft && ../venv-torchft/bin/pip install torch==2.13.0 torchft-nightly safetensors
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import ROOT, Row, conclude, parser, start
from benchmarks.field_arms import ARMS, PLACES, THEIRS, TORCHRUN, best_interval, systems
from benchmarks.field_ledger import Update, standing, strikes
from benchmarks.field_rows import Pair, rows_of
from benchmarks.field_runs import NAME, Ran, ran
from benchmarks.field_systems import versions
from planaria.common.errors import RunStopped, UserError
from planaria.common.signals import interrupted

INSTALL = "python3 -m venv ../venv-torchft && ../venv-torchft/bin/pip install torch==2.13.0 torchft-nightly safetensors"
FIRST, APART = 3, 1e-4
"""the updates whose losses say whether all do the same work, and by how many nats sums in another order may differ"""


def first_losses(updates: Sequence[Update], batch: int) -> list[float]:
    """Losses of the first updates, as far as all processes took part in them and told of them."""
    stand, _ = standing(updates)
    most = max(update.by for update in updates)
    early = itertools.takewhile(lambda update: (update.used, update.by) == (batch, most), stand[:FIRST])
    return [update.loss for update in early]


def require_alike(found: Mapping[str, Ran], batch: int) -> None:
    """:raises RunStopped: when an arm's first losses are not those of another: they do not do the same work."""
    first = {arm: first_losses(one.updates, batch) for arm, one in found.items()}
    of, against = next(iter(first.items()))
    for arm, losses in first.items():
        if not losses:
            raise RunStopped(f"{arm}: not all processes took part in the first update; nothing is measured")
        apart = max(abs(a - b) for a, b in zip(losses, against, strict=False))
        if not apart <= APART:
            raise RunStopped(f"{arm}: its first losses are up to {apart:.2g} nats from {of}'s; nothing is measured")


def measured(given: argparse.Namespace, seed: int) -> dict[str, Pair]:
    """Every arm with one seed, without kills and with them."""
    free: dict[str, Ran] = {}
    struck: dict[str, Ran] = {}
    arms = systems(given, seed)
    for name, system in arms.items():
        free[name] = ran(system, f"free-{seed}", (), given.free)
        print(f"seed {seed}, {name}: {told(free[name])}", flush=True)
    require_alike(free, given.batch)
    planned = strikes(seed, given.kills, given.every)
    for name, system in arms.items():
        struck[name] = ran(system, f"struck-{seed}", planned, (given.kills + 1) * given.every)
        print(f"seed {seed}, {name}: {told(struck[name])}", flush=True)
    return {name: Pair(free[name], struck[name]) for name in free}


def told(one: Ran) -> str:
    stand, undone = standing(update for update in one.updates if update.t <= one.end)
    return f"{len(stand)} updates in {one.end - one.begin:.0f} s, {len(undone)} undone, {len(one.kills)} kills"


def missing(given: argparse.Namespace) -> list[str]:
    """Arms that cannot be run here."""
    asked = [name for flag, name in ARMS.items() if flag in given.arms and name in THEIRS]
    return asked if asked and versions(given.python) is None else []


def refuse_senseless(given: argparse.Namespace) -> None:
    """:raises UserError: when nothing could be measured like that."""
    if lacking := missing(given):
        rest = " ".join(flag for flag, name in ARMS.items() if flag in given.arms and name not in lacking)
        raise UserError(
            f"--python {given.python}: has no torchft; make its environment ({INSTALL}), or leave it out: --arms {rest}"
        )
    if given.batch % PLACES:
        raise UserError(f"--batch {given.batch}: is shared among {PLACES} processes; give a multiple of {PLACES}")
    if given.layers % (PLACES - 1):
        raise UserError(
            f"--layers {given.layers}: must be a multiple of {PLACES - 1}, the block stages of the pipeline"
        )


def left_out(given: argparse.Namespace) -> list[Row]:
    """A line for each arm that was not asked for."""
    how = dict.fromkeys(THEIRS, f"not measured; its environment: {INSTALL}")
    absent = [name for flag, name in ARMS.items() if flag not in given.arms]
    return [Row(name, [], how.get(name, "not measured: not among --arms")) for name in absent]


def command_line() -> argparse.ArgumentParser:
    """Every flag that the arms read."""
    flags = parser(NAME, __doc__)
    flags.add_argument("--python", type=Path, default=ROOT.parent / "venv-torchft/bin/python", help="that has torchft")
    flags.add_argument("--torchrun", type=Path, default=Path(sys.executable), help="that runs the arm torchrun")
    flags.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights, samples and kills")
    flags.add_argument("--kills", type=int, default=10, help="of each run that is struck")
    flags.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds from one kill to the next")
    flags.add_argument("--free", type=float, default=30.0, metavar="S", help="seconds of a run without kills")
    flags.add_argument("--heartbeat-ms", type=int, default=500, help="tuned: who is silent for so long is dead")
    flags.add_argument("--join-ms", type=int, default=1000, help="tuned: how long a quorum waits for who was there")
    flags.add_argument("--gloo-s", type=float, default=0.3, metavar="S", help="tuned: in which an average must be done")
    flags.add_argument("--save-every", type=int, default=100, help="planaria: steps between checkpoints")
    flags.add_argument("--source", default="stdlib", help="what is learned, as data.source of a recipe")
    flags.add_argument("--dim", type=int, default=256, help="width of the model")
    flags.add_argument("--layers", type=int, default=3)
    flags.add_argument("--context", type=int, default=64, help="tokens of a sample")
    flags.add_argument("--batch", type=int, default=16, help="samples of an update, in all processes together")
    flags.add_argument("--lr", type=float, default=1e-3)
    return flags


def main() -> int:
    given = command_line().parse_args()
    refuse_senseless(given)
    import torch

    torch.set_num_threads(1)
    notes = [f"{name} {version}" for name, version in (versions(given.python) or {}).items()]
    given.interval = 1
    if "torchrun" in given.arms:
        given.interval, save_s = best_interval(given, given.seeds[0])
        notes.append(f"{TORCHRUN} saves every {given.interval} updates; a save takes {save_s * 1e3:.0f} ms")
    with interrupted():  # or what was started would outlive this process
        pairs = [measured(given, seed) for seed in given.seeds]
    by_arm = {name: [found[name] for found in pairs] for name in pairs[0]}
    return conclude(NAME, given, [*rows_of(given, by_arm), *left_out(given)], [", ".join(notes)])


if __name__ == "__main__":
    start(main)
