"""Encode a long text in windows, with the same ids as in one call.

Windows overlap. Near its edges a window's tokens may differ from those of the whole text: SentencePiece prepends a
space, a pattern looks ahead, a byte pair is cut. Elsewhere they are equal, so two windows are joined within a stretch
in which their tokens agree. A window is enlarged until there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tokenizers

from planaria.common.errors import UserError

Encode = Callable[[str], tokenizers.Encoding]
MARGIN = 2048
"""characters near a window's edge in which its tokens are not used"""
AGREED = 256
"""characters in which the tokens of two windows must agree"""
TRIES = 8
"""places at which the next window may begin"""
MAX_WINDOW_CHARS = 1 << 24
"""maximum characters of a window"""


@dataclass(frozen=True)
class _Window:
    """Tokens of ``text[start:stop]``."""

    start: int
    stop: int
    ids: list[int]
    offsets: list[tuple[int, int]]

    def token(self, number: int) -> tuple[int, int, int]:
        """Return the id, first character, and end character of a token in the whole text."""
        begin, end = self.offsets[number]
        return self.ids[number], self.start + begin, self.start + end

    def within(self, low: int, high: int) -> range:
        """Return the numbers of the tokens that begin at characters ``low`` .. ``high - 1``."""
        numbers = [n for n, (begin, _) in enumerate(self.offsets) if low <= self.start + begin < high]
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def encode_in_windows(encode: Encode, text: str, size: int) -> Iterator[list[int]]:
    """Yield the ids of ``text`` in parts; windows have ``size`` characters, or more where necessary.

    :raises UserError: if :data:`MAX_WINDOW_CHARS` characters are too few.
    """
    window = _window(encode, text, 0, size)
    skipped = 0
    wanted = size
    while window.stop < len(text):
        if (continuation := _next(encode, text, window, size)) is None:
            wanted *= 2
            if wanted > max(MAX_WINDOW_CHARS, size):
                raise UserError(
                    f"a text has {wanted // 2} characters from character {window.start} on that can only be tokenised "
                    "together; break it into lines"
                )
            window = _window(encode, text, window.start, wanted)
            continue
        following, joint, resumed = continuation
        yield window.ids[skipped:joint]
        window = following
        skipped = resumed
        wanted = size
    yield window.ids[skipped:]


def _window(encode: Encode, text: str, start: int, size: int) -> _Window:
    encoding = encode(text[start : start + size])
    return _Window(start, min(start + size, len(text)), encoding.ids, encoding.offsets)


def _next(encode: Encode, text: str, before: _Window, size: int) -> tuple[_Window, int, int] | None:
    """Return the window after ``before``, and the number of the first token after the joint in each, or None
    without a joint."""
    candidates = before.within(before.stop - 4 * MARGIN, before.stop - 2 * MARGIN)
    if not candidates:
        return None
    first = before.token(candidates[0])[1]
    for start in range(first, first + TRIES):
        after = _window(encode, text, start, max(size, 8 * MARGIN))
        if (joint := _joint(before, after)) is not None:
            return after, *joint
    return None


def _joint(before: _Window, after: _Window) -> tuple[int, int] | None:
    """Return the middle of the first stretch of :data:`AGREED` characters in which the tokens of two windows agree."""
    low, high = after.start + MARGIN, before.stop - MARGIN
    positions = {after.token(number): number for number in after.within(low, high)}
    begun, count = 0, 0
    for number in before.within(low, high):
        token = before.token(number)
        if count and positions.get(token) == positions[before.token(begun)] + count:
            count += 1
        else:
            begun, count = number, int(token in positions)
        if count and token[2] - before.token(begun)[1] >= AGREED:
            middle = begun + count // 2
            return middle, positions[before.token(middle)]
    return None
