"""Pipelines over home links: the clock of a public benchmark, and the speed and the loss of codecs between stages."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import planaria
from benchmarks.fleet_run import finished, sleeping, small_run
from benchmarks.fleet_run import step_seconds as fleet_step_seconds
from benchmarks.harness import (
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    interleaved,
    milliseconds,
    ratios,
    start,
)
from planaria.common.quantisation import unpack
from planaria.config.schema import ModelConfig, NetworkConfig, PipelineConfig, RunConfig
from planaria.faults.trace import write
from planaria.faults.trace_generation import generate
from planaria.pipeline.codecs import make_codec
from planaria.pipeline.codecs.base import LEGS, Leg, MessageBytes, Visit
from planaria.pipeline.codecs.group_quantisation import GroupQuantiser
from planaria.pipeline.network.costs import MBIT, Costs, message_bytes
from planaria.pipeline.plan.actions import Action, Key, StepPlan
from planaria.pipeline.plan.build import visits
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.sleeping_runner import new_runner
from planaria.runtime.worker.step_samples import StepInputs

RANKS, SEQUENCES, CONTEXT, WIDTH = 8, 512, 1024, 1024
BANDWIDTH, LATENCY_S, COUNT_BYTES = 200 * MBIT, 0.05, 8
FORWARD_S, BACKWARD_S, LAST = 0.001 / 8, 0.002 / 8, 5
"""assumed seconds of one sequence's passes at a rank, and the factor of the last one, with head and loss"""


class Published(NamedTuple):
    """A published record: bytes per token each way, sequences in a microbatch, seconds per step."""

    name: str
    token_bytes: int
    sequences: int
    step_s: float


RECORDS = (Published("dense bf16", 2048, 8, 100.475), Published("subspace of rank 160", 322, 16, 19.889))


def chain(ranks: int, microbatches: int) -> StepPlan:
    """Return 1F1B over a chain: rank r runs ``ranks`` - r forwards, then backwards and forwards in turns."""
    route = tuple(range(ranks))
    passes = {action.key: action for pair in visits([route] * microbatches) for action in pair}
    actions = {}
    for rank in route:
        ahead = min(ranks - rank, microbatches)
        forwards = [passes[Key("forward", i, rank)] for i in range(microbatches)]
        backwards = [passes[Key("backward", i, rank)] for i in range(microbatches)]
        later = [action for pair in zip(backwards, forwards[ahead:], strict=False) for action in pair]
        actions[rank] = _in_turn([*forwards[:ahead], *later, *backwards[microbatches - ahead :]])
    return StepPlan((route,) * microbatches, {}, actions)


def _in_turn(todo: Sequence[Action]) -> tuple[Action, ...]:
    """Return the same actions, each of which waits for the one before."""
    return (todo[0], *(replace(b, after=tuple({*b.after, a.key})) for a, b in pairwise(todo)))


def step_seconds(token_bytes: tuple[float, float], sequences: int, computing: bool = False) -> float:
    """Return the seconds of a step whose messages have these bytes per token, forward and backward."""
    work = [[sequences * one * computing] * (RANKS - 1) for one in (FORWARD_S, BACKWARD_S)]
    # Stage 0's embedding visit is free in planaria's rings; rank 0 has a layer here, which the fill of the chain hides.
    network = NetworkConfig(
        forward_s=[*work[0], LAST * work[0][0]],
        backward_s=[*work[1], LAST * work[1][0]],
        bandwidth=BANDWIDTH,
        latency_s=LATENCY_S,
        inbound="shared",
        latency_queued=True,
    )
    size = MessageBytes(*(round(sequences * CONTEXT * one) + COUNT_BYTES for one in token_bytes))
    return simulate(chain(RANKS, SEQUENCES // sequences), Costs(network), size).step_s


def closed_form(token_bytes: tuple[int, int], sequences: int) -> float:
    """Return the same without computing: M (τf + τb) + (S − 2) max(τf, τb) + (S − 3) min(τf, τb), where τ are the
    seconds of a message on its link.
    """
    each = [(sequences * CONTEXT * one + COUNT_BYTES) / BANDWIDTH + LATENCY_S for one in token_bytes]
    return SEQUENCES // sequences * sum(each) + (RANKS - 2) * max(each) + (RANKS - 3) * min(each)


_SUBSPACE = re.compile(r"D/(\d+):(\d+)/(\d+)")


def wire_of(name: str, width: int) -> str | dict[str, Any]:
    """Return ``pipeline.wire`` as named; ``D/4:8/4``: a subspace of rank width / 4, 8 bits forward and 4 backward."""
    if (found := _SUBSPACE.fullmatch(name)) is None:
        return name
    part, forward, backward = map(int, found.groups())
    return {"kind": "subspace", "rank": width // part, "forward": forward, "backward": backward}


def token_bytes(name: str, width: int) -> tuple[float, float]:
    pipeline = PipelineConfig.model_validate({"wire": wire_of(name, width), "microbatch_size": 1})
    tokens = 1024
    model = ModelConfig(dim=width, heads=4, context=tokens, tied=False, subspace=pipeline.subspace(seed=0))
    forward, backward = message_bytes(model, pipeline)
    return forward / tokens, backward / tokens


WIRES = ("bf16", "8/8", "6/5", "6/4", "5/4", "4/4", "D/2:8/4", "D/4:8/4", "D/8:8/4")


@benchmark("home_links")
def run_rule(args: Namespace) -> Measurement:
    """Simulate Protocol NanoGPT's clock: eight ranks in a chain, 1F1B, 524,288 tokens a step, width 1,024.

    All messages to a rank queue for one link of 200 Mb/s, and each occupies it for 50 ms more. Claims: both published
    records are met within 2 %, and the closed form within 1e-4 s.
    """
    rows = []
    for record in RECORDS:
        legs = record.token_bytes, record.token_bytes
        found, bare = step_seconds(legs, record.sequences, True), step_seconds(legs, record.sequences)
        gap = abs(bare - closed_form(legs, record.sequences))
        rows.append(Row(f"{record.name}: step / published", [found / record.step_s], f"{record.step_s} s published",
                        Claim(0.98, 1.02), {"s/step": found, "without computing": bare}))  # fmt: skip
        rows.append(Row(f"{record.name}: simulated - closed form, s", [gap], "0: the rule", Claim(high=1e-4)))
    dense = step_seconds((2 * WIDTH, 2 * WIDTH), 8, True)
    for wire in WIRES:
        each = token_bytes(wire, WIDTH)
        steps = {n: step_seconds(each, n, True) for n in (4, 8, 16, 32, 64)}
        best = min(steps, key=steps.__getitem__)
        share, columns = sum(each) / 4 / WIDTH, {"s/step": steps[best], "microbatch": best}
        rows.append(
            Row(f"wire {wire}: step / dense", [steps[best] / dense], f"{share:.3f} of the bytes", None, columns)
        )
    return rows


@benchmark("home_links_codec", repeats=Flag(7, "of each side"))
def run_codec(args: Namespace) -> Measurement:
    """Time ``6/4`` on one thread: GB of fp32 per second, and its share of a stage's passes at width 1,024.

    Claims: encoding and decoding together take ≥ 0.5 GB/s, and ≤ 5 % of the forward and backward pass of a stage with
    one layer, for a microbatch of 2 × 512 tokens.
    """
    torch.set_num_threads(1)
    model = ModelConfig(dim=WIDTH, heads=16, layers=2, context=512, vocab=512)
    config = RunConfig(model=model, pipeline=PipelineConfig(stages=2, microbatch_size=2))
    runner, x = new_runner(config, 1, initialise=True), torch.randn(2, 512, WIDTH)
    codec, visit = make_codec("6/4"), Visit(1, 2, 3)

    def coding() -> float:
        began = time.perf_counter()
        for leg in ("forward", "backward"):
            codec.decode(codec.encode(x, leg, visit), x.shape, leg)
        return time.perf_counter() - began

    def passing() -> float:
        runner.begin(StepInputs())
        began = time.perf_counter()
        runner.forward(0, 1, x)
        runner.backward(0, 1, x)
        return time.perf_counter() - began

    coding(), passing()
    coded, passed = interleaved([coding, passing], args.repeats)
    speed = [2 * x.nbytes / 1e9 / seconds for seconds in coded]
    return [
        Row("6/4, encode and decode, GB/s of fp32", speed, "memory bandwidth", Claim(low=0.5)),
        Row("6/4, both legs / both passes of a layer", ratios(coded, passed), "0", Claim(high=0.05)),
    ]


@benchmark("home_links_entropy", steps=Flag(100, "of training; messages of the last two are coded"))
def run_entropy(args: Namespace) -> Measurement:
    """Code the messages of a trained model losslessly: Huffman codes of each message's integers (zlib), scales as is.

    Claims: messages take ≤ 0.94 of 6-bit and ≤ 0.89 of 4-bit bytes and are decoded exactly; coding and decoding take
    ≥ 0.1 GB of fp32 per second.
    """
    rows, of_all = list[Row](), list[Coded]()
    for bits, leg in product((8, 6, 4, 3), LEGS):
        coded = [_huffman(message, bits) for message in _sent_messages(f"{bits}/{bits}", args.steps)[leg]]
        limit = {6: 0.94, 4: 0.89}.get(bits)
        columns = {"ideal": fmean(one.ideal for one in coded), "messages": len(coded)}
        claim = None if limit is None else Claim(high=limit)
        rows.append(Row(f"{bits} bits {leg}: coded / fixed bytes", [one.share for one in coded], "1", claim, columns))
        of_all += coded
    return [
        *rows,
        Row("messages that differ after decoding", [float(sum(not one.exact for one in of_all))], "0", Claim(high=0)),
        Row("coding, GB/s of fp32", [one.speed for one in of_all], "memory bandwidth", Claim(low=0.1)),
    ]


@cache
def _sent_messages(wire: str, steps: int) -> dict[Leg, list[Tensor]]:
    """Return the messages of the last two steps of a run, by leg."""
    kept: dict[Leg, list[Tensor]] = {leg: [] for leg in LEGS}
    seen, encode = Counter[Leg](), GroupQuantiser.encode
    per_step = 8 * 5  # microbatches and hops; after training, the validation sends activations

    def keep(self: GroupQuantiser, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        message = encode(self, x, leg, visit, ids)
        if (steps - 2) * per_step <= seen[leg] < steps * per_step:
            kept[leg].append(message)
        seen[leg] += 1
        return message

    with (
        tempfile.TemporaryDirectory(prefix="planaria-entropy-") as folder,
        patch.object(GroupQuantiser, "encode", keep),
    ):
        final_loss(128, wire, 0, steps, Path(folder))
    return kept


class Coded(NamedTuple):
    """One message after coding, relative to its fixed length."""

    share: float
    ideal: float
    """the same at the entropy of its integers"""
    exact: bool
    """whether decoding restores it"""
    speed: float
    """GB of fp32 per second, encoding and decoding"""


def _huffman(message: Tensor, bits: int) -> Coded:
    groups = len(message) // (2 + 64 * bits // 8)
    numbers, scales = 64 * groups, 2 * groups
    codes = unpack(message[scales:], bits).reshape(-1).numpy()
    plain = codes.tobytes()
    began = time.perf_counter()
    coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = coder.compress(plain) + coder.flush()
    decoded = zlib.decompress(packed)
    seconds = time.perf_counter() - began
    counts = np.bincount(codes, minlength=1 << bits)
    chances = counts[counts > 0] / len(codes)
    ideal = -float(np.sum(chances * np.log2(chances))) * len(codes) / 8
    share, least = ((scales + size) / len(message) for size in (len(packed), ideal))
    return Coded(share, least, decoded == plain, 4 * numbers / 1e9 / seconds)


LEARNING_RATE = 2e-3
"""the recipe's"""
LINKS = {"20 Mbit/s, 10 ms": (2.5e6, 0.01), "10 Mbit/s, 5 ms": (1.25e6, 0.005), "4 Mbit/s, 20 ms": (0.5e6, 0.02)}
"""bytes per second and seconds, one way"""
SKIP = 2
"""steps of each fleet that warm it up"""


@benchmark("home_links_fleet", steps=Flag(6, "of each fleet, warm-up apart"))
def run_fleet_steps(args: Namespace) -> Measurement:
    """Measure the steps of fleets with emulated links over the simulated step.

    Stages sleep; messages have the codec's bytes. ``shared`` is the benchmark's rule: one queue into each worker, with
    the latency in it. Claims: measured steps are within 2 % of the simulated ones if shared, else within 10 %.
    """
    rows = []
    cases = product(LINKS.items(), ("bf16", "8/8", "6/4", "4/4", "D/4:8/4"), (False, True))
    for (name, (bandwidth, latency_s)), wire, shared in cases:
        link = {"bandwidth": bandwidth, "latency_s": latency_s, "latency_queued": shared}
        config = small_run(
            f"home-links-{len(rows)}",
            args.steps + SKIP,
            4,
            model={"vocab": 260, "dim": 64, "heads": 4, "hidden": 352, "context": 64, "tied": False},
            pipeline={"microbatches": 8, "microbatch_size": 8, "wire": wire_of(wire, 64)},
            network=sleeping(0.002, inbound="shared" if shared else "each", **link),
        )
        plan = ResolvedRun(config).training(0)
        step_s = simulate(plan, Costs(config.network), message_bytes(config.model, config.pipeline)).step_s
        measured = fleet_step_seconds(finished(config), SKIP)
        what = f"{wire}, {name}, {'shared' if shared else 'each'}"
        claim = Claim(0.98, 1.02) if shared else Claim(0.9, 1.1)
        columns = {"fleet": milliseconds(measured), "simulated": milliseconds([step_s])}
        rows.append(Row(what, [s / step_s for s in measured], "1: the simulated step", claim, columns))
    return Result(rows, ["measured: fleet's step / simulated step"])


@benchmark(
    "home_links_loss",
    seeds=Flag(3, "of each arm"),
    steps=Flag(300, "of each run"),
    widths=Flag([128, 256], "of the models"),
    wires=Flag(
        ["bf16", "8/8", "6/5", "6/4", "4/4"],
        "codecs; D/4:8/4: a subspace; bf16@3: 3 microbatches; the first: reference",
    ),
    microbatches=Flag(8, "of a step"),
    rates=Flag([1.0], "factors of the recipe's learning rate; each arm is shown at its best"),
    untied=Flag(False, "separate embedding and head, which a subspace needs"),
)
def run_loss(args: Namespace) -> Measurement:
    """Train small models on Python's own source with each codec, from the same seeds and data.

    Claims: ``6/4`` ends ≤ 0.010 nats above bf16 on average over the seeds, with 3.0 times fewer bytes. With
    ``--untied``, which subspaces need, there is no claim; ``D/1:16/16`` has a subspace's embedding and all dimensions.
    """
    rows, folder = [], Path(tempfile.mkdtemp(prefix="planaria-wires-"))
    reference = args.wires[0]
    try:
        for width in args.widths:
            best = {wire: _best(width, wire, args, folder) for wire in args.wires}
            losses = {wire: found for wire, (_, found) in best.items()}
            for wire in args.wires[1:]:
                gap = [a - b for a, b in zip(losses[wire], losses[reference], strict=True)]
                mean = sum(gap) / len(gap)
                codec, microbatches = _arm(wire, args.microbatches)
                fewer = sum(token_bytes(reference, width)) / sum(token_bytes(codec, width))
                fewer *= args.microbatches / microbatches
                claim = Claim(high=0.010) if wire == "6/4" and not args.untied else None
                rows.append(Row(f"width {width}, {wire} - {reference}, mean nats", [mean], "0", claim,
                                {"least": min(gap), "most": max(gap), "fewer bytes": fewer, "rate": best[wire][0],
                                 reference: sum(losses[reference]) / len(gap)}))  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    note = f"{args.seeds} seeds, {args.steps} steps, 4 block stages of one layer, context 128"
    return Result(rows, [note], name="home_links_subspace" if args.untied else "")


def _arm(name: str, microbatches: int) -> tuple[str, int]:
    """Return the codec and the microbatches of a step of an arm, such as ``bf16@3``."""
    codec, _, count = name.partition("@")
    return codec, int(count or microbatches)


def _best(width: int, wire: str, args: Namespace, folder: Path) -> tuple[float, list[float]]:
    """Return the factor of the learning rate with the least mean loss, and its losses by seed."""
    codec, microbatches = _arm(wire, args.microbatches)
    found = {
        rate: [
            final_loss(width, codec, seed, args.steps, folder, microbatches, args.untied, rate)
            for seed in range(args.seeds)
        ]
        for rate in args.rates
    }
    rate = min(found, key=lambda rate: sum(found[rate]))
    return rate, found[rate]


def final_loss(
    width: int, wire: str | Mapping[str, Any], seed: int, steps: int, folder: Path,
    microbatches: int = 8, untied: bool = False, rate: float = 1.0, trace: Path | None = None,
    start: Path | None = None, model: Mapping[str, Any] = MappingProxyType({}),
) -> float:  # fmt: skip
    """Return the validation loss at the end of a run, nats; CheckFree rebuilds the stages that ``trace`` kills."""
    run = trained(width, wire, seed, steps, folder, microbatches, untied, rate, trace, start, model)
    shutil.rmtree(run.folder)
    return run.validations[steps]


def trained(
    width: int, wire: str | Mapping[str, Any], seed: int, steps: int, folder: Path,
    microbatches: int = 8, untied: bool = False, rate: float = 1.0, trace: Path | None = None,
    start: Path | None = None, model: Mapping[str, Any] = MappingProxyType({}), eval_every: int | None = None,
) -> planaria.Run:  # fmt: skip
    """Return a finished run with this codec (a name of :func:`wire_of`, or its table), from random weights or from
    those of the run ``start``; ``model``: other settings of the model. It is validated at the end by default."""
    settings = {
        "engine": "inline", "seed": seed, "out": str(folder), "name": f"run-{seed}",
        "model.dim": width, "model.heads": 4, "model.tied": not untied,
        "pipeline.wire": wire_of(wire, width) if isinstance(wire, str) else dict(wire),
        "pipeline.microbatches": microbatches, "train.steps": steps, "train.eval_every": eval_every or steps,
        "train.start": None if start is None else str(start),
        "optim.warmup": 20, "optim.lr": LEARNING_RATE * rate, "chaos.trace": None if trace is None else str(trace),
        "recovery.strategy": "checkfree" if trace else "checkpoint", "checkpoint.every": 0 if trace else steps,
        **{f"model.{name}": value for name, value in model.items()},
    }  # fmt: skip
    return planaria.train("demo", settings=settings, progress=False, allow_code=True)


STEP_S, EDGES = 91.3, {1, 4}
"""seconds of a step that convert the hourly rate (CheckFree, arXiv 2506.15461); stages that CheckFree cannot rebuild"""


@benchmark(
    "home_links_failures",
    seeds=Flag(3, "of each arm and trace"),
    steps=Flag(200, "of each run"),
    width=Flag(128, "of the model"),
    wires=Flag(["bf16", "6/4", "D/4:8/4"], "codecs"),
    microbatches=Flag(8, "of a step"),
    hourly=Flag(0.1, "probability that a stage fails within an hour"),
)
def run_failures(args: Namespace) -> Measurement:
    """Kill block stages that CheckFree rebuilds from neighbours: loss over that without failures, for each codec.

    All arms have the same traces, and separate embedding and head.
    """
    rows, folder = [], Path(tempfile.mkdtemp(prefix="planaria-wire-failures-"))
    traces = {seed: folder / f"trace-{seed}.json" for seed in range(args.seeds)}
    kills = []
    for seed, path in traces.items():
        drawn = generate(seed, args.hourly, STEP_S, 4, args.steps, EDGES, forbid_adjacent=True)
        kills.append(len(drawn.faults))
        write(drawn, path)
    try:
        for wire in args.wires:
            free, faulty = (
                [
                    final_loss(args.width, wire, seed, args.steps, folder, args.microbatches, True, trace=path)
                    for seed, path in chosen.items()
                ]
                for chosen in (dict.fromkeys(traces), traces)
            )
            extra = [a - b for a, b in zip(faulty, free, strict=True)]
            columns = {"mean": sum(extra) / len(extra), "without failures": sum(free) / len(free)}
            rows.append(Row(f"{wire}: extra loss with CheckFree, nats", extra, "0", None, columns))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(rows, [f"failures by seed: {kills}, {args.hourly} an hour of steps of {STEP_S} s"])


if __name__ == "__main__":
    start(
        rule=run_rule, codec=run_codec, entropy=run_entropy, fleet=run_fleet_steps, loss=run_loss, failures=run_failures
    )
