"""Read an untrusted HTTP request body, with bounds on size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable


async def read_body(stream: AsyncIterable[bytes], max_bytes: int, within_s: float) -> bytes | None:
    """Read the stream to its end; return None if it exceeds ``max_bytes`` bytes or ``within_s`` seconds."""
    body = b""
    try:
        async with asyncio.timeout(within_s):
            async for chunk in stream:
                body += chunk
                if len(body) > max_bytes:
                    return None
    except TimeoutError:
        return None
    return body
