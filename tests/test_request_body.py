"""Bounded request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from planaria.common.request_body import read_body


async def parts(*some: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for part in some:
        await asyncio.sleep(pause_s)
        yield part


@pytest.mark.parametrize(("most", "read"), [(4, b"abcd"), (3, None), (0, None)])
def test_a_body_is_read_or_too_large(most: int, read: bytes | None) -> None:
    assert asyncio.run(read_body(parts(b"ab", b"", b"cd"), most, 10.0)) == read


def test_a_slow_body_is_none() -> None:
    assert asyncio.run(read_body(parts(b"a", b"b", pause_s=5.0), 10, 0.05)) is None
