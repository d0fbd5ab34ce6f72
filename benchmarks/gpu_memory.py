"""Predicted and measured memory of a fleet's stages on one CUDA device."""

from __future__ import annotations

import os
from argparse import Namespace

from benchmarks.common import RUNS
from benchmarks.fleet_run import finished
from benchmarks.gpu import preset
from benchmarks.harness import Cell, Claim, Flag, Measurement, Row, benchmark, start
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.report.run.stage_peaks import StagePeak, stage_peaks
from planaria.runtime.fleet.devices import VISIBLE, Device, Inventory, inventory
from planaria.runtime.prediction.memory import fit_to_memory, stage_memory

CLOSE = Claim(low=0.9, high=1.1)
STEPS = 3
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "llama_124m": ("llama_124m", {"pipeline.stages": 4}),
    "llama_124m, 3 stages, eager": ("llama_124m", {"pipeline.stages": 3, "train.compile": False}),
    "llama_500m": ("llama_500m", {"pipeline.microbatches": 6}),
    "llama_500m, recomputed": ("llama_500m", {"pipeline.microbatches": 6, "train.recompute": True}),
}
"""name → preset and settings"""


def shape(name: str, settings: dict[str, object], device: Device) -> RunConfig:
    """Return a preset with ``settings`` for a short run, fitted to the device."""
    flags = {key: str(value).lower() for key, value in settings.items()}
    config = preset(name, None, None, flags)
    sections = {
        "train": config.train.model_copy(update={"steps": STEPS}),
        "fleet": config.fleet.model_copy(update={"spares": 0, "missed_heartbeats": 40}),
        "checkpoint": config.checkpoint.model_copy(update={"every": 0}),
    }
    config = config.model_copy(update={"name": f"gpu_memory-{name}", "out": str(RUNS), "prompt": "", **sections})
    found, line = fit_to_memory(config, Inventory((device,)), config.pipeline.stages + 1)
    print(line, flush=True)
    return found


def rows_of(called: str, config: RunConfig, device: Device) -> list[Row]:
    """Run a shape, and compare the peaks of the ends and of all block stages."""
    peaks = stage_peaks(finished(config))
    memory = stage_memory(config, device.memory)
    each = [one.tensors / peak.device_bytes for one, peak in zip(memory, peaks, strict=True)]
    sizes = [f"{peak.device_bytes / 1e9:.2f} GB at {peak.where}" for peak in peaks]
    beside: dict[str, Cell] = {"in flight": config.pipeline.in_flight or 0, "recompute": str(config.train.recompute)}
    largest = max(range(1, len(peaks)), key=lambda stage: peaks[stage].device_bytes)
    return [
        Row(f"{called}: ends, predicted / measured", each[:1], sizes[0], CLOSE, beside),
        Row(f"{called}: largest block stage, predicted / measured", [each[largest]], sizes[largest], CLOSE, beside),
        Row(f"{called}: all block stages", each[1:], _sum(peaks), None, beside),
    ]


def _sum(peaks: list[StagePeak]) -> str:
    return f"{sum(peak.device_bytes for peak in peaks) / 1e9:.1f} GB in all"


@benchmark("gpu_memory", shapes=Flag(list(SHAPES), "of the runs", metavar="NAME"))
def run_gpu_memory(given: Namespace) -> Measurement:
    """Compare the predicted memory of stages with the peaks of a fleet on one device.

    Four shapes: CheckFree's presets in four and three stages, compiled and eager, with kept and recomputed activations,
    with the microbatches in flight that planaria chooses for this device. Measured: the most bytes of all tensors in
    each worker over three steps. Claim: predictions between 0.9 and 1.1 of the ends' and of the largest block stage's.
    """
    found = inventory()
    if not found.devices:
        raise UserError(f"benchmarks.gpu_memory: this machine has no CUDA device: {found.lacks}")
    device = found.devices[0]
    os.environ[VISIBLE] = device.name
    rows = []
    for called in given.shapes:
        rows += rows_of(called, shape(*SHAPES[called], device), device)
        print(*(f"{row.what}: {[f'{value:.3f}' for value in row.values]} {row.limit}" for row in rows[-3:]), sep="\n")
    return rows


if __name__ == "__main__":
    start(memory=run_gpu_memory)
