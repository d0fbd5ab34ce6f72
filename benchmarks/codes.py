"""Erasure codes: exactness, speed and survival, and a swarm that learns to complete codes."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase
from typing import Any
from zlib import crc32

import numpy as np
import torch

from benchmarks.consensus import together
from benchmarks.harness import (
    RESULTS,
    RUNS,
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    gaps,
    interleaved,
    ratios,
    start,
    write,
)
from planaria.config import shipped
from planaria.config.recipe import read
from planaria.recovery import codes
from planaria.recovery.codes.base import ErasureCode, LossError
from planaria.recovery.codes.search import SearchTarget, anneal, certificate, code_file
from planaria.swarm.assemble import make_policy, make_task
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.random_draws import generator
from planaria.swarm.peer.rollout import prompt_for
from planaria.swarm.policy.base import Policy
from planaria.swarm.records.lines import LOG, Evaluated, read_log
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.codes import Codes

GROUPS = {(4, 1): 1 / 3, (4, 2): 1.0, (6, 2): 0.5, (8, 3): 0.6}  # parity over state, by members and tolerated losses
KNOWN = {
    "Reed–Solomon 8+8": (1, 1, 1, 1, 1),
    "local groups": (1, 1, 1, 0.996, 0.847),
    "sparse": (0.996, 0.974, 0.909, 0.746, 0.423),
    "two copies": (0.615, 0.410, 0.224, 0.090, 0.020),
}
"""published shares that survive 4 … 8 losses of 16"""


def restored(code: ErasureCode, lost_counts: range, size: int = 64) -> tuple[int, int]:
    """Repair every set of these numbers of losses; return the sets tried and failed."""
    everything = shards(code, size)
    tried = wrong = 0
    for lost in (lost for count in lost_counts for lost in combinations(range(code.shards), count)):
        tried += 1
        reads = code.plan(lost)
        back = {} if isinstance(reads, str) else code.repair({n: everything[n] for n in reads}, lost)
        wrong += any(n not in back or back[n].tobytes() != everything[n].tobytes() for n in lost)
    return tried, wrong


def shards(code: ErasureCode, size: int) -> list[Any]:
    """Return random data, including NaN, −0 and denormals, with its parities."""
    data = np.random.default_rng(0).integers(0, 256, (code.data, size), dtype=np.uint8)
    odd = np.array([np.nan, -0.0, 1e-45, np.inf], np.float32).view(np.uint8)
    data[:, : odd.size] = odd
    return [*data, *code.encode(list(data))]


def believed(code: ErasureCode, size: int = 64) -> int:
    """Count the sets of one loss too many for which bytes were returned."""
    everything, given = shards(code, size), 0
    for lost in combinations(range(code.shards), len(code.weights) + 1):
        try:
            code.repair({n: everything[n] for n in range(code.shards) if n not in lost}, lost)
            given += 1
        except LossError:
            given += not isinstance(code.plan(lost), str)
    return given


def flipped(code: ErasureCode, size: int = 704) -> tuple[int, int]:
    """Flip bits in every shard; return the flips and those not detected and repaired."""
    everything = shards(code, size)
    bits = missed = 0
    for lost, shard in enumerate(everything):
        reads = code.plan([lost])
        assert not isinstance(reads, str), reads
        back = code.repair({n: everything[n] for n in reads}, [lost])[lost]
        for bit in range(0, 8 * size, 8 * size // 7):
            damaged = shard.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            found = crc32(damaged.data) != crc32(shard.data)
            bits, missed = bits + 1, missed + (not found or back.tobytes() != shard.tobytes())
    return bits, missed


def exactness() -> list[Row]:
    """XOR and Reed–Solomon: all losses up to m, one more, and flipped bits."""
    rows = []
    for (members, tolerate), overhead in GROUPS.items():
        code = codes.make_code("auto", members, tolerate)
        tried, wrong = restored(code, range(1, tolerate + 1))
        bits, missed = flipped(code)
        parity = len(code.weights) / code.data
        named = f"N = {members}, m = {tolerate}"
        rows += [
            Row(f"{named}: parity over state", [parity], "", Claim(0.99 * overhead, 1.01 * overhead)),
            Row(f"{named}: loss sets not restored", [wrong], f"of {tried}", Claim(high=0)),
            Row(f"{named}: m + 1 losses, bytes given", [believed(code)], "0", Claim(high=0)),
            Row(f"{named}: flipped bits not found and repaired", [missed], f"of {bits}", Claim(high=0)),
        ]
    return rows


def survival(kinds: dict[str, ErasureCode]) -> tuple[list[Row], list[str]]:
    """Codes of 16 shards for 8: claims, and survived losses against reads."""
    from planaria.recovery.codes.base import repairable_shares

    rows, notes = [], []
    for name, code in kinds.items():
        found, reads = repairable_shares(code), sum(len(code.plan([n])) for n in range(code.shards)) / code.shards
        short = max(known - ours for ours, known in zip(found[4:], KNOWN[name], strict=True))
        wanted = {"Reed–Solomon 8+8": 8, "two copies": 1}.get(name, 3)
        rows += [
            Row(f"{name}: largest shortfall of a share survived", [short], "", Claim(high=0.02)),
            Row(f"{name}: reads for one lost shard", [reads], "", Claim(wanted, wanted)),
        ]
        survived = " ".join(f"{share:.4f}" for share in found[1:])
        notes.append(f"{name}: reads {reads:g}; share survived of 1 … 8 lost: {survived}")
    tried, wrong = restored(kinds["sparse"], range(3, 4))
    rows.append(Row("sparse: triples not restored", [wrong], f"of {tried}", Claim(high=0)))
    tried, wrong = restored(kinds["local groups"], range(1, 7), 16)
    rows.append(Row("local groups: sets of 1 to 6 not restored", [wrong], f"of {tried}", Claim(high=0)))
    return rows, notes


def timed(work: Callable[[], object], size: int) -> float:
    """Return the MB per second of thread time for ``size`` bytes."""
    before = time.thread_time()
    work()
    return size / 1e6 / max(time.thread_time() - before, 1e-9)


def speed(kinds: dict[str, ErasureCode], size: int, repeats: int) -> list[Row]:
    """Speed of encoding and of one repair, compared with zfec's encoding and a copy."""
    rows, ratio = [], {}
    chosen = {"XOR 6+1": codes.make_code("auto", 7, 1), "Reed–Solomon 5+2": codes.make_code("auto", 7, 2)}
    chosen |= {"Reed–Solomon 5+3": codes.make_code("auto", 8, 3), **kinds}
    for name, code in chosen.items():
        everything = shards(code, size // code.data // 64 * 64)
        data, whole = everything[: code.data], code.data * everything[0].size
        plan = code.plan([0])
        assert not isinstance(plan, str), plan
        one = {n: everything[n] for n in plan}
        sides = [
            lambda code=code, data=data, whole=whole: timed(lambda: code.encode(data), whole),
            lambda code=code, one=one, data=data: timed(lambda: code.repair(one, [0]), data[0].size),
            lambda data=data, whole=whole: timed(lambda: [shard.copy() for shard in data], whole),
        ]
        rival = zfec_of(code)
        if rival:
            sides.append(lambda data=data, whole=whole, rival=rival: timed(lambda: rival(data), whole))
        encode, repair, copied, *other = interleaved(sides, repeats)
        columns = {"one rebuilt": round(statistics.median(repair)), "copied": round(statistics.median(copied))}
        if other:
            columns["zfec"] = round(statistics.median(other[0]))
            ratio[name] = ratios(encode, other[0])
        rows.append(Row(f"{name}: encoded, MB/s", encode, "", None, columns))
    least = {"Reed–Solomon 5+2": 1.0, "Reed–Solomon 8+8": 1.0, "sparse": 2.0}
    rows += [Row(f"{name}: over zfec", ratio[name], "", Claim(low=low)) for name, low in least.items() if name in ratio]
    return rows


def zfec_of(code: ErasureCode) -> Callable[[Any], object] | None:
    if importlib.util.find_spec("zfec") is None:
        return None
    import zfec

    encoder = zfec.Encoder(code.data, code.shards)
    return lambda data: encoder.encode([shard.data for shard in data], list(range(code.data, code.shards)))


@benchmark(
    "codes",
    seed=Flag(4, "of the annealing"),
    tries=Flag(20_000, "matrices that the annealing counts"),
    megabytes=Flag(64, "of data that is encoded"),
    repeats=7,
    to=Flag(RESULTS / "sparse_16_8.json", "the found code's file, with --save"),
)
def run_codes(args: Namespace) -> Measurement:
    """Measure the erasure codes: losses survived, reads of a repair, and speed.

    Every claimed set of losses is repaired, survival is counted set by set, and annealing finds the sparse code of 16
    shards. Speeds are MB of data per second of one thread's time, compared with zfec's where installed.
    """
    found = anneal(SearchTarget(16, 8, 4, 4), args.seed, args.tries)
    proof = certificate(found)
    kinds = {
        "Reed–Solomon 8+8": codes.make_code("reed_solomon", 16, 8),
        "local groups": codes.make_code("local", 16, 6),
        "sparse": found.code,
        "two copies": ErasureCode(np.eye(8, dtype=np.uint8)),
    }
    table, notes = survival(kinds)
    fast = {name: code for name, code in kinds.items() if name != "two copies"}
    rows = [
        *exactness(),
        Row("annealing: excess weight of the [16, 8] code", [found.excess], "0", Claim(high=0)),
        Row("annealing: its distance", [int(str(proof["distance"]))], "5, without a bound on checks", Claim(low=4)),
        *table,
        *speed(fast, args.megabytes << 20, args.repeats),
    ]
    if args.save:
        write(args.to, code_file(found).model_dump_json(indent=1) + "\n")
    return Result(rows, [*notes, f"certificate: {json.dumps(proof)}"])


Columns = list[int]  # of the hidden shards, each the bits of its checks
Search = Callable[["Codes", "TaskProblem", random.Random], Iterator[float]]  # an endless sequence of evaluated rewards
PATIENCE = 40  # changes without a gain before a restart


def text(task: Codes, columns: Sequence[int]) -> str:
    pairs = [(c, n) for n, column in enumerate(columns) for c in range(12) if column >> c & 1]
    return task.form.write("", ",".join(f"{ascii_lowercase[c]}{task.shown + n}" for c, n in pairs))


def vectors(task: Codes) -> list[int]:
    return [v for v in range(1, 1 << task.shards - task.data) if v.bit_count() <= task.degree]


def drawn(task: Codes, rng: random.Random) -> Columns:
    return [rng.choice(vectors(task)) for _ in range(task.shards - task.shown)]


def blind(task: Codes, problem: TaskProblem, rng: random.Random) -> Iterator[float]:
    while True:
        yield task.score(problem, text(task, drawn(task, rng)))


def climb(task: Codes, problem: TaskProblem, rng: random.Random, patience: int = PATIENCE) -> Iterator[float]:
    """Climb from random shards by flipping an edge or redrawing a shard; keep changes that are not worse."""
    while True:
        columns = drawn(task, rng)
        now = task.score(problem, text(task, columns))
        yield now
        idle = 0
        while idle < patience:
            changed, place = list(columns), rng.randrange(len(columns))
            if rng.random() < 0.5:
                changed[place] ^= 1 << rng.randrange(task.shards - task.data)
            else:
                changed[place] = rng.choice(vectors(task))
            found = task.score(problem, text(task, changed))
            yield found
            idle = 0 if found > now else idle + 1
            if found >= now:
                columns, now = changed, found


def best(search: Search, task: Codes, problem: TaskProblem, rng: random.Random, looks: int) -> float:
    found = 0.0
    for reward in islice(search(task, problem, rng), looks):
        found = max(found, reward)
        if found == 1:
            break
    return found


def greedy(task: Codes, shown: Sequence[int], rng: random.Random) -> Columns | None:
    """Choose shard by shard any that keeps the distance and the checks' weight; None if there is none."""
    columns, room = [], [task.weight - sum(v >> c & 1 for v in shown) for c in range(task.shards - task.data)]
    for _ in range(task.shards - task.shown):
        sums = {0}
        for _few in range(task.distance - 2):
            sums |= {v ^ each for v in [*shown, *columns] for each in sums}
        fit = [v for v in vectors(task) if v not in sums and all(left >= (v >> c & 1) for c, left in enumerate(room))]
        if not fit:
            return None
        light = min(v.bit_count() for v in fit)
        column = rng.choice([v for v in fit if v.bit_count() == light])
        columns.append(column)
        room = [left - (column >> c & 1) for c, left in enumerate(room)]
    return columns


LOOKS = (1, 4, 16, 64)  # rewards that are looked at for one problem


@dataclass(frozen=True)
class Learned:
    """One seed: shares solved by one draw during learning, and by the best of several before and after."""

    curve: list[float]
    before: dict[int, float]
    after: dict[int, float]


def recipe(args: Namespace, name: str, seed: int) -> SwarmConfig:
    plain: dict[str, Any] = read(shipped.find("code_swarm")) | {"name": name, "seed": seed}
    plain["task"] = {"name": "codes", "options": options(args)}
    plain["warmup"] = {"steps": args.warmup, "seed": seed}
    plain["rounds"] = plain["rounds"] | {"count": args.rounds, "keep": 0}
    plain["evaluate"] = {"every": 10, "problems": 1000}
    plain["optim"] = {"lr": args.lr}
    return SwarmConfig.model_validate(plain)


def options(args: Namespace) -> dict[str, Any]:
    return {key: getattr(args, key) for key in ("shards", "data", "distance", "weight", "degree", "shown")}


def learn(args: Namespace, seed: int, problems: Sequence[TaskProblem]) -> Learned:
    """Run a swarm's first peer for all rounds, or read its kept result."""
    config = recipe(args, f"worth-{seed}", seed)
    folder = RUNS / "code_search" / config.name
    kept, settings = folder / "learned.json", f"{config.model_dump_json()} {args.problems}"
    if kept.is_file() and (found := json.loads(kept.read_text())).get("settings") == settings:
        return Learned(found["curve"], *({int(k): v for k, v in found[when].items()} for when in ("before", "after")))
    shutil.rmtree(folder, ignore_errors=True)
    learned = ran(args, config, problems, folder)
    print(f"{config.name}: {' '.join(f'{x:.3f}' for x in learned.curve)}; {learned}", flush=True)
    write(kept, json.dumps(asdict(learned) | {"settings": settings}))
    return learned


def ran(args: Namespace, config: SwarmConfig, problems: Sequence[TaskProblem], folder: Path) -> Learned:
    task: Any = make_task(config)
    policy = make_policy(config, task, print)
    before = drawn_best(args, config, policy, problems, task)
    together(config, folder, task, policy)
    curve = [r.accuracy.rate or 0.0 for r in read_log(folder / "p0" / LOG) if isinstance(r, Evaluated)]
    after = drawn_best(args, config, policy, problems, task)
    return Learned(curve, before, after)


def drawn_best(
    args: Namespace, config: SwarmConfig, policy: Policy, problems: Sequence[TaskProblem], task: Codes
) -> dict[int, float]:
    """Return the shares of problems solved by the best of several draws."""
    solved: dict[int, list[bool]] = {looks: [] for looks in LOOKS}
    for n, problem in enumerate(problems):
        sampling, prompt = config.sampling, prompt_for(problem, policy).prompt
        support, draw = sampling.support(policy.vocab), generator("best", config.seed, n)
        (found,) = policy.sample([prompt], max(LOOKS), sampling.max_new, sampling.temperature, support, draw)
        right = [one.ended and task.solves(problem, policy.decode(one.ids)) for one in found]
        for looks, shares in solved.items():
            shares.append(any(right[:looks]))
    return {looks: fmean(shares) for looks, shares in solved.items()}


def searched(task: Codes, search: Search, problems: Sequence[TaskProblem], seed: int, looks: int) -> float:
    rng = random.Random(seed)
    return fmean(best(search, task, problem, rng, looks) == 1 for problem in problems)


def constructed(task: Codes, problems: Sequence[TaskProblem], seed: int, tries: int) -> float:
    """Return the share of problems that the greedy rule solves in ``tries``, without rewards."""
    rng, solved = random.Random(seed), []
    for problem in problems:
        columns = shown(task, problem)
        found = (greedy(task, columns, rng) for _ in range(tries))
        solved.append(any(task.solves(problem, text(task, hidden)) for hidden in found if hidden is not None))
    return fmean(solved)


def shown(task: Codes, problem: TaskProblem) -> list[int]:
    columns = [0] * task.shown
    for edge in problem.prompt.rstrip("=").split(","):
        columns[int(edge[1:])] |= 1 << ord(edge[0]) - ord("a")
    return columns


def learning_rows(runs: Sequence[Learned]) -> list[Row]:
    rises = [run.curve[-1] - run.curve[0] for run in runs]
    return [
        Row("worth: solved by one draw, before", [run.curve[0] for run in runs], "all: 1"),
        Row("worth: the same, after", [run.curve[-1] for run in runs], "all: 1"),
        Row("worth: rise", rises, "all: 1", Claim(low=0.1), judged="least"),
    ]


def search_rows(args: Namespace, task: Codes, runs: list[Learned], problems: Sequence[TaskProblem]) -> list[Row]:
    rows = []
    for looks in LOOKS:
        sides = {
            "policy, before": [run.before[looks] for run in runs],
            "policy, after": [run.after[looks] for run in runs],
            "blind": [searched(task, blind, problems, seed, looks) for seed in args.seeds],
            "climb": [searched(task, climb, problems, seed, looks) for seed in args.seeds],
            "greedy, no reward": [constructed(task, problems, seed, looks) for seed in args.seeds],
        }
        rows += [Row(f"{looks} looks a problem: {side}", found, "all: 1") for side, found in sides.items()]
    spent = args.rounds * 16 * 12
    each = spent // len(problems) + 1
    for name, search in (("blind", blind), ("climb", climb)):
        found = [searched(task, search, problems, seed, each) for seed in args.seeds]
        lead = gaps([run.after[1] for run in runs], found)
        rows += [
            Row(f"{spent + len(problems)} looks at {len(problems)} problems in all: {name}", found, "all: 1"),
            Row(f"the same: policy after learning, less {name}", lead, "as good: 0"),
        ]
    return rows


@benchmark(
    "code_search",
    seeds=[1, 2, 3],
    rounds=60,
    warmup=Flag(800, "steps"),
    lr=1e-3,
    problems=Flag(150, "held out, for the searches"),
    shards=8,
    data=4,
    distance=3,
    weight=4,
    degree=3,
    shown=4,
)
def run_code_search(args: Namespace) -> Measurement:
    """Measure whether a swarm learns to complete erasure codes, compared with plain search.

    Four peers learn the task `codes` from worked solutions with mistakes, rewarded by a code's worth; shown are
    held-out problems solved by one draw, before and after. The same problems are searched by draws of the policy, blind
    draws, hill climbing and a greedy rule with as many rewards; also with the rewards spent on learning. One of four
    peers with equal weights computes for all (benchmarks/consensus.py).
    """
    torch.set_num_threads(1)
    task = Codes(**options(args))
    problems = [task.problem(task.training + n) for n in range(args.problems)]
    runs = [learn(args, seed, problems) for seed in args.seeds]
    rows = learning_rows(runs) + search_rows(args, task, runs, problems)
    return Result(rows, [f"{task.name}, {task.shown} shown; one draw: 1,000 held-out problems"])


if __name__ == "__main__":
    start(codes=run_codes, code_search=run_code_search)
