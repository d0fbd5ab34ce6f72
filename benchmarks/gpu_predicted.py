"""What GPUs would come to, by formula and by the simulator: PREDICTED, NOT MEASURED. It runs on any machine.

CheckFree's presets as four processes, the ends and three block stages, if every pass ran at the FLOPs utilisation that
`benchmarks.gpu` is to find (--mfu of --peak). Assumed, not measured: how fast a device copies to and from its host's
memory (--staging; 50 GB/s is about what PCIe of generation 5 gives), and how fast processes of one host hand over
frames (--link; 10 GB/s is what 32 MB frames had in `benchmarks.edge` on two idle cores).

With a device each, by the simulator of all plans. On one device, it computes for one process at a time, and makes one
copy each way at a time. The control beside both: a device computes nothing while it copies. Not in any of it: what it
costs a device to change between processes, kernels that small passes make less efficient, devices that share a bus, and
waits for a host's cores.
"""

from __future__ import annotations

import argparse

from benchmarks.common import Row, conclude, parser, start
from planaria.config import recipe, shipped
from planaria.config.schema import ModelConfig, RunConfig
from planaria.models.stages import flops_per_token, parameter_count, stage_layers
from planaria.pipeline.network.costs import Prices, message_bytes
from planaria.pipeline.plan.clock import Clock
from planaria.runtime.engine.needs import needs
from planaria.runtime.engine.resolved import ResolvedRun

NAME = "gpu_predicted"
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


def preset(name: str, given: argparse.Namespace) -> RunConfig:
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


def step_s(config: RunConfig, clock: type[Clock], overlap: bool) -> float:
    """Seconds of a simulated step."""
    network = config.network.model_copy(update={"overlap": overlap})
    resolved = ResolvedRun(config.model_copy(update={"network": network}))
    return Prices.seconds(clock(resolved.training(0), resolved.prices).run())


def rows_of(name: str, given: argparse.Namespace) -> list[Row]:
    """The predictions for one preset."""
    config = preset(name, given)
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
            ratio = inline_s / step_s(config, clock, overlap)
            rows.append(
                Row(f"{name}: {WORKERS} processes, {where}, speed / inline{how}", [ratio], limit, beside=message)
            )
    return rows


def flags() -> argparse.ArgumentParser:
    made = parser(NAME, __doc__)
    made.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="NAME", help="recipes")
    made.add_argument("--peak", type=float, default=989.0, metavar="TFLOP/S", help="dense bf16, as published for H200")
    made.add_argument("--mfu", type=float, default=0.45, metavar="SHARE", help="model FLOPs utilisation of all passes")
    made.add_argument("--staging", type=float, default=50.0, metavar="GB/S", help="between device and host, each way")
    made.add_argument("--link", type=float, default=10.0, metavar="GB/S", help="between processes of one host")
    made.add_argument(
        "--wire", choices=("fp32", "bf16"), help="how activations travel; as the recipe says unless given"
    )
    return made


def main() -> int:
    given = flags().parse_args()
    rows = [row for name in given.presets for row in rows_of(name, given)]
    return conclude(NAME, given, rows, NOTES, column="predicted")


if __name__ == "__main__":
    start(main)
