"""The fleet on one GPU beside the inline engine there, and how long a stage that is killed there takes to come back.

CheckFree's smallest preset, in bf16 and compiled, as a pipeline of four processes that share the first device: the
ends and three block stages. The claims: the fleet makes at least 0.85 of inline's steps in the same time, and a killed
middle stage, with a spare at hand, is back within a second, the worst of all.
"""

from __future__ import annotations

import gc
import os
import statistics

import torch

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import require_finished, run_fleet, step_seconds
from benchmarks.gpu import preset, step_s
from benchmarks.recovery_time import beside, kills, totals
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.report.run.recovery_timeline import recoveries
from planaria.runtime.engine.inline import InlineEngine
from planaria.runtime.fleet.devices import VISIBLE, inventory

NAME = "gpu_fleet"
SPEED, BACK = Claim(low=0.85), Claim(high=1.0)
WARM_UP = 4
"""steps that compile and are not counted"""


def arm(config: RunConfig, name: str, steps: int) -> RunConfig:
    """The preset as a run of so many steps."""
    train = config.train.model_copy(update={"steps": steps})
    fleet = config.fleet.model_copy(update={"spares": 1, "missed": 40})
    checkpoint = config.checkpoint.model_copy(update={"every": 0})
    sections = {"train": train, "fleet": fleet, "checkpoint": checkpoint}
    return config.model_copy(update={"name": f"{NAME}-{name}", "out": str(RUNS), "prompt": "", **sections})


def called(config: RunConfig) -> str:
    return f"{config.name}, {config.pipeline.stages + 1} processes"


def speed(config: RunConfig, steps: int) -> Row:
    """Steps of the fleet, then of inline: both at once would not fit the device."""
    record = run_fleet(arm(config, "speed", WARM_UP + steps))
    require_finished(record)
    fleet = step_seconds(record, WARM_UP)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engine = InlineEngine(config, stream)
    inline = [step_s(engine) for _ in range(WARM_UP + steps)][WARM_UP:]
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
        raise UserError(f"benchmarks.{NAME}: this machine has no CUDA device: {found.lacks}")
    torch.set_num_threads(1)  # as in workers
    os.environ[VISIBLE] = found.devices[0].name
    config = preset(given.preset, given.microbatches, given.stages)
    return conclude(NAME, given, [speed(config, given.steps), *recovery(config, given.kills, given.gap)])


if __name__ == "__main__":
    start(main)
