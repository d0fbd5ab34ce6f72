"""The command on erasure codes: lab codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from planaria.cli.flags import Seed, command, flag


@command("lab codes", code=False)
def _codes(
    *,
    shards: Annotated[int, flag("N", "shards of the code")],
    data: Annotated[int, flag("K", "shards of data; the others are parities")],
    distance: Annotated[int, flag("D", "any D - 1 losses can be rebuilt")],
    weight: Annotated[int, flag("W", "most shards in a check")],
    degree: Annotated[int, flag("C", "most checks of a shard (default: any)", show_default=False)] = 0,
    seed: Seed = 0,
    tries: Annotated[int, flag("N", "number of candidate matrices")] = 20_000,
    to: Annotated[Path | None, flag("FILE", "write the code: recovery.options.code = FILE")] = None,
    product: Annotated[Path | None, flag("FILE", "write its hypergraph product with itself")] = None,
) -> int:
    """Search a code of sparse parity checks, and report the losses it survives."""
    from planaria.cli.commands.codes import CodeSearch, search
    from planaria.recovery.codes.search import SearchTarget

    return search(CodeSearch(SearchTarget(shards, data, distance, weight, degree), seed, tries, to, product))
