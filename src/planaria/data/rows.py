"""Rows of dialogues: samples of equal length, each with whole dialogues or one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planaria.data.dataset import LEARNED, START
from planaria.data.dialogues import Dialogue

OPEN = 256
"""rows that may still take a dialogue; more take more memory and hardly fewer rows"""
Row = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]
"""ids and marks"""


@dataclass
class DialogueCounts:
    """Numbers of dialogues that were used, cut or skipped, and of their tokens."""

    taken: int = 0
    longer: int = 0
    """dialogues that were cut at a row's length"""
    silent: int = 0
    """dialogues without a learned token, which were skipped"""
    beyond: int = 0
    """dialogues of ``silent`` that have a learned token beyond a row's length"""
    tokens: int = 0
    learned: int = 0


def learnable_dialogues(dialogues: Iterable[Dialogue], length: int, count: DialogueCounts) -> Iterator[Dialogue]:
    """Yield the dialogues that can be learned from, cut to ``length`` tokens.

    The first token is never a target, because nothing precedes it.
    """
    for dialogue in dialogues:
        ids, learned = dialogue.ids[:length], dialogue.learned[:length].copy()
        learned[:1] = False
        if not learned.any():
            count.silent += 1
            count.beyond += bool(dialogue.learned[1:].any())
            continue
        count.taken += 1
        count.longer += len(dialogue.ids) > length
        count.tokens += len(ids)
        count.learned += int(learned.sum())
        yield Dialogue(ids, learned)


def split(dialogues: Iterable[Dialogue], share: float) -> Iterator[tuple[bool, Dialogue]]:
    """Yield (is_validation, dialogue); validation gets at most ``share`` of the tokens so far."""
    total = validation_tokens = 0
    for dialogue in dialogues:
        total += len(dialogue.ids)
        is_validation = validation_tokens + len(dialogue.ids) <= total * share
        validation_tokens += len(dialogue.ids) if is_validation else 0
        yield is_validation, dialogue


@dataclass
class Packer:
    """Fills rows of ``length`` tokens by best fit: a dialogue goes into the row that it leaves least space in."""

    length: int
    together: bool
    """whether a row may have several dialogues"""
    _open: list[tuple[int, list[Dialogue]]] = field(default_factory=list)
    """free tokens and content of each row"""

    def add(self, dialogue: Dialogue) -> Sequence[Dialogue]:
        """Place a dialogue of at most ``length`` tokens; return the content of a row that is complete, or nothing."""
        size = len(dialogue.ids)
        if not self.together:
            return [dialogue]
        fits = [n for n, (free, _) in enumerate(self._open) if free >= size]
        free, content = self._open.pop(min(fits, key=lambda n: self._open[n][0])) if fits else (self.length, [])
        self._open.append((free - size, [*content, dialogue]))
        if free - size < 2:  # no dialogue with a target is that short
            return self._open.pop()[1]
        if len(self._open) > OPEN:
            return self._open.pop(min(range(len(self._open)), key=lambda n: self._open[n][0]))[1]
        return []

    def rest(self) -> Iterator[Sequence[Dialogue]]:
        """Yield the content of the incomplete rows."""
        for _, content in self._open:
            yield content


def pad_row(content: Sequence[Dialogue], length: int, padding: int) -> Row:
    """Return a row with these dialogues, and the id ``padding`` behind them as one more document."""
    ids, marks = np.full(length, padding, np.uint32), np.zeros(length, np.uint8)
    at = 0
    for dialogue in content:
        end = at + len(dialogue.ids)
        ids[at:end], marks[at:end] = dialogue.ids, np.where(dialogue.learned, LEARNED, 0)
        marks[at] |= START
        at = end
    marks[at : at + 1] |= START
    return ids, marks
