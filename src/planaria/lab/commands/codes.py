"""``python -m planaria.lab.commands.codes``: search and write a code of sparse parity checks, and its product."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from planaria.cli.entry import program
from planaria.cli.flags import Seed, flag
from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.lab.product_codes import ClassicalCode, product_file
from planaria.recovery import codes
from planaria.recovery.codes.base import MAX_LOSS_SETS, ErasureCode, repairable_share
from planaria.recovery.codes.local import required_parities
from planaria.recovery.codes.search import SearchedCode, SearchTarget, anneal, certificate, code_file
from planaria.report.tables import Table, show

MAX_TRIES = 10_000_000
MAX_LOSS_SETS_SHOWN = 20_000
"""maximum sets of losses in a cell of the table"""
GROUP = 4
"""size of the local groups in the comparison"""


def search(
    *,
    shards: Annotated[int, flag("N", "shards of the code")],
    data: Annotated[int, flag("K", "shards of data; the others are parities")],
    distance: Annotated[int, flag("D", "any D - 1 losses can be rebuilt")],
    weight: Annotated[int, flag("W", "maximum number of shards in a check")],
    degree: Annotated[int, flag("C", "maximum number of checks of a shard (default: any)", show_default=False)] = 0,
    seed: Seed = 0,
    tries: Annotated[int, flag("N", "number of candidate matrices")] = 20_000,
    to: Annotated[Path | None, flag("FILE", "write the code: recovery.options.code = FILE")] = None,
    product: Annotated[Path | None, flag("FILE", "write its hypergraph product with itself")] = None,
) -> int:
    """Search a code of sparse parity checks, and report the losses it survives; exit code 1 if it misses the target."""
    if not 1 <= tries <= MAX_TRIES:
        raise UserError(f"--tries: {tries}; use 1 to {MAX_TRIES}")
    target = SearchTarget(shards, data, distance, weight, degree)
    if (sets := math.comb(target.shards, target.distance)) > MAX_LOSS_SETS:
        raise UserError(
            f"--distance {target.distance}: {sets} sets of {target.distance} of {target.shards} shards, but a "
            f"certificate covers at most {MAX_LOSS_SETS}; lower it, or --shards"
        )
    for path in (to, product):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: {path.parent} is not a folder; create it, or use another folder")
    sparse = anneal(target, seed, tries)
    measured = certificate(sparse)
    show([_description(sparse, measured), _comparison(sparse.code)])
    if to is not None:
        atomic.write_text(to, code_file(sparse).model_dump_json(indent=1) + "\n")
    if product is not None:
        _write_product(sparse, product)
    misses_target = sparse.excess or int(str(measured["distance"])) < target.distance
    if misses_target:
        print(f"falls short: distance {measured['distance']} of {target.distance}, {sparse.excess} edges too many")
    return int(bool(misses_target))


def _description(code: SearchedCode, measured: dict[str, object]) -> Table:
    n, k = measured["shards"], measured["data"]
    rows = [
        [
            f"[{n}, {k}, {measured['distance']}]",
            "shards, data, distance: checked with all words, and all losses of that size",
        ],
        [_format_range(measured["check weights"]), "shards in a check"],
        [_format_range(_shard_degrees(code.code)), "checks of a shard"],
        [str(code.tried), f"candidate matrices, seed {code.seed}"],
    ]
    return Table("", ["code", ""], rows)


def _comparison(code: ErasureCode) -> Table:
    """Compare reads for one lost shard, and shares of survived losses, with other codes of equal parity count."""
    n, parities = code.shards, len(code.weights)
    lost = [count for count in range(1, parities + 1) if math.comb(n, count) <= MAX_LOSS_SETS_SHOWN]
    rows = []
    for name, each in (("this code", code), *_reference_codes(n, parities)):
        reads = sum(len(each.plan([shard])) for shard in range(n)) / n
        rows.append([name, f"{reads:.3g}", *(f"{repairable_share(each, count):.4g}" for count in lost)])
    return Table("share of losses survived, over all sets", ["", "reads for one", *map(str, lost)], rows)


def _reference_codes(shards: int, parities: int) -> list[tuple[str, ErasureCode]]:
    """Return codes with as many shards and parities: Reed–Solomon, and the best one with local groups of four."""
    rivals = [("reed_solomon", codes.make_code("reed_solomon", shards, parities))]
    globals_ = parities - -(-shards // GROUP)
    tolerated = [tolerate for tolerate in range(1, parities) if required_parities(tolerate, GROUP) == globals_]
    if tolerated and math.comb(shards, tolerated[-1]) <= MAX_LOSS_SETS_SHOWN:
        with suppress(UserError):  # no coefficients were found
            local = codes.make_code("local", shards, tolerated[-1], {"group": GROUP})
            rivals.append((f"local, groups of {GROUP}", local))
    return rivals


def _shard_degrees(code: ErasureCode) -> list[int]:
    return sorted(sum(shard in check for check in code.checks) for shard in range(code.shards))


def _format_range(numbers: object) -> str:
    assert isinstance(numbers, list)
    return f"{min(numbers)} to {max(numbers)}"


def _write_product(code: SearchedCode, path: Path) -> None:
    """Write the hypergraph product of the code with itself."""
    rows = tuple(sum(1 << shard for shard in check) for check in code.code.checks)
    product_code = product_file(ClassicalCode(rows, code.code.shards), ClassicalCode(rows, code.code.shards))
    heaviest = max(map(len, (*product_code.x, *product_code.z)))
    print(
        f"hypergraph product: [[{product_code.qubits}, {product_code.logical}, {product_code.distance}]], checks of at "
        f"most {heaviest} qubits"
    )
    atomic.write_text(path, product_code.model_dump_json() + "\n")


if __name__ == "__main__":
    program(search, "planaria.lab.commands.codes")
