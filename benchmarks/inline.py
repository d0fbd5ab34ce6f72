"""Processor time of a run in one process over a plain loop, and of a fleet's workers over one process."""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from greenlet import greenlet
from torch import Tensor
from torch.nn import Parameter

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import VOCAB, Relay, bytes_data, require_finished, run_fleet
from benchmarks.ladder import engine_for
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.data.stream import Stream
from planaria.models.hf_config import to_config
from planaria.models.optimizers.adamw import adamw
from planaria.models.stages import Llama, flops_per_token, global_name, parameter_count
from planaria.runtime.engine.optimizer import learning_rate

if TYPE_CHECKING:
    from planaria.control.protocols import Observer


class PlainLoop:
    """Trains the whole model as a script would: the same weights, microbatches, clipping and AdamW as the engine.

    Like the engine it clips stage by stage, so that both compute the same numbers.
    """

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self.config, self.step = config, 0
        self._stream = stream
        model = Llama(config.model, config.pipeline.stages, config.seed)
        self._module = self.module_of(model)
        self._groups = self.groups_of(model)
        self._optimizer = adamw([p for group in self._groups for p in group], config.optim)

    def module_of(self, model: Llama) -> Any:
        """What is trained: it has the weights of ``model``."""
        return model

    def groups_of(self, model: Llama) -> list[list[Parameter]]:
        """Its parameters, those of each stage of ``model`` together."""
        return [list(part.parameters()) for part in (model.ends, *model.stages)]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next tokens, in nats."""
        found: Tensor = self._module.loss(tokens, targets)
        return found

    def fold(self) -> None:
        """All gradients of a step are there."""
        self._module.ends.fold_gradients()

    def train_step(self) -> float:
        """One update; the mean loss of its microbatches in nats."""
        pipeline = self.config.pipeline
        losses = []
        for microbatch in range(pipeline.microbatches):
            first = self.step * pipeline.samples + microbatch * pipeline.microbatch_size
            loss = self.loss(*self._stream.batch(first, pipeline.microbatch_size)) / pipeline.microbatches
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        self.fold()
        for parameters in self._groups:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.optim.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, self.step, self.config.train.steps)
        self._optimizer.step()
        self._module.zero_grad()
        self.step += 1
        return torch.stack(losses).sum().item()


class TransformersLoop(PlainLoop):
    """The same with the Llama of ``transformers``, and its own loss."""

    def __init__(self, config: RunConfig, stream: Stream, attention: str) -> None:
        """``attention``: "sdpa" or "eager"."""
        self._attention = attention
        super().__init__(config, stream)

    def module_of(self, model: Llama) -> Any:
        import transformers

        described = transformers.LlamaConfig(**to_config(model.config), use_cache=False)
        module = transformers.AutoModelForCausalLM.from_config(described, attn_implementation=self._attention)
        with torch.no_grad():
            for name, weight in model.global_state().items():
                module.get_parameter(name).copy_(weight)
        return module.train()

    def groups_of(self, model: Llama) -> list[list[Parameter]]:
        stages = len(model.stages)
        names = (
            [global_name(model.config, stages, number, local) for local, _ in part.named_parameters()]
            for number, part in enumerate((model.ends, *model.stages))
        )
        return [[self._module.get_parameter(name) for name in group] for group in names]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self._module(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return found

    def fold(self) -> None:
        """Nothing: it has one gradient for a tied table."""


INLINE_NAME = "inline"
PLAIN, SMALL, TRANSFORMERS, SAME = Claim(high=1.02), Claim(high=1.05), Claim(high=1.0), Claim(high=0.0)
ENGINE, OWN = "engine", "plain loop"
ATTENTIONS = {"transformers, sdpa": "sdpa", "transformers, eager": "eager"}
FIRST, APART = 3, 1e-4
"""the steps whose losses say whether all do the same work, and by how many nats sums in another order may differ"""

_step: Callable[[], float]
"""of the one side that a process has: trains a step, and says its loss"""


class PausedRun(Relay):
    """A run of ``planaria train --engine inline`` that pauses after each step."""

    def __init__(self, config: RunConfig) -> None:
        train = config.train.model_copy(update={"steps": config.train.steps + 1})  # it never ends
        inline = config.model_copy(update={"engine": "inline", "train": train})
        self._run = greenlet(lambda: run_fleet(inline, around=self._around))
        self._loss = 0.0
        self._run.switch()

    def train_step(self) -> float:
        """Train until the next step is ordered; the loss of the one before."""
        found: float = self._run.switch()
        return found

    def _around(self, inner: Observer, folder: Path) -> Observer:
        super().__init__(inner)
        return self

    def on_event(self, t: float, event: e.Event) -> None:
        super().on_event(t, event)
        if isinstance(event, e.StageReady) and event.loss is not None:
            self._loss = event.loss

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if isinstance(decision, d.RunStep):
            self._run.parent.switch(self._loss)


def begin(side: str, config: RunConfig) -> None:
    """Make a side, in a new process."""
    import torch

    from planaria.data.shards import prepare
    from planaria.data.stream import Stream

    global _step
    torch.set_num_threads(1)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    if side == ENGINE:
        _step = PausedRun(config).train_step
    elif side == OWN:
        _step = PlainLoop(config, stream).train_step
    else:
        _step = TransformersLoop(config, stream, ATTENTIONS[side]).train_step


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
        name=INLINE_NAME,
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=dim, layers=given.stages, hidden=dim * 11 // 4),
        pipeline=PipelineConfig(
            stages=given.stages, microbatches=given.microbatches, microbatch_size=given.microbatch_size
        ),
        data=bytes_data(),
        train=TrainConfig(steps=given.steps * given.repeats + FIRST, eval_every=0),
    )


def run_inline() -> int:
    """What stages, their workers and their controller cost one process: an inline run against loops over one module.

    The run is what ``planaria train --engine inline`` makes, its log included. All train the same weights on the same
    microbatches with the same AdamW and clipping, each in a process of its own with one thread, and take turns;
    processor time is compared. The loops train planaria's own model, and the Llama of transformers with either of its
    kinds of attention, sdpa and eager, of which the faster one counts. The claims: the
    engine takes at most 1.02 of the plain loop's time (1.05 at a width of 128), with exactly its losses, and at most
    the time of transformers, whose losses in the first steps must be the same within 1e-4, or nothing is measured.
    """
    flags = parser(INLINE_NAME, run_inline.__doc__)
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
    return conclude(INLINE_NAME, given, rows, ["measured: processor time of the engine / of a loop, one process each"])


WORKER_CPU_NAME = "worker_cpu"
CLAIMS = {128: Claim(high=1.25), 256: Claim(high=1.08), 512: Claim(high=1.04)}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time that these live processes have used, all threads."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # how Linux names another process's clock


class Metered(Relay):
    """Notes what the workers have used when a step is ordered."""

    def __init__(self, inner: Observer) -> None:
        super().__init__(inner)
        self._pids: list[int] = []
        self.used: dict[int, float] = {}

    def on_event(self, t: float, event: e.Event) -> None:
        super().on_event(t, event)
        if isinstance(event, e.WorkerJoined):
            self._pids.append(event.pid)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        if isinstance(decision, d.RunStep):
            self.used[decision.step] = cpu_seconds(self._pids)
        super().on_decision(t, decision)


def fleet_s(config: RunConfig, warm: int) -> float:
    """Processor seconds of a step of all workers."""
    metered: list[Metered] = []

    def around(inner: Observer, folder: Path) -> Observer:
        metered.append(Metered(inner))
        return metered[0]

    require_finished(run_fleet(config, around=around))
    used, last = metered[0].used, config.train.steps - 1
    return (used[last] - used[warm]) / (last - warm)


def inline_s(config: RunConfig, warm: int, at_once: int = 1) -> float:
    """The same of one process, which has nothing else to do; the mean of so many ``at_once``."""
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fmean(fresh.map(_inline_s, repeat(config, at_once), repeat(warm, at_once)))


def _inline_s(config: RunConfig, warm: int) -> float:
    engine = engine_for(config)
    for _ in range(warm):
        engine.train_step()
    began = time.process_time()
    for _ in range(config.train.steps - warm):
        engine.train_step()
    return (time.process_time() - began) / (config.train.steps - warm)


def worker_cpu_recipe(given: argparse.Namespace, dim: int) -> RunConfig:
    return RunConfig(
        name=f"{WORKER_CPU_NAME}-{dim}",
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=dim, layers=given.stages, hidden=dim * 11 // 4),
        pipeline=PipelineConfig(
            stages=given.stages, microbatches=given.microbatches, microbatch_size=given.microbatch_size
        ),
        optim=OptimConfig(lr=1e-4),
        data=bytes_data(),
        train=TrainConfig(steps=given.steps, eval_every=0),
        fleet=FleetConfig(spares=0),
        checkpoint=CheckpointConfig(every=0),
    )


def row_of(given: argparse.Namespace, dim: int) -> Row:
    config = worker_cpu_recipe(given, dim)
    workers = given.stages + 1
    sides = [
        lambda: fleet_s(config, given.warm),
        lambda: inline_s(config, given.warm),
        lambda: inline_s(config, given.warm, workers),
    ]
    fleet, inline, crowd = interleaved(sides, given.repeats)
    limit = f"{median(crowd) / median(inline):.3f}: {workers} such processes at once"
    beside = {"fleet": milliseconds(fleet), "inline": milliseconds(inline)}
    ratios = [a / b for a, b in zip(fleet, inline, strict=True)]
    return Row(f"width {dim}", ratios, limit, CLAIMS.get(dim), beside)


def run_worker_cpu() -> int:
    """What does training cost in workers' processor time, over one process that does the same?

    The fleet's workers and the inline engine train the same small model on the same microbatches, one thread each, and
    take turns. Compared is processor time per step: of all workers together, their waiting, frames, heartbeats and
    reports included, and of the one process. The claims: at most 1.25, 1.08 and 1.04 at widths of 128, 256 and 512.

    The limit is what each of several such processes uses, as many as there are workers, that train at once and have
    nothing to do with each other: they take turns at the cores, and find caches that others have used since.
    """
    flags = parser(WORKER_CPU_NAME, run_worker_cpu.__doc__)
    flags.add_argument("--dims", type=int, nargs="+", default=list(CLAIMS), help="widths of the model")
    flags.add_argument("--steps", type=int, default=40, help="in one repeat")
    flags.add_argument("--warm", type=int, default=10, help="the first of these, which do not count")
    flags.add_argument("--repeats", type=int, default=5, help="of each side")
    flags.add_argument("--stages", type=int, default=4, help="block stages of one layer each")
    flags.add_argument("--microbatches", type=int, default=8)
    flags.add_argument("--microbatch-size", type=int, default=4)
    given = flags.parse_args()
    rows = [row_of(given, dim) for dim in given.dims]
    return conclude(WORKER_CPU_NAME, given, rows, ["measured: processor time of all workers / of the one process"])


if __name__ == "__main__":
    start(inline=run_inline, worker_cpu=run_worker_cpu)
