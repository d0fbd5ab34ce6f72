"""Model FLOPs utilisation of the inline engine on one GPU, and what readiness for recovery and other routes cost there.

CheckFree's presets train in bf16, compiled, on a made-up corpus. Utilisation is the FLOPs that the model needs
(6 N + 12 L D T a token) over what the GPU could do in the time. Readiness is what CheckFree adds to a step: every
stage's gradient norm is read back, checked, and kept for a neighbour's rebirth. Routes: the first preset, in six
stages, with the order of two stages swapped in half of the microbatches, and with a third of the stages left out. The
claims: at least 45 % with 124M and with 500M, a step with readiness takes at most 1.02 of a step without, swapping
1.00 ± 0.02 of one without, and skipping a third of the stages 0.67 to 0.80 of a whole one.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start
from benchmarks.fleet_run import bytes_data
from planaria import recipe, shipped
from planaria.config import RunConfig
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.engine.inline import InlineEngine
from planaria.engine.runner import StageRunner
from planaria.model.stages import Ends, flops_per_token, parameter_count

NAME = "gpu"
READY = Claim(high=1.02)
ROUTES = {"swapped": Claim(low=0.98, high=1.02), "skipping": Claim(low=0.67, high=0.80)}
STAGES = 6
"""of the pipeline whose routes are compared; a third of them is skipped"""
MFU = dict.fromkeys(("llama_124m", "llama_500m"), Claim(low=0.45))
WARM_UP = 3
"""steps of each side that compile, choose kernels and are not counted"""


def clip_only(runner: StageRunner) -> float | None:
    """``StageRunner.finish`` for a stage that nobody will ever ask for its gradient's norm."""
    if isinstance(runner.module, Ends):
        runner.module.fold_gradients()
    torch.nn.utils.clip_grad_norm_(runner.parameters.values(), runner.config.optim.clip)
    runner._pending = (0.0, 0.0)
    return None


def step_s(engine: InlineEngine) -> float:
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
    engine = InlineEngine(config, stream)
    sides = [lambda: step_s(engine), lambda: unready_step_s(engine)]
    interleaved(sides, WARM_UP)
    ready, unready = interleaved(sides, repeats)
    tokens = config.pipeline.samples * config.model.context
    flops = flops_per_token(config.model) * tokens
    median = statistics.median(ready)
    return [
        Row(
            what=f"{config.name} ({parameter_count(config.model) / 1e6:.0f} M): MFU",
            values=[flops / seconds / peak for seconds in ready],
            limit=f"1: {peak / 1e12:.0f} TFLOP/s, {flops / peak:.3f} s a step",
            claim=MFU.get(config.name),
            beside={
                "step s": median,
                "tokens/s": round(tokens / median),
                "TFLOP/s": flops / median / 1e12,
                "memory GB": torch.cuda.max_memory_allocated() / 1e9,
            },
        ),
        Row(
            what=f"{config.name}: ready for recovery / not",
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
        print(*(f"{row.what}: {row.value:.3f}" for row in rows[-2:]), sep="\n", flush=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows += routed(given.presets[0], given.microbatches, given.repeats)
    return conclude(NAME, given, rows, ["published: torchtitan 33 to 39 % for Llama 3.1 8B in bf16 on 8 to 128 H100"])


if __name__ == "__main__":
    start(main)
