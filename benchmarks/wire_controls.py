"""Controls of codecs between stages: the law of rounding noise, bits and rounding of each leg, and rotations."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import planaria
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, gaps, start
from benchmarks.home_links import final_loss, trained
from planaria.config import recipe
from planaria.config.consent import permit_code
from planaria.runtime.prediction.preflight_table import stated_step_s
from planaria.runtime.resolved_run import ResolvedRun

Wire = str | Mapping[str, Any]
NEAREST = {"kind": "groups", "rounding": "nearest"}
LEGS: dict[str, Wire] = {
    "8/4": "8/4",
    "4/8": "4/8",
    "8/4, nearest": {**NEAREST, "forward": 8, "backward": 4},
    "4/8, nearest": {**NEAREST, "forward": 4, "backward": 8},
}
"""bits of activations and gradients; gradients are rounded at random unless ``nearest``"""
NOISE: dict[str, Wire] = {"8/4": "8/4", "8/3": "8/3", "8/2": "8/2"}
CONTINUED, FACTOR = 1 / 2, 0.1
"""of the steps: further training; of the learning rate: fine-tuning"""
ROTATIONS: dict[str, Wire] = {
    rotate: {"kind": "benchmarks.wire_codecs:RotatedGroups", "forward": 4, "backward": 6, "rotate": rotate}
    for rotate in ("none", "whole", "gated")
}
LIES: dict[str, Wire] = {
    f"× {factor}": {"kind": "benchmarks.wire_codecs:FalseScales", "factor": factor} for factor in (4, 16)
}
ANCHORED, PROJECTED = (
    {"kind": "benchmarks.wire_codecs:AnchoredGroups"},
    "benchmarks.learned_projection:ProjectedLlama",
)
NO_WORSE = Claim(high=0.05)
HOME: dict[str, Any] = {
    "engine": "fleet", "network.latency_s": 0.005, "network.bandwidth": 1.25e6, "network.inbound": "shared",
    "network.latency_queued": True, "network.forward_s": [0.001, *[0.002] * 4],
    "network.backward_s": [0.002, *[0.004] * 4],
}  # fmt: skip
"""links and passes of `planaria compare wire`"""
WIDE = {"embedding_std": 1.0}
"""settings of models with separate heads: smaller embeddings learn slowly, and seeds differ more"""
FLAGS = {
    "seeds": Flag(3, "of each arm"),
    "steps": Flag(200, "of each run from scratch"),
    "width": Flag(128, "of the models"),
    "microbatches": Flag(4, "of a step"),
}


@benchmark("home_links_legs", **FLAGS)
def run_legs(args: Namespace) -> Measurement:
    """Train with 8 bits on one leg and few on the other: loss minus that of bf16, from scratch and in fine-tuning.

    Fine-tuning starts from a model trained with bf16, on other samples, for half the steps at a tenth of the rate.
    Claim: 3 bits of gradients cost 3 to 5.5 times as much as 4; the variance of the noise is 5.4 times as large, with 2
    bits 9 times that. Few bits cost less than runs from scratch differ, so this is measured like fine-tuning, but at
    the whole rate.
    """
    with _folder() as folder:
        kept = folder / "bf16"
        dense = [
            trained(args.width, "bf16", seed, args.steps, kept, args.microbatches, True, model=WIDE)
            for seed in range(args.seeds)
        ]
        scratch = {name: _from_scratch(wire, args, folder) for name, wire in {**LEGS, **NOISE}.items()}
        tuned, continued = (
            {name: _continued(wire, args, folder, dense, rate) for name, wire in {"bf16": "bf16", **wires}.items()}
            for wires, rate in ((LEGS, FACTOR), (NOISE, 1.0))
        )
    scratch["bf16"] = [run.validations[args.steps] for run in dense]
    extra = _above_bf16(continued)
    rows = _rows(_above_bf16(scratch), "from scratch") + _rows(_above_bf16(tuned), "fine-tuning")
    three, two = (fmean(extra[more]) / fmean(extra[less]) for more, less in (("8/3", "8/4"), ("8/2", "8/3")))
    law = [
        Row("mean of 8/3 / mean of 8/4", [three], "5.4", Claim(3.0, 5.5)),
        Row("mean of 8/2 / mean of 8/3", [two], "9"),
    ]
    return Result([*rows, *_rows(extra, "continued"), *law], [_note(args)])


@benchmark("home_links_rotation", **FLAGS)
def run_rotation(args: Namespace) -> Measurement:
    """Rotate activations before rounding to 4 bits in groups of 32, gradients have 6 bits: loss minus that of bf16.

    ``gated`` rotates a group whose largest number exceeds twice its second (TAH-Quant, arXiv 2506.01352). Claims: a
    rotation of the whole width costs ≥ 0.5 nats more than none, and ``gated`` ≤ 0.02 nats more than bf16.
    """
    with _folder() as folder:
        losses = {name: _from_scratch(wire, args, folder) for name, wire in {"bf16": "bf16", **ROTATIONS}.items()}
    extra = _above_bf16(losses)
    worse = fmean(extra["whole"]) - fmean(extra["none"])
    rows = [
        *_rows(extra, "4/6"),
        Row("whole - none, mean nats", [worse], "0", Claim(low=0.5)),
        Row("gated - bf16, mean nats", [fmean(extra["gated"])], "0", Claim(high=0.02)),
    ]
    return Result(rows, [_note(args)])


@benchmark("home_links_lies", **FLAGS)
def run_lies(args: Namespace) -> Measurement:
    """Multiply one stage's gradients by less than receivers reject: loss minus that of an honest ``6/4``.

    The stages before it get all their gradients from this one. The embedding is the usual one: with a large one all
    gradients are clipped, and scales have no effect. No claim.
    """
    with _folder() as folder:
        honest = _from_scratch("6/4", args, folder, wide=False)
        losses = {name: _from_scratch(wire, args, folder, wide=False) for name, wire in LIES.items()}
    rows = [Row(f"gradients {name} - 6/4, nats", gaps(each, honest), "0") for name, each in losses.items()]
    return Result(rows, [_note(args)])


@benchmark(
    "home_links_projection", **FLAGS, rates=Flag([1.0, 2.0, 4.0], "learning rates of the first seed, the best of all")
)
def run_projection(args: Namespace) -> Measurement:
    """Send a learned projection to a quarter of the width in ``8/4``: loss minus that of bf16, with other codecs.

    A subspace's embedding contains N(0, 1), so all arms have one of that size. A subspace sends token ids, too, and so
    does a projection with anchors. Times are those until the loss that bf16 has after 70 % of its steps, over links of
    10 Mbit/s that all messages to a home share. Claims: the projection costs at most 0.05 nats, and takes at most 0.6
    of the time of ``6/4``.
    """
    learned = {**WIDE, "family": PROJECTED}
    few: dict[str, Any] = {"rank": args.width // 4}
    arms: dict[str, tuple[Wire, Mapping[str, Any]]] = {
        "bf16": ("bf16", WIDE),
        "6/4": ("6/4", WIDE),
        "subspace, D/4": ("D/4:8/4", {}),
        "learned, D/4": ("8/4", {**learned, "options": few}),
        "learned, D/4, anchors": (ANCHORED, {**learned, "options": few | {"anchors": True}}),
    }
    with _folder() as folder:
        raced = {name: _best_rate(args, folder, wire, model) for name, (wire, model) in arms.items()}
    extra = _above_bf16({name: [curve[args.steps] for curve in arm.curves] for name, arm in raced.items()})
    targets = [_smoothed(curve)[_at_most(0.7 * args.steps, curve)] for curve in raced["bf16"].curves]
    seconds = {name: arm.seconds_to(targets) for name, arm in raced.items()}
    rows = _rows(extra, "embedding N(0, 1)")
    rows += [
        Row(f"{name} / 6/4, time", ratios, "1", Claim(high=0.6) if "anchors" in name else None)
        for name, each in seconds.items()
        if (ratios := [one / base for one, base in zip(each, seconds["6/4"], strict=True) if one and base])
    ]
    missed = {name: f"{sum(one is None for one in each)} of {args.seeds}" for name, each in seconds.items()}
    rates = {name: arm.rate for name, arm in raced.items()}
    anchored = Row("learned, D/4, anchors - bf16, mean nats", [fmean(extra["learned, D/4, anchors"])], "0", NO_WORSE)
    plain = Row("learned, D/4 - bf16, mean nats", [fmean(extra["learned, D/4"])], "0", NO_WORSE)
    return Result([*rows, plain, anchored], [_note(args), f"factors on the rate: {rates}", f"target missed: {missed}"])


class Raced(NamedTuple):
    """An arm at its best learning rate."""

    rate: float
    """a factor"""
    curves: list[dict[int, float]]
    """by seed: step → validation loss, nats"""
    step_s: float

    def seconds_to(self, targets: Sequence[float]) -> list[float | None]:
        """Return the seconds until each seed's target, or None if it is not reached."""
        steps = [
            next((step for step, loss in _smoothed(curve).items() if loss <= target), None)
            for curve, target in zip(self.curves, targets, strict=True)
        ]
        return [None if step is None else step * self.step_s for step in steps]


def _best_rate(args: Namespace, folder: Path, wire: Wire, model: Mapping[str, Any]) -> Raced:
    """Train the first seed at each rate, and the others at the one that ends lowest."""

    def curve(seed: int, rate: float) -> tuple[dict[int, float], float]:
        every = max(1, args.steps // 20)
        run = trained(
            args.width, wire, seed, args.steps, folder, args.microbatches, True, rate, None, None, model, every
        )
        with permit_code(True):
            step_s = stated_step_s(ResolvedRun(recipe.with_flags(run.config, HOME)))
        shutil.rmtree(run.folder)
        assert step_s is not None
        return run.validations, step_s

    searched = {rate: curve(0, rate) for rate in args.rates}
    best = min(searched, key=lambda rate: searched[rate][0][args.steps])
    first, step_s = searched[best]
    return Raced(best, [first, *(curve(seed, best)[0] for seed in range(1, args.seeds))], step_s)


def _smoothed(curve: Mapping[int, float]) -> dict[int, float]:
    """Return step → mean of the last three validations."""
    steps = sorted(curve)
    return {steps[n]: fmean(curve[step] for step in steps[n - 2 : n + 1]) for n in range(2, len(steps))}


def _at_most(step: float, curve: Mapping[int, float]) -> int:
    """Return the last step up to ``step`` with a smoothed loss."""
    return max((each for each in _smoothed(curve) if each <= step), default=min(_smoothed(curve)))


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a temporary folder of runs."""
    folder = Path(tempfile.mkdtemp(prefix="planaria-wire-controls-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _from_scratch(wire: Wire, args: Namespace, folder: Path, wide: bool = True) -> list[float]:
    """Return the losses with a codec from scratch, by seed."""
    return [
        final_loss(args.width, wire, seed, args.steps, folder, args.microbatches, wide, model=WIDE if wide else {})
        for seed in range(args.seeds)
    ]


def _continued(wire: Wire, args: Namespace, folder: Path, dense: Sequence[planaria.Run], rate: float) -> list[float]:
    """Return the losses with a codec after training these runs' models on other samples, at ``rate`` times the rate."""
    steps = max(1, round(CONTINUED * args.steps))
    return [
        final_loss(
            args.width, wire, seed, steps, folder, args.microbatches, True, rate=rate, start=run.folder, model=WIDE
        )
        for seed, run in enumerate(dense, args.seeds)
    ]


def _above_bf16(losses: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the losses of each other codec minus those of bf16."""
    return {name: gaps(each, losses["bf16"]) for name, each in losses.items() if name != "bf16"}


def _rows(extra: Mapping[str, Sequence[float]], when: str) -> list[Row]:
    return [
        Row(f"{name} - bf16, {when}, nats", losses, "0", None, {"mean": fmean(losses)})
        for name, losses in extra.items()
    ]


def _note(args: Namespace) -> str:
    return f"{args.seeds} seeds, {args.steps} steps, width {args.width}, 4 block stages of one layer, context 128"


if __name__ == "__main__":
    start(legs=run_legs, rotation=run_rotation, lies=run_lies, projection=run_projection)
