"""One CUDA device: steps, a fleet of four processes, its memory, and predictions for GPUs that were not measured."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fleet_run import bytes_data, finished, step_seconds
from benchmarks.harness import (
    RUNS,
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    interleaved,
    parser,
    ratios,
    start,
)
from benchmarks.recovery_time import columns as recovery_parts
from benchmarks.recovery_time import kills, totals
from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import ModelConfig, RunConfig
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.llama_stages import flops_per_token, parameter_count, stage_layers
from planaria.pipeline.network.costs import MessageCosts, message_bytes
from planaria.pipeline.plan.simulation import PlanSimulation
from planaria.report.run.recoveries import recoveries
from planaria.report.run.stage_peaks import StagePeak, stage_peaks
from planaria.runtime.fleet.devices import VISIBLE, Device, Inventory, inventory
from planaria.runtime.prediction.memory import fit_to_memory, stage_memory
from planaria.runtime.preparation.requirements import device_needs
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.runner import StageRunner


class Block(nn.Module):
    """A decoder layer with two fused input matrices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.width, self.hidden = config.heads, config.kv, config.head_dim, config.hidden
        self.gains = nn.Parameter(torch.ones(2, config.dim))
        self.qkv = nn.Parameter(torch.randn((self.heads + 2 * self.kv) * self.width, config.dim) * config.init_std)
        self.out = nn.Parameter(torch.randn(config.dim, self.heads * self.width) * config.init_std)
        self.gate_up = nn.Parameter(torch.randn(2 * self.hidden, config.dim) * config.init_std)
        self.down = nn.Parameter(torch.randn(config.dim, self.hidden) * config.init_std)
        self.eps = config.norm_eps

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]; tables [T, d / 2]."""
        batch, length, dim = x.shape
        mixed = F.linear(F.rms_norm(x, (dim,), self.gains[0], self.eps), self.qkv)
        q, k, v = mixed.view(batch, length, -1, self.width).split([self.heads, self.kv, self.kv], 2)
        q, k, v = (one.transpose(1, 2) for one in (turned(q, cos, sin), turned(k, cos, sin), v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv < self.heads)
        x = x + F.linear(seen.transpose(1, 2).reshape(batch, length, -1), self.out)
        gate, up = F.linear(F.rms_norm(x, (dim,), self.gains[1], self.eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Model(nn.Module):
    """Token ids and targets [B, T] → mean cross entropy in nats."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.gain = nn.Parameter(torch.ones(config.dim))
        self.head = nn.Parameter(torch.randn(config.vocab, config.dim) * config.init_std)
        nn.init.normal_(self.table.weight, std=config.init_std)
        rates = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(config.context)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.eps = config.norm_eps

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(F.rms_norm(x, (x.shape[-1],), self.gain, self.eps), self.head)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, heads, d] with channels j and j + d / 2 turned by their position's angles."""
    left, right = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class PlainGpuLoop:
    """A plain training loop over the samples that planaria would read."""

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self.config, self.stream, self.step = config, stream, 0
        with torch.device(config.train.device):
            self.model = Model(config.model)
        self._loss = torch.compile(self.model)
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def train_step(self) -> float:
        """Make one update; return the mean loss of its microbatches in nats."""
        pipeline, device = self.config.pipeline, self.config.train.device
        total = torch.zeros((), device=device)
        for microbatch in range(pipeline.microbatches):
            first = self.step * pipeline.samples + microbatch * pipeline.microbatch_size
            given = self.stream.batch(first, pipeline.microbatch_size)
            tokens, targets = (one.pin_memory().to(device, non_blocking=True) for one in given)
            with torch.autocast(device, torch.bfloat16, enabled=self.config.train.precision == "bf16"):
                loss = self._loss(tokens, targets) / pipeline.microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return float(total)


PLAIN, READY, COPIES = Claim(low=0.97), Claim(high=1.02), Claim(low=1.0)
ROUTES = {"swapped": Claim(low=0.98, high=1.02), "skipping": Claim(low=0.67, high=0.80)}
STAGES = 6  # of the pipeline whose routes are compared; a third of them is skipped
MFU = {"llama_124m": Claim(low=0.33), "llama_500m": Claim(low=0.45)}
KERNELS = {"llama_124m": Claim(high=600)}  # for each microbatch
WARM_UP = 3  # steps of each side that compile, choose kernels and are not counted


def clip_only(runner: StageRunner) -> float | None:
    """``StageRunner.finish`` without reading back the gradient norm."""
    runner.clip()
    runner._pending.norms = (0.0, 0.0)
    return None


def step_s(engine: ReferenceEngine | PlainGpuLoop) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    engine.train_step()
    torch.cuda.synchronize()
    return time.monotonic() - began


def unready_step_s(engine: ReferenceEngine) -> float:
    """Like :func:`step_s`, without readiness for recovery."""
    with patch.object(StageRunner, "finish", clip_only):
        return step_s(engine)


def kernels(engine: ReferenceEngine | PlainGpuLoop) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step_s(engine)
    on_device = [event.name for event in seen.events() or () if event.device_type.name == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)


def preset(
    name: str, microbatches: int | None, stages: int | None = None, settings: Mapping[str, str] = MappingProxyType({})
) -> RunConfig:
    """Return a shipped recipe, with ``settings``, with its vocabulary over the synthetic byte corpus."""
    data = bytes_data()
    flags = {
        f"data.{key}": str(value) for key, value in data.model_dump(include={"source", "tokenizer", "cache"}).items()
    }
    flags |= {"train.eval_every": "0", "train.compile": "true", "train.recompute": "auto"}
    flags |= {"network.forward_s": "[]", "network.backward_s": "[]", **settings}  # ignore measured stage costs
    if microbatches is not None:
        flags["pipeline.microbatches"] = str(microbatches)
    if stages is not None:
        flags |= {"pipeline.stages": str(stages)}
    return recipe.load(shipped.find(name), flags)


def rows_of(config: RunConfig, repeats: int, peak: float) -> list[Row]:
    """Measure one preset; ``peak`` is the GPU's FLOP/s."""
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engine, plain = ReferenceEngine(config, stream), PlainGpuLoop(config, stream)
    sides = [partial(step_s, plain), partial(step_s, engine), partial(unready_step_s, engine)]
    interleaved(sides, WARM_UP)
    bare, ready, unready = interleaved(sides, repeats)
    tokens = config.pipeline.samples * config.model.context
    flops = flops_per_token(config.model) * tokens
    median, called = statistics.median(ready), f"{config.name} ({parameter_count(config.model) / 1e6:.0f} M)"
    launched, theirs = (kernels(one) / config.pipeline.microbatches for one in (engine, plain))
    bare_s, memory = statistics.median(bare), torch.cuda.max_memory_allocated() / 1e9
    speed = {
        "step s": median,
        "plain s": bare_s,
        "scatter": (max(ready) - min(ready)) / median,
        "plain's scatter": (max(bare) - min(bare)) / bare_s,
        "tokens/s": round(tokens / median),
        "memory GB, both": memory,
    }
    use = {"plain's": flops / bare_s / peak, "TFLOP/s": flops / median / 1e12}
    limit, plain_kernels = (
        f"1: {peak / 1e12:.0f} TFLOP/s, {flops / peak:.3f} s a step",
        f"the plain loop has {theirs:.0f}",
    )
    shares = [flops / seconds / peak for seconds in ready]
    unready_s = {"step s": statistics.median(unready)}
    return [
        Row(f"{called}: speed, inline / plain loop", ratios(bare, ready), "1: the same arithmetic", PLAIN, speed),
        Row(f"{called}: MFU", shares, limit, MFU.get(config.name), use),
        Row(f"{called}: kernels for each microbatch", [launched], plain_kernels, KERNELS.get(config.name)),
        Row(f"{called}: ready for recovery / not", ratios(ready, unready), "1", READY, unready_s),
    ]


def copied(config: RunConfig, repeats: int) -> Row:
    """Measure steps with bf16 copies of matrices beside steps that cast them, in turn, apart from other engines."""
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "train", config.model.context, config.seed)
    sides = []
    for copies in (False, True):
        train = config.train.model_copy(update={"bf16_weights": copies})
        sides.append(partial(step_s, ReferenceEngine(config.model_copy(update={"train": train}), stream)))
    interleaved(sides, WARM_UP)
    cast, copy = interleaved(sides, repeats)
    return Row(f"{config.name}: speed, bf16 copies of matrices / casts", ratios(cast, copy), "1", COPIES)


def routed(name: str, microbatches: int | None, repeats: int) -> list[Row]:
    """Measure steps on other routes over full ones, in turn, each with its own engine."""
    config = preset(name, microbatches, STAGES)
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engines = []
    for kind in ("full", *ROUTES):
        routing = config.routing.model_copy(update={"kind": kind, "skip": 1 / 3 if kind == "skipping" else 0.0})
        engines.append(ReferenceEngine(config.model_copy(update={"routing": routing}), stream))
    sides = [partial(step_s, engine) for engine in engines]
    interleaved(sides, WARM_UP)
    full, *others = interleaved(sides, repeats)
    fewer = config.model.model_copy(update={"layers": config.model.layers * 2 // 3})
    floor = flops_per_token(fewer) / flops_per_token(config.model)
    rows = []
    for (kind, claim), seconds in zip(ROUTES.items(), others, strict=True):
        limit = f"{floor:.3f}: FLOPs" if kind == "skipping" else "1"
        columns = {"step s": statistics.median(seconds)}
        rows.append(
            Row(f"{config.name}, {STAGES} stages: a step {kind} / full", ratios(seconds, full), limit, claim, columns)
        )
    return rows


@benchmark(
    "gpu",
    presets=Flag(["llama_124m", "llama_500m"], "recipes", metavar="NAME"),
    repeats=Flag(10, "steps of each side, warm-up apart"),
    microbatches=Flag(None, "in a step; the preset's unless given", type=int),
    peak=Flag(989.0, "dense bf16 peak; 989 on H100 and H200", metavar="TFLOP/S"),
)
def run_gpu(args: Namespace) -> Measurement:
    """Compare the reference engine on one GPU with a plain loop; measure the cost of readiness and of other routes.

    CheckFree's presets train in bf16, compiled, on a synthetic corpus. The plain loop trains a model of the same shapes
    on the same samples in the same process, in turn. Utilisation (MFU) is the model's FLOPs (6 N + 12 L D T per token)
    over the GPU's peak. Kernels are counted by torch's profiler, without copies and fills. Readiness: every stage's
    gradient norm is read back, checked and kept for a neighbour's recovery. Copies: ``train.bf16_weights``. Routes: the
    first preset in six stages, with two stages swapped in half of the microbatches, and with a third of the stages
    skipped.

    Claims: at least 0.97 of the plain loop's speed; MFU at least 33 % (124M) and 45 % (500M); at most 600 kernels per
    microbatch of 124M; readiness at most 1.02; bf16 copies no slower than casts; swapping 1.00 ± 0.02; skipping 0.67 to
    0.80 of a full step.
    """
    if not torch.cuda.is_available():
        print("benchmarks.gpu: needs a CUDA device")
        return 2
    rows = []
    for name in args.presets:
        rows += rows_of(preset(name, args.microbatches), args.repeats, args.peak * 1e12)
        torch.cuda.empty_cache()
        rows.append(copied(preset(name, args.microbatches), args.repeats))
        print(*(f"{row.what}: {row.value:.3f}" for row in rows[-5:]), sep="\n", flush=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows += routed(args.presets[0], args.microbatches, args.repeats)
    return Result(rows, ["published: torchtitan 33 to 39 % for Llama 3.1 8B in bf16 on 8 to 128 H100"])


SPEED, BACK = Claim(low=0.85), Claim(high=1.0)
FLEET_WARM_UP = 4  # steps that compile and are not counted


def arm(config: RunConfig, name: str, steps: int) -> RunConfig:
    train = config.train.model_copy(update={"steps": steps})
    fleet = config.fleet.model_copy(update={"spares": 1, "missed_heartbeats": 40})
    checkpoint = config.checkpoint.model_copy(update={"every": 0})
    sections = {"train": train, "fleet": fleet, "checkpoint": checkpoint}
    return config.model_copy(update={"name": f"gpu_fleet-{name}", "out": str(RUNS), "prompt": "", **sections})


def called(config: RunConfig) -> str:
    return f"{config.name}, {config.pipeline.stages + 1} processes"


def speed(config: RunConfig, steps: int) -> Row:
    """Measure the fleet, then inline: both at once would not fit the device."""
    fleet = step_seconds(finished(arm(config, "speed", FLEET_WARM_UP + steps)), FLEET_WARM_UP)
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engine = ReferenceEngine(config, stream)
    inline = [step_s(engine) for _ in range(FLEET_WARM_UP + steps)][FLEET_WARM_UP:]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    median = statistics.median(inline)
    cells = {"fleet s": statistics.median(fleet), "inline s": median}
    return Row(
        f"{called(config)}: speed, fleet / inline", [median / s for s in fleet], "1: the same kernels", SPEED, cells
    )


def recovery(config: RunConfig, incidents: int, gap: int) -> list[Row]:
    faults = kills(incidents, gap, config.pipeline.stages, ("forward", "backward", "commit"))
    timings = recoveries(finished(arm(config, "recovery", gap * (incidents + 2)), faults))
    back, name = totals(timings), called(config)
    return [
        Row(f"{name}: a killed stage is back, s", back, "> 0", BACK, recovery_parts(timings), judged="worst"),
        Row(f"{name}: kills after which it continued", [len(back)], f"{incidents}", Claim(low=incidents)),
    ]


@benchmark(
    "gpu_fleet",
    preset=Flag("llama_124m", "recipe", metavar="NAME"),
    stages=Flag(3, "block stages; the ends come on top"),
    steps=Flag(20, "counted steps of each engine"),
    kills=20,
    gap=Flag(26, "steps from one kill to the next; a new worker is a spare after some 8 s"),
    microbatches=Flag(None, "in a step; the preset's unless given", type=int),
)
def run_gpu_fleet(args: Namespace) -> Measurement:
    """Compare the fleet on one GPU with the inline engine, and time the recovery of a killed stage.

    CheckFree's smallest preset, bf16 and compiled, as four processes that share the first device. Claims: at least 0.85
    of inline's steps per second; a killed middle stage, with a spare, is back within 1 s in every case.
    """
    found = inventory()
    if not found.devices:
        raise UserError(f"benchmarks.gpu fleet: this machine has no CUDA device: {found.lacks}")
    torch.set_num_threads(1)  # as in workers
    os.environ[VISIBLE] = found.devices[0].name
    config = preset(args.preset, args.microbatches, args.stages)
    return [speed(config, args.steps), *recovery(config, args.kills, args.gap)]


PRESETS = ("llama_124m", "llama_500m", "llama_1_5b")
BLOCKS = 3
WORKERS = BLOCKS + 1
NOTES = ("predicted, not measured: no GPU has been used",)


class OneDevice(PlanSimulation):
    """All nodes share a device that computes for one at a time, with one copy each way."""

    def _choose(self) -> None:
        for node in self.ready:
            if all(self.idle.values()):
                self.woken = {node}
                super()._choose()

    def _copy(self, through: dict[int, int], node: int) -> int:
        return super()._copy(through, 0)


def stage_flops(model: ModelConfig, stages: int) -> list[float]:
    """FLOPs per token of each stage 0..``stages``: its layers' share of ``flops_per_token``, and the ends the rest."""
    whole, bare = flops_per_token(model), flops_per_token(model.model_copy(update={"layers": 0}))
    counts = [len(stage_layers(model, stages, stage)) for stage in range(stages + 1)]
    return [count * (whole - bare) / model.layers + (0.0 if stage else bare) for stage, count in enumerate(counts)]


def predicted_preset(name: str, args: Namespace) -> RunConfig:
    """Return a shipped recipe as four processes with the seconds of passes, copies and links.

    A forward pass is a third of the FLOPs; the utilisation includes the optimizer.
    """
    flags = {"pipeline.stages": str(BLOCKS), "network.forward_s": "[]", "network.backward_s": "[]"}
    flags |= {} if args.wire is None else {"pipeline.wire": args.wire}
    config = recipe.load(shipped.find(name), flags)
    tokens = config.pipeline.microbatch_size * config.model.context
    passes = [flops * tokens / rate(args) for flops in stage_flops(config.model, BLOCKS)]
    costs = {"forward_s": [seconds / 3 for seconds in passes], "backward_s": [seconds * 2 / 3 for seconds in passes]}
    links = {"latency_s": 0.0, "bandwidth": args.link * 1e9, "staging_bandwidth": args.staging * 1e9}
    return config.model_copy(update={"network": config.network.model_copy(update={**costs, **links})})


def rate(args: Namespace) -> float:
    return float(args.mfu * args.peak * 1e12)


def predicted_step_s(config: RunConfig, clock: type[PlanSimulation], overlap: bool) -> float:
    network = config.network.model_copy(update={"overlap": overlap})
    itinerary = ResolvedRun(config.model_copy(update={"network": network}))
    return MessageCosts.seconds(clock(itinerary.training(0), itinerary.prices).run())


def predicted_rows_of(name: str, args: Namespace) -> list[Row]:
    config = predicted_preset(name, args)
    per_token = flops_per_token(config.model)
    inline_s = per_token * config.pipeline.samples * config.model.context / rate(args)
    memory = [count / 1e9 for count in device_needs(config).stages]
    shape = {
        "parameters, M": round(parameter_count(config.model) / 1e6, 1),
        "GFLOP a token": per_token / 1e9,
        "ends, GB": memory[0],
        "block stage, GB": memory[1],
        "all, GB": sum(memory),
    }
    full = f"{args.peak * 1e12 / per_token:,.0f} at the peak"
    rows = [Row(f"{name}: tokens/s, inline", [rate(args) / per_token], full, columns=shape)]
    message = {"MB a message": message_bytes(config.model, config.pipeline).larger / 1e6}
    for clock, where, limit in ((PlanSimulation, "a device each", f"{WORKERS}"), (OneDevice, "one device", "1")):
        for overlap, how in ((True, ""), (False, ", copies in place of computing")):
            ratio = inline_s / predicted_step_s(config, clock, overlap)
            rows.append(
                Row(f"{name}: {WORKERS} processes, {where}, speed / inline{how}", [ratio], limit, columns=message)
            )
    return rows


PREDICTED_FLAGS = {
    "presets": Flag(list(PRESETS), "recipes", metavar="NAME"),
    "peak": Flag(989.0, "dense bf16, as published for H200", metavar="TFLOP/S"),
    "mfu": Flag(0.45, "model FLOPs utilisation of all passes", metavar="SHARE"),
    "staging": Flag(50.0, "between device and host, each way", metavar="GB/S"),
    "link": Flag(10.0, "between processes of one host", metavar="GB/S"),
    "wire": Flag(None, "format of activations; the recipe's unless given", choices=("fp32", "bf16")),
}


def flags() -> argparse.ArgumentParser:
    return parser("gpu_predicted", run_predicted.__doc__, PREDICTED_FLAGS)


@benchmark("gpu_predicted", **PREDICTED_FLAGS)
def run_predicted(args: Namespace) -> Measurement:
    """Predict the speed of GPUs by formula and simulator: PREDICTED, NOT MEASURED. It runs on any machine.

    CheckFree's presets as four processes, if every pass ran at the utilisation --mfu of --peak. Assumed: the bandwidth
    between device and host memory (--staging; PCIe 5 gives about 50 GB/s) and between processes of one host (--link;
    `benchmarks.edge edge` measured 10 GB/s for 32 MB frames on two idle cores).

    With a device each, the plans' simulator predicts the step. One device computes for one process at a time, with one
    copy each way at a time; the control does not compute while it copies. Not included: switches between processes,
    inefficient kernels of small passes, shared buses, and waits for a host's cores.
    """
    rows = [row for name in args.presets for row in predicted_rows_of(name, args)]
    return Result(rows, NOTES, column="predicted")


# ---- predicted memory

CLOSE = Claim(low=0.9, high=1.1)
MEMORY_STEPS = 3
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "llama_124m": ("llama_124m", {"pipeline.stages": 4}),
    "llama_124m, 3 stages, eager": ("llama_124m", {"pipeline.stages": 3, "train.compile": False}),
    "llama_500m": ("llama_500m", {"pipeline.microbatches": 6}),
    "llama_500m, recomputed": ("llama_500m", {"pipeline.microbatches": 6, "train.recompute": True}),
}
"""name → preset and settings"""


def memory_shape(name: str, settings: dict[str, object], device: Device) -> RunConfig:
    """Return a preset with ``settings`` for a short run, fitted to the device."""
    flags = {key: str(value).lower() for key, value in settings.items()}
    config = preset(name, None, None, flags)
    sections = {
        "train": config.train.model_copy(update={"steps": MEMORY_STEPS}),
        "fleet": config.fleet.model_copy(update={"spares": 0, "missed_heartbeats": 40}),
        "checkpoint": config.checkpoint.model_copy(update={"every": 0}),
    }
    config = config.model_copy(update={"name": f"gpu_memory-{name}", "out": str(RUNS), "prompt": "", **sections})
    found, line = fit_to_memory(config, Inventory((device,)), config.pipeline.stages + 1)
    print(line, flush=True)
    return found


def memory_rows_of(called: str, config: RunConfig, device: Device) -> list[Row]:
    """Run a shape, and compare the peaks of the ends and of all block stages."""
    peaks = stage_peaks(finished(config))
    memory = stage_memory(config, device.memory)
    each = [one.tensors / peak.device_bytes for one, peak in zip(memory, peaks, strict=True)]
    sizes = [f"{peak.device_bytes / 1e9:.2f} GB at {peak.where}" for peak in peaks]
    columns = {"in flight": config.pipeline.in_flight or 0, "recompute": str(config.train.recompute)}
    largest = max(range(1, len(peaks)), key=lambda stage: peaks[stage].device_bytes)
    return [
        Row(f"{called}: ends, predicted / measured", each[:1], sizes[0], CLOSE, columns),
        Row(f"{called}: largest block stage, predicted / measured", [each[largest]], sizes[largest], CLOSE, columns),
        Row(f"{called}: all block stages", each[1:], _sum(peaks), None, columns),
    ]


def _sum(peaks: list[StagePeak]) -> str:
    return f"{sum(peak.device_bytes for peak in peaks) / 1e9:.1f} GB in all"


@benchmark("gpu_memory", shapes=Flag(list(SHAPES), "of the runs", metavar="NAME"))
def run_gpu_memory(args: Namespace) -> Measurement:
    """Compare the predicted memory of stages with the peaks of a fleet on one device.

    Four shapes: CheckFree's presets in four and three stages, compiled and eager, with kept and recomputed activations,
    with the microbatches in flight that planaria chooses for this device. Measured: the most bytes of all tensors in
    each worker over three steps. Claim: predictions between 0.9 and 1.1 of the ends' and of the largest block stage's.
    """
    found = inventory()
    if not found.devices:
        raise UserError(f"benchmarks.gpu memory: this machine has no CUDA device: {found.lacks}")
    device = found.devices[0]
    os.environ[VISIBLE] = device.name
    rows = []
    for called in args.shapes:
        rows += memory_rows_of(called, memory_shape(*SHAPES[called], device), device)
        print(*(f"{row.what}: {[f'{value:.3f}' for value in row.values]} {row.limit}" for row in rows[-3:]), sep="\n")
    return rows


if __name__ == "__main__":
    start(gpu=run_gpu, fleet=run_gpu_fleet, predicted=run_predicted, memory=run_gpu_memory)
