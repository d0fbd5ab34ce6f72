"""Time of a run in one process and of a group's member over a plain loop, and of a fleet's workers over one process."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import repeat
from statistics import fmean, median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import planaria
from benchmarks.fleet_run import VOCAB, Relay, bytes_data, finished, run_fleet
from benchmarks.harness import (
    RUNS,
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    interleaved,
    milliseconds,
    ratios,
    run_config,
    start,
)
from benchmarks.ladder import engine_for
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.group.group import Group
from planaria.group.member_state import MemberState
from planaria.models.hf_config import to_config
from planaria.models.llama_stages import Llama, flops_per_token, global_name, parameter_count
from planaria.models.optimizers.adamw import adamw
from planaria.runtime.worker.learning_rate import learning_rate

if TYPE_CHECKING:
    pass


class PlainLoop:
    """Trains the complete model with the engine's weights, microbatches, clipping by stage and AdamW."""

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self.config, self.step = config, 0
        self._stream = stream
        model = Llama(config.model, config.pipeline.stages, config.seed)
        self._module = self.module_of(model)
        self._groups = self.groups_of(model)
        self._optimizer = adamw([p for group in self._groups for p in group], config.optim)

    def module_of(self, model: Llama) -> Any:
        return model

    def groups_of(self, model: Llama) -> list[list[Parameter]]:
        return [list(part.parameters()) for part in (model.ends, *model.stages)]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next tokens, in nats."""
        found: Tensor = self._module.loss(tokens, targets)
        return found

    def fold(self) -> None:
        self._module.ends.fold_gradients()

    def train_step(self) -> float:
        """Make one update; return the mean loss of its microbatches in nats."""
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
    """The same loop with the Llama and the loss of ``transformers``."""

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
        """A tied table has one gradient already."""


PLAIN, SMALL, TRANSFORMERS, SAME = Claim(high=1.02), Claim(high=1.05), Claim(high=1.0), Claim(high=0.0)
ENGINE, OWN = "engine", "plain loop"
ATTENTIONS = {"transformers, sdpa": "sdpa", "transformers, eager": "eager"}
FIRST, APART = 3, 1e-4  # steps whose losses are compared, and the tolerance in nats for sums in another order

_step: Callable[[], float]  # the process's only side: trains a step and returns its loss


class PausedRun(Relay):
    """A run of ``planaria train --engine inline`` that pauses after each step."""

    def __init__(self, config: RunConfig) -> None:
        train = config.train.model_copy(update={"steps": config.train.steps + 1})  # the run never ends
        inline = config.model_copy(update={"engine": "inline", "train": train})
        self._run = greenlet(lambda: run_fleet(inline, around=self.attach))
        self._loss = 0.0
        self._run.switch()

    def train_step(self) -> float:
        """Train until the next step is ordered; return the loss of the one before."""
        found: float = self._run.switch()
        return found

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        super().on_event(t, event, notice)
        if isinstance(event, e.StageReady) and event.loss is not None:
            self._loss = event.loss

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if isinstance(decision, d.RunStep):
            self._run.parent.switch(self._loss)


def begin(side: str, config: RunConfig) -> None:
    """Create a side in a new process."""
    global _step
    torch.set_num_threads(1)
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "train", config.model.context, config.seed)
    if side == ENGINE:
        _step = PausedRun(config).train_step
    elif side == OWN:
        _step = PlainLoop(config, stream).train_step
    else:
        _step = TransformersLoop(config, stream, ATTENTIONS[side]).train_step


def take(steps: int) -> tuple[float, list[float]]:
    began = time.process_time()
    losses = [_step() for _ in range(steps)]
    return time.process_time() - began, losses


class Side:
    """One way to train, in its own process."""

    def __init__(self, name: str, config: RunConfig, stack: ExitStack) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = stack.enter_context(ProcessPoolExecutor(1, spawn, begin, (name, config)))
        self.losses: list[float] = []

    def train(self, steps: int) -> float:
        seconds, losses = self._process.submit(take, steps).result()
        self.losses += losses
        return seconds


def require_alike(sides: Mapping[str, Side]) -> None:
    """:raises RunStopped: if a side's losses differ from the engine's."""
    for name, side in sides.items():
        apart = max(abs(a - b) for a, b in zip(side.losses, sides[ENGINE].losses, strict=True))
        if not apart <= APART:
            raise RunStopped(f"{name}: its losses are up to {apart:.2g} nats from the engine's; nothing is measured")


def compare(args: Namespace, dim: int) -> Iterator[Row]:
    """Compare time and loss of all sides at one width."""
    config = recipe(args, dim, "inline", args.steps * args.repeats + FIRST)
    names = [ENGINE, *([OWN] if "plain" in args.against else [])]
    names += ATTENTIONS if "transformers" in args.against else []
    with ExitStack() as stack:
        sides = {name: Side(name, config, stack) for name in names}
        interleaved([lambda side=side: side.train(FIRST) for side in sides.values()], 1)
        require_alike(sides)
        timed = interleaved([lambda side=side: side.train(args.steps) for side in sides.values()], args.repeats)
    seconds = dict(zip(sides, timed, strict=True))
    what = f"width {dim}, {parameter_count(config.model) / 1e6:.2f} M parameters: engine / "
    if "plain" in args.against:
        yield ratio(what + OWN, config, seconds, OWN, SMALL if dim < 256 else PLAIN)
        apart = [abs(a - b) for a, b in zip(sides[ENGINE].losses, sides[OWN].losses, strict=True)]
        title = f"|loss - plain loss|, worst of {len(apart)} steps, nats"
        yield Row(title, apart, "0: the same sums", SAME, judged="worst")
    if "transformers" in args.against:
        fastest = min(ATTENTIONS, key=lambda name: median(seconds[name]))
        yield ratio(what + fastest, config, seconds, fastest, TRANSFORMERS)


def ratio(what: str, config: RunConfig, seconds: Mapping[str, list[float]], other: str, claim: Claim) -> Row:
    """The engine's time over another's, with each side's step."""
    steps = (config.train.steps - FIRST) // len(seconds[ENGINE])
    flops = flops_per_token(config.model) * config.pipeline.samples * config.model.context * steps
    limit = f"1 ({flops / min(seconds[other]) / 1e9:.0f} GFLOP/s at best)"
    columns = {name: milliseconds([s / steps for s in found]) for name, found in seconds.items()}
    return Row(what, ratios(seconds[ENGINE], seconds[other]), limit, claim, columns)


def recipe(args: Namespace, dim: int, name: str, steps: int, **sections: Any) -> RunConfig:
    sizes = {"microbatches": args.microbatches, "microbatch_size": args.microbatch_size}
    return run_config(
        name,
        model={"vocab": VOCAB, "dim": dim, "layers": args.stages, "hidden": dim * 11 // 4},
        pipeline={"stages": args.stages, **sizes},
        data=bytes_data(),
        train={"steps": steps, "eval_every": 0},
        **sections,
    )


@benchmark(
    "inline",
    against=Flag(["plain", "transformers"], choices=["plain", "transformers"]),
    dims=Flag([128, 256, 512], "widths of the model"),
    steps=Flag(2, "in one repeat"),
    repeats=Flag(15, "of each side"),
    stages=Flag(4, "block stages of one layer each"),
    microbatches=8,
    microbatch_size=4,
)
def run_inline(args: Namespace) -> Measurement:
    """Measure the processor time of an inline run over plain loops.

    The run is that of ``planaria train --engine inline`` with its log. All sides train the same weights on the same
    microbatches with the same AdamW and clipping, each in its own single-threaded process, in turns. The loops train
    planaria's model, and transformers' Llama with sdpa and eager attention, of which the faster counts. Claims: at most
    1.02 of the plain loop's time (1.05 at width 128) with exactly its losses; at most the time of transformers, whose
    first losses must agree within 1e-4.
    """
    if "transformers" in args.against and importlib.util.find_spec("transformers") is None:
        raise UserError("--against transformers: it is not installed; pip install 'planaria[hf]', or --against plain")
    rows = [row for dim in args.dims for row in compare(args, dim)]
    return Result(rows, ["measured: processor time of the engine / of a loop, one process each"])


CLAIMS = {128: Claim(high=1.25), 256: Claim(high=1.08), 512: Claim(high=1.04)}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of live processes, all threads."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # Linux's id of another process's clock


class Metered(Relay):
    """Records the workers' processor time at each step's order."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self.used: dict[int, float] = {}

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        super().on_event(t, event, notice)
        if isinstance(event, e.WorkerJoined):
            self._pids.append(event.pid)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        if isinstance(decision, d.RunStep):
            self.used[decision.step] = cpu_seconds(self._pids)
        super().on_decision(t, decision)


def fleet_s(config: RunConfig, warm: int) -> float:
    """Return the processor seconds of a step of all workers."""
    metered = Metered()
    finished(config, around=metered.attach)
    used, last = metered.used, config.train.steps - 1
    return (used[last] - used[warm]) / (last - warm)


def inline_s(config: RunConfig, warm: int, at_once: int = 1) -> float:
    """Return the processor seconds of a step in one process, the mean of ``at_once`` concurrent ones."""
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


def row_of(args: Namespace, dim: int) -> Row:
    config = recipe(
        args, dim, f"worker_cpu-{dim}", args.steps, optim={"lr": 1e-4}, fleet={"spares": 0}, checkpoint={"every": 0}
    )
    workers = args.stages + 1
    sides = [
        lambda: fleet_s(config, args.warm),
        lambda: inline_s(config, args.warm),
        lambda: inline_s(config, args.warm, workers),
    ]
    fleet, inline, crowd = interleaved(sides, args.repeats)
    limit = f"{median(crowd) / median(inline):.3f}: {workers} such processes at once"
    columns = {"fleet": milliseconds(fleet), "inline": milliseconds(inline)}
    return Row(f"width {dim}", ratios(fleet, inline), limit, CLAIMS.get(dim), columns)


@benchmark(
    "worker_cpu",
    dims=Flag(list(CLAIMS), "widths of the model", type=int),
    steps=Flag(40, "in one repeat"),
    warm=Flag(10, "the first of these, which do not count"),
    repeats=Flag(5, "of each side"),
    stages=Flag(4, "block stages of one layer each"),
    microbatches=8,
    microbatch_size=4,
)
def run_worker_cpu(args: Namespace) -> Measurement:
    """Measure the processor time of a fleet's workers over that of one process.

    The fleet's workers and the inline engine train the same small model on the same microbatches, one thread each, in
    turns. Compared is the processor time per step of all workers, including waiting, frames, heartbeats and reports.
    Claims: at most 1.25, 1.08 and 1.04 at widths 128, 256 and 512. The limit is the time of as many unrelated
    processes that share cores and caches.
    """
    rows = [row_of(args, dim) for dim in args.dims]
    return Result(rows, ["measured: processor time of all workers / of the one process"])


# ---- a group of programs with loops of their own: the cost of ``wrap``

GROUP_SKIP = 5
"""first steps, which are not timed"""


@benchmark("group_cost", repeats=Flag(10), steps=Flag(60), width=256, layers=4, batch=64)
def run_group(args: Namespace) -> Measurement:
    """Steps of one member of a group and of the same loop without one, in turns, in this process. Claim: <= 1.01.

    Shared machines scatter more than that, so the time in the group's calls is measured too, without the owner's
    optimizer, over all other time of the loop.
    """
    torch.set_num_threads(1)
    shares: list[float] = []
    wrapped, plain = interleaved([lambda: _group_side(args, shares), lambda: _group_side(args, None)], args.repeats)
    columns = {"with, ms": 1e3 * median(wrapped), "without, ms": 1e3 * median(plain)}
    return [
        Row("step of one member / of the plain loop", ratios(wrapped, plain), "1", Claim(high=1.01), columns),
        Row("1 + time in the group's calls / other time", [1 + share for share in shares], "1", Claim(high=1.01)),
    ]


def _group_side(args: Namespace, shares: list[float] | None) -> float:
    """Return the median seconds of a step; of a member's, with ``shares``, to which its time in calls is added."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = TensorDataset(torch.randn(args.batch * args.steps, 16, args.width))
    loader = DataLoader(data, args.batch, shuffle=True)
    if shares is None:
        return median(_timed(model, optimizer, _rows(loader)))
    shutil.rmtree(RUNS / "group", ignore_errors=True)
    calls, updates = list[float](), list[float]()
    with planaria.host(key=RUNS / "group.key", out=RUNS) as group, _timing(calls, updates):
        wrapped = group.wrap(optimizer, model, exchange="noloco", every=50)
        seconds = _timed(model, wrapped, group.shard(loader))
    spent = sum(calls[GROUP_SKIP:]) - sum(updates[GROUP_SKIP:])
    shares.append(spent / (sum(seconds) - spent))
    return median(seconds)


@contextmanager
def _timing(calls: list[float], updates: list[float]) -> Iterator[None]:
    """Record the seconds of each step's call of a group, and those of the owner's optimizer in it."""

    def timed(method: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
        def call(*args: Any, **named: Any) -> None:
            since = time.monotonic()
            method(*args, **named)
            seconds.append(time.monotonic() - since)

        return call

    with (
        patch.object(Group, "_proceed", timed(Group._proceed, calls)),
        patch.object(MemberState, "step", timed(MemberState.step, updates)),
    ):
        yield


def _rows(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches in the way in which ``shard`` reads them: by number, in this thread."""
    dataset, collate = loader.dataset, loader.collate_fn
    for numbers in loader.batch_sampler:
        yield collate([dataset[number] for number in numbers])


def _timed(model: nn.Module, optimizer: Optimizer, batches: Iterable[tuple[Tensor, ...]]) -> list[float]:
    """Return the seconds of each step but the first ones."""
    seconds, since = [], time.monotonic()
    for (inputs,) in batches:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        seconds.append(now - since)
        since = now
    return seconds[GROUP_SKIP:]


if __name__ == "__main__":
    start(inline=run_inline, worker_cpu=run_worker_cpu, group=run_group)
