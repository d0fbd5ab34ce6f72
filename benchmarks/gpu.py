"""The inline engine on one GPU beside a plain loop, and what readiness for recovery and other routes cost there.

CheckFree's presets train in bf16, compiled, on a made-up corpus; the plain loop (``plain_loop.py``) trains a model of
the same shapes on the same samples in the same process, in turn. Utilisation is the FLOPs that the model needs
(6 N + 12 L D T a token) over what the GPU could do in the time. Kernels are those of one step, counted by torch's
profiler, copies and fills apart. Readiness is what CheckFree adds to a step: every stage's gradient norm is read back,
checked, and kept for a neighbour's rebirth. Routes: the first preset, in six stages, with the order of two stages
swapped in half of the microbatches, and with a third of the stages left out.

The claims: at least 0.97 of the plain loop's speed; at least 33 % with 124M and 45 % with 500M; at most 600 kernels
for each microbatch of 124M; a step with readiness takes at most 1.02 of a step without, swapping 1.00 ± 0.02 of one
without, and skipping a third of the stages 0.67 to 0.80 of a whole one.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start
from benchmarks.fleet_run import bytes_data
from benchmarks.plain_loop import PlainGpuLoop
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.models.stages import flops_per_token, parameter_count
from planaria.runtime.engine.inline import InlineEngine
from planaria.runtime.engine.runner import StageRunner

NAME = "gpu"
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
    return conclude(NAME, given, rows, ["published: torchtitan 33 to 39 % for Llama 3.1 8B in bf16 on 8 to 128 H100"])


if __name__ == "__main__":
    start(main)
