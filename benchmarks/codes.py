"""What do the erasure codes survive, what does a repair read, and how fast are they?

Every set of losses that a code claims is really lost and brought back, the table of losses survived against reads is
counted set by set, and annealing finds the sparse code of 16 shards. Speeds are of one thread's time, in megabytes of
data a second; zfec's stand beside them where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from benchmarks.common import RESULTS, Claim, Row, conclude, interleaved, parser, start, write

if TYPE_CHECKING:
    from planaria.recovery.codes import Code, Layout

NAME = "codes"
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
    flags = parser(NAME, __doc__)
    flags.add_argument("--seed", type=int, default=4, help="of the annealing")
    flags.add_argument("--tries", type=int, default=20_000, help="matrices that the annealing counts")
    flags.add_argument("--megabytes", type=int, default=64, help="of data that is encoded")
    flags.add_argument("--repeats", type=int, default=7)
    flags.add_argument(
        "--to", type=Path, default=RESULTS / "sparse_16_8.json", help="the found code's file, with --save"
    )
    return flags.parse_args()


def main() -> int:
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
    return conclude(NAME, given, rows, [*notes, f"certificate: {json.dumps(said)}"])


if __name__ == "__main__":
    start(main)
