"""The body of an HTTP request from anybody: bounded in size, and in the time that it may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable


async def read_body(stream: AsyncIterable[bytes], most: int, within_s: float) -> bytes | None:
    """What the stream brings until it ends; None when that is more than ``most`` bytes, or not over in time."""
    body = b""
    try:
        async with asyncio.timeout(within_s):
            async for part in stream:
                body += part
                if len(body) > most:
                    return None
    except TimeoutError:
        return None
    return body
