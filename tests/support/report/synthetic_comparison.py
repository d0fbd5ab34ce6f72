"""A synthetic comparison: loss curves by formula, scored by the real code."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

from planaria.lab.compare.clock import ArmClock
from planaria.lab.compare.race import ArmCourse, LossEvent, ValidationPoint
from planaria.lab.compare.race_results import (
    ArmInputs,
    ArmScore,
    ComparisonResults,
    SeedTrace,
    add_reset_ratios,
    curve,
    score,
)

SEEDS, STEPS, STAGES, EVERY = (1, 3, 4), 1000, 6, 20
INPUTS = ArmInputs(
    replacement_s=30.0, load_s=60.0, repeated_steps=0.5, bandwidth=125e6, scale=250.0, replicas=1, stages=STAGES,
    context=1024,
    microbatches=16, microbatch_size=16, dim=1024, wire_bytes=4, parameters=[65_537_024, *[67_117_056] * STAGES],
)  # fmt: skip
MISSING = "redraw <b>&"
"""the arm that does not reach the target"""


@dataclass(frozen=True)
class Manner:
    """The results of a synthetic arm."""

    changes: dict[str, str]
    faults: bool = True
    slower: float = 1.0
    """steps to any loss, over the fault-free arm's"""
    setback: float = 0.0
    """steps that a failure costs"""
    step_s: float = 91.3
    save: int = 0
    """steps between checkpoints"""
    traffic: float = 0.0
    memory: float = 0.0
    workers: int = 7
    control: str = ""
    exact: bool = False
    computes_copies: bool = False


MANNERS = {
    "fault-free": Manner({}, faults=False),
    "checkfree-plus": Manner(
        {"routing.kind": "swapped", "recovery.strategy": "checkfree_plus"}, slower=1.05, setback=6, traffic=0.004
    ),
    "checkpoint-50": Manner({"recovery.strategy": "checkpoint", "checkpoint.every": "50"}, setback=25, save=50),
    "redundant": Manner(
        {"recovery.strategy": "redundant"}, step_s=129.0, traffic=0.52, memory=1.0, computes_copies=True
    ),
    MISSING: Manner({"recovery.strategy": "random"}, setback=60),
}


HELD = {
    "fault-free": MANNERS["fault-free"],
    "oracle": Manner({"recovery.strategy": "oracle"}, control="oracle", exact=True),
    "reset": Manner({"recovery.strategy": "reset"}, slower=0.95, control="reset"),
    "echo": Manner({"recovery.strategy": "echo, checkfree"}, slower=0.97, traffic=0.008, memory=0.33),
    "checkfree-plus": MANNERS["checkfree-plus"],
}
"""with controls: reset gains, and so does who loses moments"""


def faults(seed: int) -> list[tuple[int, int]]:
    """(step, stage) of about 15 failures."""
    draw = random.Random(seed)
    return sorted((draw.randrange(1, STEPS), draw.randint(1, STAGES)) for _ in range(12 + seed))


def digest(seed: int) -> str:
    return hashlib.sha256(str(seed).encode()).hexdigest()


def loss(progress: float, seed: int) -> float:
    """Return the fault-free arm's loss after ``progress`` steps."""
    return 2.1 + 0.02 * seed + 4.5 * math.exp(-max(progress, 0.0) / 60) + 1.2 * math.exp(-max(progress, 0.0) / 420)


def course(manner: Manner, seed: int) -> ArmCourse:
    """Progress is ticks without what failures took so far; a setback shows in the loss at once."""
    struck = [step for step, _ in faults(seed)] if manner.faults else []
    noise = random.Random(f"{seed} {sorted(manner.changes)}")
    points = []
    for tick in range(EVERY, STEPS + 1, EVERY):
        progress = (tick - manner.setback * sum(step < tick for step in struck)) / manner.slower
        points.append(ValidationPoint(tick=tick, step=tick, loss=loss(progress, seed) + noise.gauss(0, 0.004)))
    return ArmCourse(
        points=points,
        loss_events=[
            LossEvent(
                tick=tick, stages=[2], outcome="2: x", moved_bytes=10**6, rolled_back=bool(manner.save), steps_lost=0
            )
            for tick in struck
        ],
        ticks=STEPS,
        saved=list(range(manner.save, STEPS + 1, manner.save)) if manner.save else [],
        stopped="tick 990: stage 2 is out of reach" if manner.setback > 50 and seed == SEEDS[0] else "",
    )


def clock(manner: Manner) -> ArmClock:
    return ArmClock(manner.step_s, 60.0, 60.0, 3.0, 30.0, 125e6, workers=manner.workers)


def compared(manners: dict[str, Manner] = MANNERS, hourly: float = 0.1) -> ComparisonResults:
    """The results of the comparison."""
    courses = {name: {seed: course(manner, seed) for seed in SEEDS} for name, manner in manners.items()}
    first, digests = next(iter(manners)), {seed: digest(seed) for seed in SEEDS}
    arms = [
        ArmScore(
            name=name,
            changes=manner.changes,
            faults=manner.faults,
            routing=manner.changes.get("routing.kind", "full"),
            runs=score(courses[first], courses[name], (clock(manners[first]), clock(manner)), digests, 0.6, 250.0),
            step_s=manner.step_s,
            save_s=60.0,
            step_bytes=manner.traffic * 1e9,
            traffic=manner.traffic,
            memory=manner.memory,
            workers=manner.workers,
            curves=[curve(one, clock(manner), 250.0) for one in courses[name].values()],
            control=manner.control,
            exact=manner.exact,
            computes_copies=manner.computes_copies,
            inputs=INPUTS,
            courses=list(courses[name].values()),
        )
        for name, manner in manners.items()
    ]
    return ComparisonResults(
        name="<i>worms",
        clock="llama_500m.toml",
        steps=STEPS,
        stages=STAGES,
        target_at=0.6,
        hourly=hourly,
        failures=[SeedTrace(seed=seed, digest=digest(seed), faults=faults(seed)) for seed in SEEDS],
        arms=add_reset_ratios(arms),
    )


STEP_BYTES = {"fault-free": 8e6, "rare": 1e6, "muon": 8e6, "muon-rare": 1e6, "local": 0.0}


def raced_exchanges() -> ComparisonResults:
    """Return a comparison of arms with and without an exchange, of two optimizers."""
    manners = {
        "fault-free": Manner({}, faults=False, step_s=40.0),
        "rare": Manner({"exchange.kind": "diloco", "optim.lr": "0.004"}, faults=False, slower=1.3, step_s=25.0),
        "muon": Manner({"optim.kind": "muon", "optim.lr": "0.002"}, faults=False, slower=0.8, step_s=40.0),
        "muon-rare": Manner({"optim.kind": "muon", "exchange.kind": "diloco"}, faults=False, step_s=25.0),
        "local": Manner({"exchange.kind": "local"}, faults=False, slower=3.0, step_s=20.0),
    }
    found = compared(manners)
    arms = [a.model_copy(update={"step_bytes": STEP_BYTES[a.name], "traffic_per_weight_byte": 0.1}) for a in found.arms]
    return found.model_copy(update={"arms": arms})
