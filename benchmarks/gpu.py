"""One CUDA device: speed of steps, a fleet of four processes, and predictions for GPUs that were not measured."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, parser, start
from benchmarks.fleet_run import bytes_data, require_finished, run_fleet, step_seconds
from benchmarks.recovery_time import beside, kills, totals
from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import ModelConfig, RunConfig
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.lab.inline.engine import InlineEngine
from planaria.models.stages import flops_per_token, parameter_count, stage_layers
from planaria.pipeline.network.costs import Prices, message_bytes
from planaria.pipeline.plan.clock import Clock
from planaria.report.run.recovery_timeline import recoveries
from planaria.runtime.engine.needs import needs
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.runner import StageRunner
from planaria.runtime.fleet.devices import VISIBLE, inventory


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
    """One update at a time of a recipe's model, from the samples that planaria would take."""

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
        """One update; the mean loss of its microbatches in nats."""
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


GPU_NAME = "gpu"
PLAIN, READY = Claim(low=0.97), Claim(high=1.02)
ROUTES = {"swapped": Claim(low=0.98, high=1.02), "skipping": Claim(low=0.67, high=0.80)}
STAGES = 6
"""of the pipeline whose routes are compared; a third of them is skipped"""
MFU = {"llama_124m": Claim(low=0.33), "llama_500m": Claim(low=0.45)}
KERNELS = {"llama_124m": Claim(high=600)}
"""for each microbatch"""
WARM_UP = 3
"""steps of each side that compile, choose kernels and are not counted"""


def clip_only(runner: StageRunner) -> float | None:
    """``StageRunner.finish`` for a stage that nobody will ever ask for its gradient's norm."""
    runner.clip()
    runner._pending = (0.0, 0.0)
    return None


def step_s(engine: InlineEngine | PlainGpuLoop) -> float:
    """Seconds of one step, all of its kernels included."""
    torch.cuda.synchronize()
    began = time.monotonic()
    engine.train_step()
    torch.cuda.synchronize()
    return time.monotonic() - began


def unready_step_s(engine: InlineEngine) -> float:
    """Like :func:`step_s`, without readiness for recovery."""
    with patch.object(StageRunner, "finish", clip_only):
        return step_s(engine)


def kernels(engine: InlineEngine | PlainGpuLoop) -> int:
    """Kernels that one step launches; copies and fills of memory are none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step_s(engine)
    on_device = [event.name for event in seen.events() or () if event.device_type.name == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)


def preset(name: str, microbatches: int | None, stages: int | None = None) -> RunConfig:
    """A recipe of the repository over a corpus that needs no download; its ids are bytes, its vocabulary stays."""
    data = bytes_data()
    flags = {
        f"data.{key}": str(value) for key, value in data.model_dump(include={"source", "tokenizer", "cache"}).items()
    }
    flags |= {"train.eval_every": "0", "train.compile": "true"}
    if microbatches is not None:
        flags["pipeline.microbatches"] = str(microbatches)
    if stages is not None:  # what the recipe's own stages cost is not for them
        flags |= {"pipeline.stages": str(stages), "network.forward_s": "[]", "network.backward_s": "[]"}
    return recipe.load(shipped.find(name), flags)


def rows_of(config: RunConfig, repeats: int, peak: float) -> list[Row]:
    """The verdicts on one preset; ``peak`` is the GPU's FLOP/s."""
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engine, plain = InlineEngine(config, stream), PlainGpuLoop(config, stream)
    sides = [partial(step_s, plain), partial(step_s, engine), partial(unready_step_s, engine)]
    interleaved(sides, WARM_UP)
    bare, ready, unready = interleaved(sides, repeats)
    tokens = config.pipeline.samples * config.model.context
    flops = flops_per_token(config.model) * tokens
    median, called = statistics.median(ready), f"{config.name} ({parameter_count(config.model) / 1e6:.0f} M)"
    launched, theirs = (kernels(one) / config.pipeline.microbatches for one in (engine, plain))
    return [
        Row(
            what=f"{called}: speed, inline / plain loop",
            values=[a / b for a, b in zip(bare, ready, strict=True)],
            limit="1: the same arithmetic",
            claim=PLAIN,
            beside={
                "step s": median,
                "plain s": statistics.median(bare),
                "scatter": (max(ready) - min(ready)) / median,
                "plain's scatter": (max(bare) - min(bare)) / statistics.median(bare),
                "tokens/s": round(tokens / median),
                "memory GB, both": torch.cuda.max_memory_allocated() / 1e9,
            },
        ),
        Row(
            what=f"{called}: MFU",
            values=[flops / seconds / peak for seconds in ready],
            limit=f"1: {peak / 1e12:.0f} TFLOP/s, {flops / peak:.3f} s a step",
            claim=MFU.get(config.name),
            beside={"plain's": flops / statistics.median(bare) / peak, "TFLOP/s": flops / median / 1e12},
        ),
        Row(
            what=f"{called}: kernels for each microbatch",
            values=[launched],
            limit=f"the plain loop has {theirs:.0f}",
            claim=KERNELS.get(config.name),
        ),
        Row(
            what=f"{called}: ready for recovery / not",
            values=[a / b for a, b in zip(ready, unready, strict=True)],
            limit="1",
            claim=READY,
            beside={"step s": statistics.median(unready)},
        ),
    ]


def routed(name: str, microbatches: int | None, repeats: int) -> list[Row]:
    """Steps on other routes over steps on full ones, each on an engine of its own, in turn."""
    config = preset(name, microbatches, STAGES)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engines = []
    for kind in ("full", *ROUTES):
        routing = config.routing.model_copy(update={"kind": kind, "skip": 1 / 3 if kind == "skipping" else 0.0})
        engines.append(InlineEngine(config.model_copy(update={"routing": routing}), stream))
    sides = [partial(step_s, engine) for engine in engines]
    interleaved(sides, WARM_UP)
    full, *others = interleaved(sides, repeats)
    fewer = config.model.model_copy(update={"layers": config.model.layers * 2 // 3})
    floor = flops_per_token(fewer) / flops_per_token(config.model)
    return [
        Row(
            what=f"{config.name}, {STAGES} stages: a step {kind} / full",
            values=[a / b for a, b in zip(seconds, full, strict=True)],
            limit=f"{floor:.3f}: FLOPs" if kind == "skipping" else "1",
            claim=claim,
            beside={"step s": statistics.median(seconds)},
        )
        for (kind, claim), seconds in zip(ROUTES.items(), others, strict=True)
    ]


def run_gpu() -> int:
    """The inline engine on one GPU beside a plain loop, and what readiness for recovery and other routes cost there.

    CheckFree's presets train in bf16, compiled, on a made-up corpus; the plain loop (``plain_loop.py``) trains a model
    of the same shapes on the same samples in the same process, in turn. Utilisation is the FLOPs that the model needs
    (6 N + 12 L D T a token) over what the GPU could do in the time. Kernels are those of one step, counted by torch's
    profiler, copies and fills apart. Readiness is what CheckFree adds to a step: every stage's gradient norm is read
    back, checked, and kept for a neighbour's rebirth. Routes: the first preset, in six stages, with the order of two
    stages swapped in half of the microbatches, and with a third of the stages left out.

    The claims: at least 0.97 of the plain loop's speed; at least 33 % with 124M and 45 % with 500M; at most 600 kernels
    for each microbatch of 124M; a step with readiness takes at most 1.02 of a step without, swapping 1.00 ± 0.02 of one
    without, and skipping a third of the stages 0.67 to 0.80 of a whole one.
    """
    flags = parser(GPU_NAME, run_gpu.__doc__)
    flags.add_argument("--presets", nargs="+", default=["llama_124m", "llama_500m"], metavar="NAME", help="recipes")
    flags.add_argument("--repeats", type=int, default=10, help="steps of each side, warm-up apart")
    flags.add_argument("--microbatches", type=int, help="in a step; the preset's unless given")
    flags.add_argument(
        "--peak", type=float, default=989.0, metavar="TFLOP/S", help="dense bf16 peak; 989 on H100 and H200"
    )
    given = flags.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: needs a CUDA device")
        return 2
    rows = []
    for name in given.presets:
        rows += rows_of(preset(name, given.microbatches), given.repeats, given.peak * 1e12)
        print(*(f"{row.what}: {row.value:.3f}" for row in rows[-4:]), sep="\n", flush=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows += routed(given.presets[0], given.microbatches, given.repeats)
    return conclude(
        GPU_NAME, given, rows, ["published: torchtitan 33 to 39 % for Llama 3.1 8B in bf16 on 8 to 128 H100"]
    )


FLEET_NAME = "gpu_fleet"
SPEED, BACK = Claim(low=0.85), Claim(high=1.0)
FLEET_WARM_UP = 4
"""steps that compile and are not counted"""


def arm(config: RunConfig, name: str, steps: int) -> RunConfig:
    """The preset as a run of so many steps."""
    train = config.train.model_copy(update={"steps": steps})
    fleet = config.fleet.model_copy(update={"spares": 1, "missed": 40})
    checkpoint = config.checkpoint.model_copy(update={"every": 0})
    sections = {"train": train, "fleet": fleet, "checkpoint": checkpoint}
    return config.model_copy(update={"name": f"{FLEET_NAME}-{name}", "out": str(RUNS), "prompt": "", **sections})


def called(config: RunConfig) -> str:
    return f"{config.name}, {config.pipeline.stages + 1} processes"


def speed(config: RunConfig, steps: int) -> Row:
    """Steps of the fleet, then of inline: both at once would not fit the device."""
    record = run_fleet(arm(config, "speed", FLEET_WARM_UP + steps))
    require_finished(record)
    fleet = step_seconds(record, FLEET_WARM_UP)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engine = InlineEngine(config, stream)
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
    """Kills in the forward pass, the backward pass and the commit in turn."""
    faults = kills(incidents, gap, config.pipeline.stages, ("forward", "backward", "commit"))
    record = run_fleet(arm(config, "recovery", gap * (incidents + 2)), faults)
    require_finished(record)
    timings = recoveries(record)
    back, name = totals(timings), called(config)
    return [
        Row(f"{name}: a killed stage is back, s", back, "> 0", BACK, beside(timings), judged="worst"),
        Row(f"{name}: kills after which it went on", [len(back)], f"{incidents}", Claim(low=incidents)),
    ]


def run_gpu_fleet() -> int:
    """Compare the fleet on one GPU with the inline engine, and time the recovery of a killed stage.

    CheckFree's smallest preset, in bf16 and compiled, as a pipeline of four processes that share the first device: the
    ends and three block stages. The claims: the fleet makes at least 0.85 of inline's steps in the same time, and a
    killed middle stage, with a spare at hand, is back within a second, the worst of all.
    """
    flags = parser(FLEET_NAME, run_gpu_fleet.__doc__)
    flags.add_argument("--preset", default="llama_124m", metavar="NAME", help="recipe")
    flags.add_argument("--stages", type=int, default=3, help="block stages; the ends come on top")
    flags.add_argument("--steps", type=int, default=20, help="counted steps of each engine")
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument(
        "--gap", type=int, default=26, help="steps from one kill to the next; a new worker is a spare after some 8 s"
    )
    flags.add_argument("--microbatches", type=int, help="in a step; the preset's unless given")
    given = flags.parse_args()
    found = inventory()
    if not found.devices:
        raise UserError(f"benchmarks.gpu fleet: this machine has no CUDA device: {found.lacks}")
    torch.set_num_threads(1)  # as in workers
    os.environ[VISIBLE] = found.devices[0].name
    config = preset(given.preset, given.microbatches, given.stages)
    return conclude(FLEET_NAME, given, [speed(config, given.steps), *recovery(config, given.kills, given.gap)])


PREDICTED_NAME = "gpu_predicted"
PRESETS = ("llama_124m", "llama_500m", "llama_1_5b")
BLOCKS = 3
WORKERS = BLOCKS + 1
NOTES = ("predicted, not measured: no GPU has been used",)


class OneDevice(Clock):
    """All nodes share a device: it computes for one at a time, and makes one copy each way."""

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


def predicted_preset(name: str, given: argparse.Namespace) -> RunConfig:
    """A recipe of the repository as four processes, with what passes, copies and links take.

    A forward pass is a third of the FLOPs. An optimizer's share is in the utilisation.
    """
    flags = {"pipeline.stages": str(BLOCKS), "network.forward_s": "[]", "network.backward_s": "[]"}
    flags |= {} if given.wire is None else {"pipeline.wire": given.wire}
    config = recipe.load(shipped.find(name), flags)
    tokens = config.pipeline.microbatch_size * config.model.context
    passes = [flops * tokens / rate(given) for flops in stage_flops(config.model, BLOCKS)]
    costs = {"forward_s": [seconds / 3 for seconds in passes], "backward_s": [seconds * 2 / 3 for seconds in passes]}
    links = {"latency_s": 0.0, "bandwidth": given.link * 1e9, "staging_bandwidth": given.staging * 1e9}
    return config.model_copy(update={"network": config.network.model_copy(update={**costs, **links})})


def rate(given: argparse.Namespace) -> float:
    """FLOP/s at which passes run."""
    return float(given.mfu * given.peak * 1e12)


def predicted_step_s(config: RunConfig, clock: type[Clock], overlap: bool) -> float:
    """Seconds of a simulated step."""
    network = config.network.model_copy(update={"overlap": overlap})
    itinerary = ResolvedRun(config.model_copy(update={"network": network}))
    return Prices.seconds(clock(itinerary.training(0), itinerary.prices).run())


def predicted_rows_of(name: str, given: argparse.Namespace) -> list[Row]:
    """The predictions for one preset."""
    config = predicted_preset(name, given)
    per_token = flops_per_token(config.model)
    inline_s = per_token * config.pipeline.samples * config.model.context / rate(given)
    memory = [count / 1e9 for count in needs(config).stages]
    shape = {
        "parameters, M": round(parameter_count(config.model) / 1e6, 1),
        "GFLOP a token": per_token / 1e9,
        "ends, GB": memory[0],
        "block stage, GB": memory[1],
        "all, GB": sum(memory),
    }
    full = f"{given.peak * 1e12 / per_token:,.0f} at the peak"
    rows = [Row(f"{name}: tokens/s, inline", [rate(given) / per_token], full, beside=shape)]
    message = {"MB a message": message_bytes(config.model, config.pipeline) / 1e6}
    for clock, where, limit in ((Clock, "a device each", f"{WORKERS}"), (OneDevice, "one device", "1")):
        for overlap, how in ((True, ""), (False, ", copies in place of computing")):
            ratio = inline_s / predicted_step_s(config, clock, overlap)
            rows.append(
                Row(f"{name}: {WORKERS} processes, {where}, speed / inline{how}", [ratio], limit, beside=message)
            )
    return rows


def flags() -> argparse.ArgumentParser:
    made = parser(PREDICTED_NAME, run_predicted.__doc__)
    made.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="NAME", help="recipes")
    made.add_argument("--peak", type=float, default=989.0, metavar="TFLOP/S", help="dense bf16, as published for H200")
    made.add_argument("--mfu", type=float, default=0.45, metavar="SHARE", help="model FLOPs utilisation of all passes")
    made.add_argument("--staging", type=float, default=50.0, metavar="GB/S", help="between device and host, each way")
    made.add_argument("--link", type=float, default=10.0, metavar="GB/S", help="between processes of one host")
    made.add_argument(
        "--wire", choices=("fp32", "bf16"), help="how activations travel; as the recipe says unless given"
    )
    return made


def run_predicted() -> int:
    """What GPUs would come to, by formula and by the simulator: PREDICTED, NOT MEASURED. It runs on any machine.

    CheckFree's presets as four processes, the ends and three block stages, if every pass ran at the FLOPs utilisation
    that `benchmarks.gpu gpu` is to find (--mfu of --peak). Assumed, not measured: how fast a device copies to and from
    its host's memory (--staging; 50 GB/s is about what PCIe of generation 5 gives), and how fast processes of one host
    hand over frames (--link; 10 GB/s is what 32 MB frames had in `benchmarks.edge edge` on two idle cores).

    With a device each, by the simulator of all plans. On one device, it computes for one process at a time, and makes
    one copy each way at a time. The control beside both: a device computes nothing while it copies. Not in any of it:
    what it costs a device to change between processes, kernels that small passes make less efficient, devices that
    share a bus, and waits for a host's cores.
    """
    given = flags().parse_args()
    rows = [row for name in given.presets for row in predicted_rows_of(name, given)]
    return conclude(PREDICTED_NAME, given, rows, NOTES, column="predicted")


if __name__ == "__main__":
    start(gpu=run_gpu, fleet=run_gpu_fleet, predicted=run_predicted)
