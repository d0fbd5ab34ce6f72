"""A binary code defined by its checks: a lost shard is the XOR of the others in a check.

A code file has the checks as lists of shard numbers, data 0 … k−1 first; ``python -m
planaria.lab.commands.codes`` searches and writes such codes. Reading a file recounts its distance.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.recovery.codes import gf2
from planaria.recovery.codes.base import CodeFamily, ErasureCode, require_valid_sizes
from planaria.recovery.codes.field import Bytes, solve_in_columns

MAX_DATA = 16
"""maximum data shards k of a code file, whose 2ᵏ words are all counted"""
MAX_SHARDS = 64
"""maximum shards of a code file: bits of a word"""
MAX_FILE_BYTES = 1 << 20


class CodeFile(documents.Record):
    """The contents of a code file."""

    shards: int = Field(ge=2, le=MAX_SHARDS)
    distance: int = Field(ge=1, le=MAX_SHARDS)
    """fewest lost shards that may be unrecoverable"""
    checks: tuple[tuple[int, ...], ...] = Field(min_length=1, max_length=MAX_SHARDS - 1)


class SparseCode(CodeFamily):
    """A code by its checks, for the group size that they are made for."""

    file: CodeFile
    location: str = "recovery.options.code"
    """origin of the checks, for messages"""

    def code(self, members: int, tolerate: int) -> ErasureCode:
        require_valid_sizes(members, tolerate)
        shards = self.file.shards
        if shards != members:
            raise UserError(
                f"{self.location}: a code of {shards} shards for a group of {members}; use one of {members}"
            )
        built = from_checks(self.file.checks, shards, self.location)
        if (distance := weights(built)[1]) != self.file.distance:
            raise UserError(
                f"{self.location}: distance = {self.file.distance}, but it is {distance}; create the file again"
            )
        if distance <= tolerate:
            raise UserError(f"{self.location}: survives any {distance - 1} losses, not tolerate = {tolerate}; lower it")
        return built


def parse_code(text: str) -> CodeFile:
    """Return the contents of a code file that a recipe embeds; UserError if they are invalid."""
    try:
        return CodeFile.model_validate_json(text)
    except ValidationError as error:
        raise UserError(
            f"recovery.options.code: not the contents of a code file ({documents.first_error(error)})"
        ) from None


def read_code(path: Path) -> CodeFile:
    """Return the contents of a code file; UserError if it cannot be read."""
    return documents.read_model(path, CodeFile, MAX_FILE_BYTES, "make one with `python -m planaria.lab.commands.codes`")


def from_checks(rows: tuple[tuple[int, ...], ...], shards: int, location: object) -> ErasureCode:
    """Return the binary code with these sets of shards as checks.

    :raises UserError: naming ``location``, if they do not determine a code with the data first.
    """
    for n, row in enumerate(rows):
        if len(row) < 2 or len(set(row)) < len(row) or not all(0 <= shard < shards for shard in row):
            raise UserError(f"{location}: check {n} must list two or more shards from 0 to {shards - 1}, each once")
    data = shards - len(rows)
    if not 1 <= data <= MAX_DATA:
        raise UserError(f"{location}: {len(rows)} checks of {shards} shards leave {data} for data; use 1 to {MAX_DATA}")
    matrix = np.zeros((len(rows), shards), np.uint8)
    for n, row in enumerate(rows):
        matrix[n, list(row)] = 1
    parities = solve_in_columns(matrix[:, data:], matrix[:, :data])
    if parities is None or not _full(matrix[:, data:]):
        raise UserError(f"{location}: the last {len(rows)} shards are not determined by the others; renumber them")
    return ErasureCode(np.ascontiguousarray(parities.T), tuple(frozenset(row) for row in rows))


def _full(matrix: Bytes) -> bool:
    return solve_in_columns(matrix, np.eye(len(matrix), dtype=np.uint8)) is not None


def weights(code: ErasureCode) -> tuple[NDArray[np.int64], int]:
    """Return the number of words of each weight [0 … n], all 2ᵏ counted, and the distance: the minimum weight above
    0."""
    words = [sum(1 << n for n in np.flatnonzero(row).tolist()) for row in code.generator]
    return gf2.weights(words, code.shards), gf2.distance(words, code.shards)
