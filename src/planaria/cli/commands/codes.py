"""``planaria codes``: find a code of light checks, say what it survives beside its rivals, write it and its product."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.recovery import codes
from planaria.recovery.codes import Code
from planaria.recovery.codes.base import MOST, share
from planaria.recovery.codes.local import needed
from planaria.recovery.codes.product import Checks
from planaria.recovery.codes.product import file as product_file
from planaria.recovery.codes.search import Found, Target, anneal, certificate, file
from planaria.report.tables import Table, show

MOST_TRIES = 10_000_000
TRIED = 20_000
"""sets of losses that are tried for one cell of the table"""
GROUP = 4
"""of the local groups beside it"""


@dataclass(frozen=True)
class Asked:
    """What is looked for, how long, and where it is written."""

    target: Target
    seed: int
    tries: int
    to: Path | None = None
    product: Path | None = None


def search(asked: Asked) -> int:
    """Print what was found; the exit code: 1 when it falls short of what was asked for, and is written all the same.

    :raises UserError: when a number is out of bounds, or a file cannot be written.
    """
    if not 1 <= asked.tries <= MOST_TRIES:
        raise UserError(f"--tries: {asked.tries}; give 1 to {MOST_TRIES}")
    target = asked.target
    if (sets := math.comb(target.shards, target.distance)) > MOST:
        raise UserError(
            f"--distance {target.distance}: {sets} sets of so many of {target.shards} shards, and {MOST} can be tried "
            "for a certificate; lower it, or --shards"
        )
    for path in (asked.to, asked.product):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: {path.parent} is no folder; make it, or write elsewhere")
    found = anneal(target, asked.seed, asked.tries)
    said = certificate(found)
    show([_what(found, said), _beside(found.code)])
    if asked.to is not None:
        atomic.write_text(asked.to, file(found).model_dump_json(indent=1) + "\n")
    if asked.product is not None:
        _write_product(found, asked.product)
    short = found.excess or int(str(said["distance"])) < target.distance
    if short:
        print(f"falls short: distance {said['distance']} of {target.distance}, {found.excess} edges too many")
    return int(bool(short))


def _what(found: Found, said: dict[str, object]) -> Table:
    n, k = said["shards"], said["data"]
    rows = [
        [f"[{n}, {k}, {said['distance']}]", "shards, data, distance: by all words, and by every loss of as many"],
        [_spread(said["check weights"]), "shards in a check"],
        [_spread(_degrees(found.code)), "checks of a shard"],
        [str(found.tried), f"matrices counted, seed {found.seed}"],
    ]
    return Table("", ["code", ""], rows)


def _beside(code: Code) -> Table:
    """Reads for one lost shard, and the share of losses survived, of this code and of others with as many parities."""
    n, parities = code.shards, len(code.weights)
    lost = [count for count in range(1, parities + 1) if math.comb(n, count) <= TRIED]
    rows = []
    for name, each in (("this code", code), *_rivals(n, parities)):
        reads = sum(len(each.plan([shard])) for shard in range(n)) / n
        rows.append([name, f"{reads:.3g}", *(f"{share(each, count):.4g}" for count in lost)])
    return Table("share of losses survived, all sets tried", ["", "reads for one", *map(str, lost)], rows)


def _rivals(shards: int, parities: int) -> list[tuple[str, Code]]:
    """Codes of as many shards and parities: Reed–Solomon, and the local groups of four that bear most losses."""
    rivals = [("reed_solomon", codes.code("reed_solomon", shards, parities))]
    globals_ = parities - -(-shards // GROUP)
    borne = [tolerate for tolerate in range(1, parities) if needed(tolerate, GROUP) == globals_]
    if borne and math.comb(shards, borne[-1]) <= TRIED:
        with suppress(UserError):  # none was found with coefficients that are tried
            rivals.append((f"local, groups of {GROUP}", codes.code("local", shards, borne[-1], {"group": GROUP})))
    return rivals


def _degrees(code: Code) -> list[int]:
    return sorted(sum(shard in check for check in code.checks) for shard in range(code.shards))


def _spread(numbers: object) -> str:
    assert isinstance(numbers, list)
    return f"{min(numbers)} to {max(numbers)}"


def _write_product(found: Found, path: Path) -> None:
    """The hypergraph product of the code with itself."""
    rows = tuple(sum(1 << shard for shard in check) for check in found.code.checks)
    made = product_file(Checks(rows, found.code.shards), Checks(rows, found.code.shards))
    heaviest = max(map(len, (*made.x, *made.z)))
    print(
        f"hypergraph product: [[{made.qubits}, {made.logical}, {made.distance}]], checks of at most {heaviest} qubits"
    )
    atomic.write_text(path, made.model_dump_json() + "\n")
