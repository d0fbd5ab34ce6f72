"""Erasure codes: exactness, speed and survival, and a swarm that learns to complete codes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any
from zlib import crc32

from benchmarks.common import RESULTS, RUNS, Claim, Row, conclude, interleaved, parser, start, write

if TYPE_CHECKING:
    from planaria.recovery.codes import Code, Layout
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy
    from planaria.swarm.tasks.base import Problem
    from planaria.swarm.tasks.codes import Codes


CODES_NAME = "codes"
GROUPS = {(4, 1): 1 / 3, (4, 2): 1.0, (6, 2): 0.5, (8, 3): 0.6}
"""parity held over state, by members and losses tolerated"""
KNOWN = {
    "Reed–Solomon 8+8": (1, 1, 1, 1, 1),
    "local groups": (1, 1, 1, 0.996, 0.847),
    "sparse": (0.996, 0.974, 0.909, 0.746, 0.423),
    "two copies": (0.615, 0.410, 0.224, 0.090, 0.020),
}
"""shares of 4 … 8 lost of 16 that were known before"""
CHANCES = (0.01, 0.05, 0.1, 0.2)
LINK = 100e6 / 8  # bytes a second


def restored(code: Code, lost_counts: range, size: int = 64) -> tuple[int, int]:
    """(sets tried, sets wrong): every set of so many losses, through plan and repair."""
    everything = shards(code, size)
    tried = wrong = 0
    for lost in (lost for count in lost_counts for lost in combinations(range(code.shards), count)):
        tried += 1
        reads = code.plan(lost)
        back = {} if isinstance(reads, str) else code.repair({n: everything[n] for n in reads}, lost)
        wrong += any(n not in back or back[n].tobytes() != everything[n].tobytes() for n in lost)
    return tried, wrong


def shards(code: Code, size: int) -> list[Any]:
    """Random data, in which NaN, −0 and denormals stand, and its parities."""
    import numpy as np

    data = np.random.default_rng(0).integers(0, 256, (code.data, size), dtype=np.uint8)
    odd = np.array([np.nan, -0.0, 1e-45, np.inf], np.float32).view(np.uint8)
    data[:, : odd.size] = odd
    return [*data, *code.encode(list(data))]


def believed(code: Code, size: int = 64) -> int:
    """Sets of one loss more than tolerated for which bytes were given."""
    from planaria.recovery.codes import LossError

    everything, given = shards(code, size), 0
    for lost in combinations(range(code.shards), len(code.weights) + 1):
        try:
            code.repair({n: everything[n] for n in range(code.shards) if n not in lost}, lost)
            given += 1
        except LossError:
            given += not isinstance(code.plan(lost), str)
    return given


def flipped(layout: Layout) -> tuple[int, int]:
    """(bits flipped, of which missed or not mended): every block has one, its checksum makes it a lost one."""
    import numpy as np

    states = [np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8) for n, size in enumerate(layout.sizes)]
    there = layout.parities(states)
    there.update({(t, who): block for who, state in enumerate(states) for t, block in layout.cut(who, state).items()})
    sums = {key: crc32(block.data) for key, block in there.items()}
    bits = missed = 0
    for (stripe, who), block in there.items():
        for bit in range(0, 8 * block.size, 8 * block.size // 7 or 1):
            damaged = block.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            found = crc32(damaged.data) != sums[stripe, who]
            reads = layout.reads([who], who)
            assert not isinstance(reads, str), reads
            donors = reads[stripe]
            back = layout.rebuild(stripe, who, {each: there[stripe, each] for each in donors})[: block.size]
            bits, missed = bits + 1, missed + (not found or back.tobytes() != block.tobytes())
    return bits, missed


def exactness() -> list[Row]:
    """XOR and Reed–Solomon: all losses up to m, one more, and flipped bits."""
    from planaria.recovery import codes

    rows = []
    for (members, tolerate), overhead in GROUPS.items():
        code = codes.code("auto", members, tolerate)
        layout = codes.Layout(tuple(90_000 + 1001 * n for n in range(members)), code)
        tried, wrong = restored(code, range(1, tolerate + 1))
        bits, missed = flipped(codes.Layout(tuple(700 + 91 * n for n in range(members)), code))
        named = f"N = {members}, m = {tolerate}"
        rows += [
            Row(f"{named}: parity over state", [layout.overhead], "", Claim(0.99 * overhead, 1.01 * overhead)),
            Row(f"{named}: loss sets not restored", [wrong], f"of {tried}", Claim(high=0)),
            Row(f"{named}: m + 1 losses, bytes given", [believed(code)], "0", Claim(high=0)),
            Row(f"{named}: flipped bits not found and mended", [missed], f"of {bits}", Claim(high=0)),
        ]
    return rows


def reads_of_one(code: Code) -> float:
    return sum(len(code.plan([n])) for n in range(code.shards)) / code.shards


def survival(kinds: dict[str, Code]) -> tuple[list[Row], list[str]]:
    """Claims of the codes of 16 shards for 8, and the table of losses survived against reads."""
    from planaria.recovery.codes.base import loss_chance, shares

    rows, notes = [], []
    for name, code in kinds.items():
        found, reads = shares(code), reads_of_one(code)
        short = max(known - ours for ours, known in zip(found[4:], KNOWN[name], strict=True))
        wanted = {"Reed–Solomon 8+8": 8, "two copies": 1}.get(name, 3)
        rows += [
            Row(f"{name}: largest shortfall of a share survived", [short], "", Claim(high=0.02)),
            Row(f"{name}: reads for one lost shard", [reads], "", Claim(wanted, wanted)),
        ]
        survived = " ".join(f"{share:.4f}" for share in found[1:])
        chances = ", ".join(f"{loss_chance(found, code.shards, p):.2e} at {p:g}" for p in CHANCES)
        notes.append(f"{name}: reads {reads:g}; share survived of 1 … 8 lost: {survived}; P(loss) {chances}")
    tried, wrong = restored(kinds["sparse"], range(3, 4))
    rows.append(Row("sparse: triples not restored", [wrong], f"of {tried}", Claim(high=0)))
    tried, wrong = restored(kinds["local groups"], range(1, 7), 16)
    rows.append(Row("local groups: sets of 1 to 6 not restored", [wrong], f"of {tried}", Claim(high=0)))
    return rows, notes


def timed(work: Callable[[], object], size: int) -> float:
    """Megabytes of ``size`` bytes a second of this thread."""
    before = time.thread_time()
    work()
    return size / 1e6 / max(time.thread_time() - before, 1e-9)


def speed(kinds: dict[str, Code], size: int, repeats: int) -> list[Row]:
    """Encoding and the repair of one shard, beside zfec's encoding and a copy of the bytes."""
    from planaria.recovery import codes

    rows, ratio = [], {}
    chosen = {"XOR 6+1": codes.code("auto", 7, 1), "Reed–Solomon 5+2": codes.code("auto", 7, 2)}
    chosen |= {"Reed–Solomon 5+3": codes.code("auto", 8, 3), **kinds}
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
        beside = {"one rebuilt": round(statistics.median(repair)), "copied": round(statistics.median(copied))}
        if other:
            beside["zfec"] = round(statistics.median(other[0]))
            ratio[name] = [a / b for a, b in zip(encode, other[0], strict=True)]
        rows.append(Row(f"{name}: encoded, MB/s", encode, "", None, beside))
    least = {"Reed–Solomon 5+2": 1.0, "Reed–Solomon 8+8": 1.0, "sparse": 2.0}
    rows += [Row(f"{name}: over zfec", ratio[name], "", Claim(low=low)) for name, low in least.items() if name in ratio]
    return rows


def zfec_of(code: Code) -> Callable[[Any], object] | None:
    """zfec's encoding of as many shards, None where it is not installed."""
    if importlib.util.find_spec("zfec") is None:
        return None
    import zfec

    encoder = zfec.Encoder(code.data, code.shards)
    return lambda data: encoder.encode([shard.data for shard in data], list(range(code.data, code.shards)))


def over_a_link(kinds: dict[str, Code], size: int) -> Row:
    """Seconds to read and rebuild one shard at 100 Mbit/s, over Reed–Solomon's; the link is arithmetic."""
    seconds = {}
    for name in ("sparse", "Reed–Solomon 8+8"):
        everything = shards(kinds[name], size)
        reads = kinds[name].plan([0])
        rate = timed(lambda n=name, e=everything, r=reads: kinds[n].repair({i: e[i] for i in r}, [0]), size)
        seconds[name] = len(reads) * size / LINK + size / 1e6 / rate
    ratio = seconds["sparse"] / seconds["Reed–Solomon 8+8"]
    return Row("one shard at 100 Mbit/s: sparse over Reed–Solomon", [ratio], "3 / 8", Claim(high=0.45))


def arguments() -> argparse.Namespace:
    flags = parser(CODES_NAME, run_codes.__doc__)
    flags.add_argument("--seed", type=int, default=4, help="of the annealing")
    flags.add_argument("--tries", type=int, default=20_000, help="matrices that the annealing counts")
    flags.add_argument("--megabytes", type=int, default=64, help="of data that is encoded")
    flags.add_argument("--repeats", type=int, default=7)
    flags.add_argument(
        "--to", type=Path, default=RESULTS / "sparse_16_8.json", help="the found code's file, with --save"
    )
    return flags.parse_args()


def run_codes() -> int:
    """What do the erasure codes survive, what does a repair read, and how fast are they?

    Every set of losses that a code claims is really lost and brought back, the table of losses survived against reads
    is counted set by set, and annealing finds the sparse code of 16 shards. Speeds are of one thread's time, in
    megabytes of data a second; zfec's stand beside them where it is installed.
    """
    given = arguments()
    import numpy as np

    from planaria.recovery import codes
    from planaria.recovery.codes.search import Target, anneal, certificate, file

    found = anneal(Target(16, 8, 4, 4), given.seed, given.tries)
    said = certificate(found)
    kinds = {
        "Reed–Solomon 8+8": codes.code("reed_solomon", 16, 8),
        "local groups": codes.code("local", 16, 6),
        "sparse": found.code,
        "two copies": codes.Code(np.eye(8, dtype=np.uint8)),
    }
    table, notes = survival(kinds)
    fast = {name: code for name, code in kinds.items() if name != "two copies"}
    rows = [
        *exactness(),
        Row("annealing: excess weight of the [16, 8] code", [found.excess], "0", Claim(high=0)),
        Row("annealing: its distance", [int(str(said["distance"]))], "5, without a bound on checks", Claim(low=4)),
        *table,
        *speed(fast, given.megabytes << 20, given.repeats),
        over_a_link(kinds, (given.megabytes << 20) // 8),
    ]
    if given.save:
        write(given.to, file(found).model_dump_json(indent=1) + "\n")
    return conclude(CODES_NAME, given, rows, [*notes, f"certificate: {json.dumps(said)}"])


Columns = list[int]
"""of the hidden shards, each the bits of its checks"""
Search = Callable[["Codes", "Problem", random.Random], Iterator[float]]
"""the rewards that it looks at, one after the other, without end"""
PATIENCE = 40
"""changes without a gain after which a climb begins anew"""


def text(task: Codes, columns: Sequence[int]) -> str:
    edges = [
        f"{ascii_lowercase[c]}{task.shown + n}"
        for n, column in enumerate(columns)
        for c in range(12)
        if column >> c & 1
    ]
    return task.form.write("", ",".join(edges))


def vectors(task: Codes) -> list[int]:
    """All sets of checks that a shard may be in."""
    return [v for v in range(1, 1 << task.shards - task.data) if v.bit_count() <= task.degree]


def drawn(task: Codes, rng: random.Random) -> Columns:
    return [rng.choice(vectors(task)) for _ in range(task.shards - task.shown)]


def blind(task: Codes, problem: Problem, rng: random.Random) -> Iterator[float]:
    """Any shards."""
    while True:
        yield task.score(problem, text(task, drawn(task, rng)))


def climb(task: Codes, problem: Problem, rng: random.Random, patience: int = PATIENCE) -> Iterator[float]:
    """From any shards on, an edge is turned over or a shard drawn anew, and kept unless that is worth less."""
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


def best(search: Search, task: Codes, problem: Problem, rng: random.Random, looks: int) -> float:
    """The best reward of so many; a search ends with the first that is 1."""
    found = 0.0
    for reward in islice(search(task, problem, rng), looks):
        found = max(found, reward)
        if found == 1:
            break
    return found


def greedy(task: Codes, shown: Sequence[int], rng: random.Random) -> Columns | None:
    """Shard by shard, any that no few others add up to and that checks have room for; None where none is left."""
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


CODE_SEARCH_NAME = "code_search"
LOOKS = (1, 4, 16, 64)
"""rewards that are looked at for one problem"""


@dataclass(frozen=True)
class Learned:
    """What one seed's learning came to: solved shares by one draw (before, after), and by the best of several."""

    curve: list[float]
    before: dict[int, float]
    after: dict[int, float]


def recipe(given: argparse.Namespace, name: str, seed: int) -> SwarmConfig:
    from planaria.config import shipped
    from planaria.config.recipe import read
    from planaria.swarm.config import SwarmConfig

    plain: dict[str, Any] = read(shipped.find("code_swarm")) | {"name": name, "seed": seed}
    plain["task"] = {"name": "codes", "options": options(given)}
    plain["school"] = {"steps": given.school, "seed": seed}
    plain["rounds"] = plain["rounds"] | {"count": given.rounds, "keep": 0}
    plain["evaluate"] = {"every": 10, "problems": 1000}
    plain["optim"] = {"lr": given.lr}
    return SwarmConfig.model_validate(plain)


def options(given: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(given, key) for key in ("shards", "data", "distance", "weight", "degree", "shown")}


def learn(given: argparse.Namespace, arm: str, seed: int, problems: Sequence[Problem]) -> Learned:
    """One run of a swarm, kept: all its rounds as its first peer lives through them."""
    config = recipe(given, f"{arm}-{seed}", seed)
    folder = RUNS / CODE_SEARCH_NAME / config.name.replace(" ", "_")
    kept, said = folder / "learned.json", f"{config.model_dump_json()} {given.problems}"
    if kept.is_file() and (found := json.loads(kept.read_text()))["said"] == said:
        return Learned(found["curve"], *({int(k): v for k, v in found[when].items()} for when in ("before", "after")))
    shutil.rmtree(folder, ignore_errors=True)
    learned = ran(given, config, arm, problems, folder)
    print(f"{config.name}: {' '.join(f'{x:.3f}' for x in learned.curve)}; {learned}", flush=True)
    write(kept, json.dumps(asdict(learned) | {"said": said}))
    return learned


def ran(given: argparse.Namespace, config: SwarmConfig, arm: str, problems: Sequence[Problem], folder: Path) -> Learned:
    from benchmarks.consensus import together
    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.records.lines import LOG, Evaluated, read_log
    from planaria.swarm.tasks.codes import Codes

    task: Any = task_of(config)
    policy = policy_of(config, task, print)  # one school for both arms
    before = drawn_best(given, config, policy, problems, task)
    if arm == "right alone":
        task = only_right(Codes)(**options(given))
    together(config, folder, task, policy)
    curve = [r.accuracy.rate or 0.0 for r in read_log(folder / "p0" / LOG) if isinstance(r, Evaluated)]
    after = drawn_best(given, config, policy, problems, task)
    return Learned(curve, before, after)


def only_right(base: type[Codes]) -> type[Codes]:
    """The same task, that pays nothing for a part of the way."""

    class OnlyRight(base):  # type: ignore[valid-type, misc]
        def score(self, problem: Problem, completion: str) -> float:
            return float(super().score(problem, completion) == 1)

    return OnlyRight


def drawn_best(
    given: argparse.Namespace, config: SwarmConfig, policy: Policy, problems: Sequence[Problem], task: Codes
) -> dict[int, float]:
    """Share of problems that the best of so many draws of a policy solves."""
    from planaria.swarm.draws import generator
    from planaria.swarm.rollout import ask

    solved: dict[int, list[bool]] = {looks: [] for looks in LOOKS}
    for n, problem in enumerate(problems):
        (found,) = policy.sample(
            [ask(problem, policy).prompt],
            max(LOOKS),
            config.sampling.max_new,
            config.sampling.temperature,
            config.sampling.support(policy.vocab),
            generator("best", config.seed, n),
        )
        right = [one.ended and task.solves(problem, policy.decode(one.ids)) for one in found]
        for looks, shares in solved.items():
            shares.append(any(right[:looks]))
    return {looks: fmean(shares) for looks, shares in solved.items()}


def searched(task: Codes, search: Search, problems: Sequence[Problem], seed: int, looks: int) -> float:
    rng = random.Random(seed)
    return fmean(best(search, task, problem, rng, looks) == 1 for problem in problems)


def constructed(task: Codes, problems: Sequence[Problem], seed: int, tries: int) -> float:
    """Share of problems that the greedy rule solves in so many tries, without looking at a reward."""
    rng, solved = random.Random(seed), []
    for problem in problems:
        columns = shown(task, problem)
        found = (greedy(task, columns, rng) for _ in range(tries))
        solved.append(any(task.solves(problem, text(task, hidden)) for hidden in found if hidden is not None))
    return fmean(solved)


def shown(task: Codes, problem: Problem) -> list[int]:
    columns = [0] * task.shown
    for edge in problem.prompt.rstrip("=").split(","):
        columns[int(edge[1:])] |= 1 << ord(edge[0]) - ord("a")
    return columns


def learning_rows(runs: dict[str, list[Learned]]) -> list[Row]:
    rows = []
    for arm, found in runs.items():
        rises = [run.curve[-1] - run.curve[0] for run in found]
        rows += [
            Row(f"{arm}: solved by one draw, before", [run.curve[0] for run in found], "all: 1"),
            Row(f"{arm}: the same, after", [run.curve[-1] for run in found], "all: 1"),
            Row(f"{arm}: rise", rises, "all: 1", Claim(low=0.1) if arm == GRADED else None, judged="least"),
        ]
    return rows


def search_rows(given: argparse.Namespace, task: Codes, runs: list[Learned], problems: Sequence[Problem]) -> list[Row]:
    rows = []
    for looks in LOOKS:
        sides = {
            "policy, before": [run.before[looks] for run in runs],
            "policy, after": [run.after[looks] for run in runs],
            "blind": [searched(task, blind, problems, seed, looks) for seed in given.seeds],
            "climb": [searched(task, climb, problems, seed, looks) for seed in given.seeds],
            "greedy, no reward": [constructed(task, problems, seed, looks) for seed in given.seeds],
        }
        rows += [Row(f"{looks} looks a problem: {side}", found, "all: 1") for side, found in sides.items()]
    spent = given.rounds * 16 * 12
    each = spent // len(problems) + 1
    for name, search in (("blind", blind), ("climb", climb)):
        found = [searched(task, search, problems, seed, each) for seed in given.seeds]
        lead = [run.after[1] - other for run, other in zip(runs, found, strict=True)]
        rows += [
            Row(f"{spent + len(problems)} looks at {len(problems)} problems in all: {name}", found, "all: 1"),
            Row(f"the same: policy after learning, less {name}", lead, "as good: 0"),
        ]
    return rows


GRADED = "worth"


def run_code_search() -> int:
    """Does a swarm learn to complete erasure codes, and is that worth its rewards beside plain search?

    - learn: four peers learn the task `codes` from worked solutions that contain mistakes. Measured: held-out problems
      solved by one draw, before and after, rewarded by the worth of a code, and for correct answers alone.
    - search: the same held-out problems by draws of the policy, blind draws, hill climbing and a greedy rule, with as
      many rewards evaluated; and what the rewards spent on learning would have bought.

    Learning is computed by one of four peers with equal weights for all (benchmarks/consensus.py says why).
    """
    flags = parser(CODE_SEARCH_NAME, run_code_search.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=60)
    flags.add_argument("--school", type=int, default=800, help="steps")
    flags.add_argument("--lr", type=float, default=1e-3)
    flags.add_argument("--problems", type=int, default=150, help="held out, for the searches")
    flags.add_argument("--arms", nargs="+", default=[GRADED, "right alone"])
    for key, usual in (("shards", 8), ("data", 4), ("distance", 3), ("weight", 4), ("degree", 3), ("shown", 4)):
        flags.add_argument(f"--{key}", type=int, default=usual)
    given = flags.parse_args()
    import torch

    from planaria.swarm.tasks.codes import Codes

    torch.set_num_threads(1)
    task = Codes(**options(given))
    problems = [task.problem(task.training + n) for n in range(given.problems)]
    runs = {arm: [learn(given, arm, seed, problems) for seed in given.seeds] for arm in given.arms}
    rows = learning_rows(runs) + search_rows(given, task, runs[given.arms[0]], problems)
    return conclude(
        CODE_SEARCH_NAME, given, rows, [f"{task.name}, {task.shown} shown; one draw: 1,000 held-out problems"]
    )


if __name__ == "__main__":
    start(codes=run_codes, code_search=run_code_search)
