"""The command on erasure codes: lab codes."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.cli.flags import Commands, command


def add(commands: Commands) -> None:
    codes = command(
        commands,
        "lab codes",
        "search a code of sparse parity checks, and report the losses it survives",
        _codes,
        code=False,
    )
    codes.add_argument("--shards", type=int, required=True, metavar="N")
    codes.add_argument("--data", type=int, required=True, metavar="K", help="shards of data; the others are parities")
    codes.add_argument("--distance", type=int, required=True, metavar="D", help="any D - 1 losses can be rebuilt")
    codes.add_argument("--weight", type=int, required=True, metavar="W", help="most shards in a check")
    codes.add_argument("--degree", type=int, default=0, metavar="C", help="most checks of a shard (default: any)")
    codes.add_argument("--seed", type=int, default=0)
    codes.add_argument("--tries", type=int, default=20_000, help="number of candidate matrices (default %(default)s)")
    codes.add_argument("--to", type=Path, metavar="FILE", help="write the code: recovery.options.code = FILE")
    codes.add_argument("--product", type=Path, metavar="FILE", help="write its hypergraph product with itself")


def _codes(given: argparse.Namespace) -> int:
    from planaria.cli.commands.codes import Request, search
    from planaria.recovery.codes.search import Target

    target = Target(given.shards, given.data, given.distance, given.weight, given.degree)
    return search(Request(target, given.seed, given.tries, given.to, given.product))
