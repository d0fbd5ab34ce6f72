"""Controls of codecs between stages: the law of rounding noise, bits and rounding of each leg, and rotations."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import planaria
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, gaps, start
from benchmarks.home_links import final_loss, trained

Wire = str | Mapping[str, Any]
NEAREST = {"kind": "groups", "rounding": "nearest"}
LEGS: dict[str, Wire] = {
    "8/4": "8/4",
    "4/8": "4/8",
    "8/4, nearest": {**NEAREST, "forward": 8, "backward": 4},
    "4/8, nearest": {**NEAREST, "forward": 4, "backward": 8},
}
"""bits of activations and gradients; gradients are rounded at random unless ``nearest``"""
NOISE: dict[str, Wire] = {"8/5": "8/5", "8/3": "8/3"}
TUNED, FACTOR = 1 / 2, 0.1
"""of the steps and of the learning rate: fine-tuning"""
ROTATIONS: dict[str, Wire] = {
    rotate: {"kind": "benchmarks.wire_codecs:RotatedGroups", "forward": 4, "backward": 6, "rotate": rotate}
    for rotate in ("none", "whole", "gated")
}
LIES: dict[str, Wire] = {
    f"× {factor}": {"kind": "benchmarks.wire_codecs:FalseScales", "factor": factor} for factor in (4, 16)
}
WIDE, PROJECTED = {"embedding_std": 1.0}, "benchmarks.learned_projection:ProjectedLlama"
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
    Claim: 3 bits of gradients cost 3 to 5.5 times as much as 4; the variance of the noise is 5.4 times as large.
    """
    with _folder() as folder:
        kept = folder / "bf16"
        dense = [
            trained(args.width, "bf16", seed, args.steps, kept, args.microbatches, True, model=WIDE)
            for seed in range(args.seeds)
        ]
        scratch = {name: _from_scratch(wire, args, folder) for name, wire in {**LEGS, **NOISE}.items()}
        tuned = {name: _fine_tuned(wire, args, folder, dense) for name, wire in {"bf16": "bf16", **LEGS}.items()}
    scratch["bf16"] = [run.validations[args.steps] for run in dense]
    extra = _above_bf16(scratch)
    rows = _rows(extra, "from scratch") + _rows(_above_bf16(tuned), "fine-tuning")
    means = {name: fmean(losses) for name, losses in extra.items()}
    columns = {f"8/{bits}": means[f"8/{bits}"] for bits in (5, 4, 3)}
    law = Row("mean of 8/3 / mean of 8/4", [means["8/3"] / means["8/4"]], "5.4", Claim(3.0, 5.5), columns)
    return Result([*rows, law], [_note(args)])


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


@benchmark("home_links_projection", **FLAGS)
def run_projection(args: Namespace) -> Measurement:
    """Send a learned projection to a quarter of the width in ``8/4``: loss minus that of bf16, with other codecs.

    A subspace's embedding contains N(0, 1), so all arms have one of that size; bf16 also has the usual one. Claim: the
    projection costs at most 0.05 nats.
    """
    options = {"rank": args.width // 4}
    arms: dict[str, tuple[Wire, dict[str, Any]]] = {
        "bf16, embedding N(0, 0.02²)": ("bf16", {}),
        "6/4": ("6/4", WIDE),
        "subspace, D/4": ("D/4:8/4", {}),
        "learned, D/4": ("8/4", {**WIDE, "family": PROJECTED, "options": options}),
        "learned, D": ("8/4", {**WIDE, "family": PROJECTED, "options": {"rank": args.width}}),
    }
    with _folder() as folder:
        losses = {
            name: [
                final_loss(args.width, wire, seed, args.steps, folder, args.microbatches, True, model=model)
                for seed in range(args.seeds)
            ]
            for name, (wire, model) in {"bf16": ("bf16", WIDE), **arms}.items()
        }
    extra = _above_bf16(losses)
    learned = Row("learned, D/4 - bf16, mean nats", [fmean(extra["learned, D/4"])], "0", Claim(high=0.05))
    return Result([*_rows(extra, "embedding N(0, 1)"), learned], [_note(args)])


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


def _fine_tuned(wire: Wire, args: Namespace, folder: Path, dense: Sequence[planaria.Run]) -> list[float]:
    """Return the losses with a codec after fine-tuning these runs on other samples."""
    steps = max(1, round(TUNED * args.steps))
    return [
        final_loss(
            args.width, wire, seed, steps, folder, args.microbatches, True, rate=FACTOR, start=run.folder, model=WIDE
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
