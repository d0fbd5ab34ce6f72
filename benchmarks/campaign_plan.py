"""What each run of the campaign is and suffers, drawn from a seed: plain data, so that any run can be made again."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from planaria.recovery import RECOVERIES

Plain = dict[str, Any]

CHAINS = (
    "checkfree, checkpoint",
    "checkfree_plus, checkpoint",
    "echo, checkpoint",
    "redundant, checkpoint",
    "checkpoint",
    "copy, checkpoint",
    "checkfree_plus, echo, checkpoint",
    "redundant, checkfree, checkpoint",
    "uniform, checkpoint",
    "identity, checkpoint",
    "random, checkpoint",
    "snapshot, checkpoint",
    "whole_copies, checkpoint",
    "snapshot, checkfree, checkpoint",
    "checkfree",
    "checkfree_plus",
    "echo",
    "redundant",
)
"""the last four cannot answer everything: they refuse now and then, save what is left, and are resumed"""
EXCHANGES: dict[str, Plain] = {
    "allreduce": {},
    "noloco": {"every": 3},
    "diloco": {"every": 4, "alpha": 0.3, "momentum": "heavy_ball"},
    "streaming_diloco": {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.3, "momentum": "heavy_ball"},
    "pair_mean": {"every": 3},
    "gasloc": {"every": 3, "alpha": 0.5, "beta": 0.7, "gamma": 0.7},
    "local": {},
}
SPECIES = [*CHAINS, *EXCHANGES, *EXCHANGES]
"""of runs: of one replica by its recovery strategy, of several by their exchange, each of these twice"""
REMEMBERING = [chain for chain in CHAINS if {"snapshot", "whole_copies"} & {*chain.split(", ")}]
"""chains whose snapshots may outlive the workers in the machine's memory; a resumed run looks there first"""

KINDS = {
    "kill": 40, "stop": 10, "stuck": 8, "slow": 6, "delay": 6, "reset": 9, "cut": 6, "disk_full": 3, "disk_slow": 4,
    "flip": 2, "lie": 4,
}  # fmt: skip
"""faults of traces, and how frequent they are beside one another"""
OUTSIDE = {"kill": 30, "stop": 20, "controller": 20, "stopped": 12, "pause": 10, "hangup": 6, "server": 6}
"""blows from outside: at a worker by its process id; at the controller: SIGKILL, SIGTERM or SIGINT, a freeze of 1 to
5 s, SIGHUP; at the fork server. After those that end the controller the run is resumed"""
SWITCHES = sorted({*KINDS, *OUTSIDE})
_MOMENTS = {
    "any": 3, "forward": 3, "backward": 3, "commit": 3, "transfer": 4, "save": 2, "settle": 3, "link": 2,
}  # fmt: skip
_WITHOUT_ROUNDS = ("allreduce", "local")


def draw(
    seed: int, number: int, without: Collection[str] = (), faults: int = 28, species_of: Collection[str] = SPECIES
) -> Plain:
    """The plan of one run: its recipe's sections, about so many faults of a trace, and blows from outside."""
    order = list(species_of)
    random.Random(f"campaign {seed} order").shuffle(order)
    rng = random.Random(f"campaign {seed} run {number}")
    species = order[number % len(order)]
    sections = _replicas(rng, species, faults) if species in EXCHANGES else _one(rng, species, faults)
    drawn = _faults(rng, sections, faults, without)
    wanted = rng.randint(max(1, faults // 8), max(1, faults // 4))
    outside = sorted((_outside(rng, without) for _ in range(wanted)), key=lambda blow: blow["at"])
    return {"number": number, "species": species, "sections": sections, "faults": drawn, "outside": outside}


def _one(rng: random.Random, chain: str, faults: int) -> Plain:
    swapped = "checkfree_plus" in chain
    offered: dict[str, Any] = {
        "meanwhile": "skip" if rng.random() < 0.25 else "wait",
        "moments": rng.choice(("fresh", "mean", "copy")),
        "bits": rng.choice((2, 4, 8)),
        "every": rng.randint(1, 4),
        "distance": rng.choice((1, 1, 2)),
        "mirror_every": rng.choice((1, 1, 3)),
        "mirror_moments": rng.random() < 0.5,
        "forward": rng.random() < 0.5,
    }
    if chain in REMEMBERING:
        every = rng.randint(2, 5)
        offered |= {"meanwhile": "wait", "every": every, "slices": rng.randint(1, every), "outlive": rng.random() < 0.8}
        offered |= {"tolerate": rng.choice((1, 1, 2)), "code": rng.choice(("auto", "local"))}
    meanwhile = offered.pop("meanwhile")
    if "checkfree" not in chain:
        offered.pop("moments")
    chosen = [name.strip() for name in chain.split(",")]
    recovery = {"strategy": chain, "meanwhile": meanwhile, "options": RECOVERIES.declared(chosen, offered)}
    kind = "swapped" if swapped else rng.choice(("full", "full", "skipping"))
    routing = {"kind": kind, **({"skip": 0.25} if kind == "skipping" else {})}
    return {
        **_common(rng, 4 if swapped else rng.randint(3, 4), 2 * faults + rng.randint(4, 24)),
        "recovery": recovery,
        "routing": routing,
    }


def _replicas(rng: random.Random, kind: str, faults: int) -> Plain:
    replicas = rng.randint(2, 3)
    options = dict(EXCHANGES[kind])
    exchange = {"replicas": replicas, "kind": kind, "patience_s": rng.choice((0.5, 2.0)), "options": options}
    if kind not in _WITHOUT_ROUNDS:
        options["bits"] = rng.choice((4, 8, 16, 32))
    if kind in ("noloco", "pair_mean", "gasloc"):
        options |= {"prefetch": rng.random() < 0.5, "group": rng.randint(2, replicas)}
    stages = 2 if kind == "streaming_diloco" else rng.randint(1, 2)
    sections = _common(rng, stages, 5 * faults // (replicas * (stages + 1)) + 12)
    if kind == "streaming_diloco":
        sections["model"] = {**sections["model"], "layers": 2 * stages}
    strategy = rng.choice(("checkpoint", "checkfree, checkpoint"))
    return {**sections, "exchange": exchange, "recovery": {"strategy": strategy}}


def _common(rng: random.Random, stages: int, steps: int) -> Plain:
    return {
        "seed": rng.randrange(10**6),
        "model": {"vocab": 260, "dim": 32, "layers": stages, "heads": 2, "hidden": 64, "context": 32},
        "pipeline": {
            "stages": stages,
            "microbatches": rng.randint(2, 4),
            "microbatch_size": rng.randint(1, 2),
            "order": rng.choice(("1f1b", "1f1b", "gpipe")),
        },
        "optim": {"lr": 3e-3, "schedule": rng.choice(("constant", "cosine")), "warmup": rng.choice((0, 5))},
        "train": {"steps": steps, "eval_every": rng.choice((0, 10)), "eval_microbatches": 2},
        "fleet": {"spares": rng.randint(0, 2), "missed": 12, "timeout_s": 4.0, "disk_timeout_s": 4.0},
        "checkpoint": {"every": rng.randint(3, 15), "keep": rng.randint(1, 3)},
    }


def nodes(sections: Plain) -> int:
    """Places where workers stand; numbered replica by replica or stage by stage, as the run's arrangement says."""
    replicas: int = sections.get("exchange", {}).get("replicas", 1)
    stages: int = sections["pipeline"]["stages"]
    return replicas * (stages + 1)


def _faults(rng: random.Random, sections: Plain, count: int, without: Collection[str]) -> list[Plain]:
    """Single ones, pairs that strike at once, and some at those who give or take a state after the one before."""
    rounds = sections.get("exchange", {}).get("kind", "allreduce") not in _WITHOUT_ROUNDS
    kinds = {k: w for k, w in KINDS.items() if k not in without and (rounds or k != "lie")}
    moments = {m: w for m, w in _MOMENTS.items() if rounds or m != "settle"}
    places, steps, found = nodes(sections), sections["train"]["steps"], list[Plain]()
    while len(found) < count and kinds:
        fault: Plain = {"step": rng.randrange(1, steps - 1), "stage": _place(rng, sections, places)}
        fault |= {"signal": _one_of(rng, kinds), "moment": _one_of(rng, moments), "offset": rng.randrange(1000) / 1000}
        found.append(fault | _lasting(rng, fault["signal"]))
        more, others = rng.random(), [place for place in range(places) if place != fault["stage"]]
        if fault["signal"] == "kill" and more < 0.15:
            found.append({**found[-1], "stage": rng.choice(others)})
        elif fault["signal"] == "kill" and more < 0.35 and {"kill", "stop", "stuck"} & kinds.keys():
            signal = rng.choice(sorted({"kill", "stop", "stuck"} & kinds.keys()))
            later = {"step": fault["step"], "stage": rng.choice(others), "moment": rng.choice(("transfer", "link"))}
            found.append({**later, "signal": signal, "offset": 0.0, **_lasting(rng, signal)})
    return sorted(found, key=lambda fault: fault["step"])


def _place(rng: random.Random, sections: Plain, places: int) -> int:
    """Any; where only CheckFree answers mostly middle stages, or it would refuse again and again."""
    if sections["recovery"]["strategy"] == "checkfree" and rng.random() < 0.9:
        return rng.randrange(2, places - 1)
    return rng.randrange(places)


def _lasting(rng: random.Random, signal: str) -> Plain:
    """How long a fault lasts, and how strong it is. Some stuck and stopped workers wake up, some never do."""
    for_ever = rng.random() < 0.5
    match signal:
        case "stop":
            return {} if for_ever else {"resume_after_s": round(rng.uniform(0.2, 5.0), 2)}
        case "stuck":
            return {} if for_ever else {"resume_after_s": round(rng.uniform(0.5, 6.0), 2)}
        case "slow":
            return {"strength": rng.choice((2.0, 5.0, 20.0)), "resume_after_s": round(rng.uniform(0.3, 2.0), 2)}
        case "delay":
            return {"strength": round(rng.uniform(0.02, 0.3), 3), "resume_after_s": round(rng.uniform(0.3, 1.5), 2)}
        case "cut" | "disk_full" | "disk_slow":
            return {"resume_after_s": round(rng.uniform(0.3, 4.0), 2)}
    return {}


def _outside(rng: random.Random, without: Collection[str]) -> Plain:
    """A blow ``at`` a share of the run's steps, ``delay`` seconds later, or then ``upon`` a line of this kind in the
    log; ``pick`` chooses among those who are there. A ``pair``: two workers, or the next controller too, as it starts.
    """
    what = _one_of(rng, {k: w for k, w in OUTSIDE.items() if k not in without})
    return {
        "at": round(rng.uniform(0.03, 0.95), 3),
        "delay": round(rng.uniform(0.0, 0.5), 3),
        "upon": rng.choice((None, None, "form", "save", "seal", "commit")),
        "what": what,
        "pick": round(rng.random(), 4),
        "pair": what in ("kill", "controller") and rng.random() < 0.25,
        "seconds": round(rng.uniform(1.0, 5.0), 2) if what in ("pause", "server") or rng.random() < 0.6 else None,
    }


def _one_of(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
