"""What cutting a model into stages costs one process: the inline engine against loops over one module.

All train the same weights on the same microbatches with the same AdamW and clipping, each in a process of its own with
one thread, and take turns; processor time is compared. The loops train planaria's own model, and the Llama of
transformers with either of its kinds of attention, sdpa and eager, of which the faster one counts. The claims: the
engine takes at most 1.02 of the plain loop's time (1.05 at a width of 128), with exactly its losses, and at most the
time of transformers, whose losses in the first steps must be the same within 1e-4, or nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import ModelConfig, PipelineConfig, RunConfig, TrainConfig
from planaria.models.stages import flops_per_token, parameter_count

if TYPE_CHECKING:
    from planaria.runtime.engine.inline import InlineEngine

NAME = "inline"
PLAIN, SMALL, TRANSFORMERS, SAME = Claim(high=1.02), Claim(high=1.05), Claim(high=1.0), Claim(high=0.0)
ENGINE, OWN = "engine", "plain loop"
ATTENTIONS = {"transformers, sdpa": "sdpa", "transformers, eager": "eager"}
FIRST, APART = 3, 1e-4
"""the steps whose losses say whether all do the same work, and by how many nats sums in another order may differ"""

_step: Callable[[], float]
"""of the one side that a process has: trains a step, and says its loss"""


def begin(side: str, config: RunConfig) -> None:
    """Make a side, in a new process."""
    import torch

    from benchmarks.plain import PlainLoop, TransformersLoop
    from planaria.data.shards import prepare
    from planaria.data.stream import Stream
    from planaria.runtime.engine.inline import InlineEngine

    global _step
    torch.set_num_threads(1)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    if side == ENGINE:
        _step = partial(loss_of_step, InlineEngine(config, stream))
    elif side == OWN:
        _step = PlainLoop(config, stream).train_step
    else:
        _step = TransformersLoop(config, stream, ATTENTIONS[side]).train_step


def loss_of_step(engine: InlineEngine) -> float:
    return engine.train_step().loss


def take(steps: int) -> tuple[float, list[float]]:
    """Processor seconds of so many steps, and their losses."""
    began = time.process_time()
    losses = [_step() for _ in range(steps)]
    return time.process_time() - began, losses


class Side:
    """One way to train, in its process: no side works in memory, or beside modules, that another has left."""

    def __init__(self, name: str, config: RunConfig, stack: ExitStack) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = stack.enter_context(ProcessPoolExecutor(1, spawn, begin, (name, config)))
        self.losses: list[float] = []

    def train(self, steps: int) -> float:
        """Processor seconds of so many more steps."""
        seconds, losses = self._process.submit(take, steps).result()
        self.losses += losses
        return seconds


def require_alike(sides: Mapping[str, Side]) -> None:
    """:raises RunStopped: when a side has other losses than the engine: it does not do the same work."""
    for name, side in sides.items():
        apart = max(abs(a - b) for a, b in zip(side.losses, sides[ENGINE].losses, strict=True))
        if not apart <= APART:
            raise RunStopped(f"{name}: its losses are up to {apart:.2g} nats from the engine's; nothing is measured")


def compare(given: argparse.Namespace, dim: int) -> Iterator[Row]:
    """Time and loss of all sides at one width."""
    config = recipe(given, dim)
    names = [ENGINE, *([OWN] if "plain" in given.against else [])]
    names += ATTENTIONS if "transformers" in given.against else []
    with ExitStack() as stack:
        sides = {name: Side(name, config, stack) for name in names}
        interleaved([lambda side=side: side.train(FIRST) for side in sides.values()], 1)
        require_alike(sides)
        timed = interleaved([lambda side=side: side.train(given.steps) for side in sides.values()], given.repeats)
    seconds = dict(zip(sides, timed, strict=True))
    what = f"width {dim}, {parameter_count(config.model) / 1e6:.2f} M parameters: engine / "
    if "plain" in given.against:
        yield ratio(what + OWN, config, seconds, OWN, SMALL if dim < 256 else PLAIN)
        gaps = [abs(a - b) for a, b in zip(sides[ENGINE].losses, sides[OWN].losses, strict=True)]
        apart = f"|loss - plain loss|, worst of {len(gaps)} steps, nats"
        yield Row(apart, gaps, "0: the same sums", SAME, judged="worst")
    if "transformers" in given.against:
        fastest = min(ATTENTIONS, key=lambda name: median(seconds[name]))
        yield ratio(what + fastest, config, seconds, fastest, TRANSFORMERS)


def ratio(what: str, config: RunConfig, seconds: Mapping[str, list[float]], other: str, claim: Claim) -> Row:
    """The engine's time over another's, repeat by repeat; beside it a step of every side."""
    steps = (config.train.steps - FIRST) // len(seconds[ENGINE])
    flops = flops_per_token(config.model) * config.pipeline.samples * config.model.context * steps
    return Row(
        what=what,
        values=[a / b for a, b in zip(seconds[ENGINE], seconds[other], strict=True)],
        limit=f"1 ({flops / min(seconds[other]) / 1e9:.0f} GFLOP/s at best)",
        claim=claim,
        beside={name: milliseconds([s / steps for s in found]) for name, found in seconds.items()},
    )


def recipe(given: argparse.Namespace, dim: int) -> RunConfig:
    return RunConfig(
        name=NAME,
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=dim, layers=given.stages, hidden=dim * 11 // 4),
        pipeline=PipelineConfig(
            stages=given.stages, microbatches=given.microbatches, microbatch_size=given.microbatch_size
        ),
        data=bytes_data(),
        train=TrainConfig(steps=given.steps * given.repeats + FIRST, eval_every=0),
    )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--against", nargs="+", choices=["plain", "transformers"], default=["plain", "transformers"])
    flags.add_argument("--dims", type=int, nargs="+", default=[128, 256, 512], help="widths of the model")
    flags.add_argument("--steps", type=int, default=2, help="in one repeat")
    flags.add_argument("--repeats", type=int, default=15, help="of each side")
    flags.add_argument("--stages", type=int, default=4, help="block stages of one layer each")
    flags.add_argument("--microbatches", type=int, default=8)
    flags.add_argument("--microbatch-size", type=int, default=4)
    given = flags.parse_args()
    if "transformers" in given.against and importlib.util.find_spec("transformers") is None:
        raise UserError("--against transformers: it is not installed; pip install 'planaria[hf]', or --against plain")
    rows = [row for dim in given.dims for row in compare(given, dim)]
    return conclude(NAME, given, rows, ["measured: processor time of the engine / of a loop, one process each"])


if __name__ == "__main__":
    start(main)
