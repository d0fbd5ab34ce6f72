"""Which steps' spans are kept: what the report draws, and of all other steps a sample that grows ever thinner."""

from __future__ import annotations

from planaria.control.events import Worked

EVERY, THINNED_FROM = 20, 1000
"""of the first thousand steps, and of the next, every 20th; of twice as many, every 40th, and so on: fifty each time"""
AFTER_FORMING = 2
"""steps after a formation that are kept as well: recoveries are timed and drawn by them"""
TOGETHER = 100
"""steps of which a worker's bytes are written down in one sum; so many a killed controller forgets"""


def every(step: int) -> int:
    """Of the steps around ``step``, every how manieth keeps its spans."""
    return EVERY << max(0, (step // THINNED_FROM).bit_length() - 1)


class Sample:
    """Thins what workers did. No byte that was sent is lost: those of steps without spans are added up. No peak is."""

    def __init__(self) -> None:
        self._formed: dict[int, int] = {}
        """replica → its step when it was last formed"""
        self._sums: dict[int, tuple[float, Worked]] = {}
        """node → what is not written down yet, as of its last step"""

    def form(self, replica: int, step: int) -> None:
        """The replica is formed anew, and goes on from ``step``."""
        self._formed[replica] = step

    def take(self, t: float, worked: Worked, replica: int) -> list[tuple[float, Worked]]:
        """What is to be written down now, with its times: spans of steps that are kept, sums of bytes of the others."""
        since = worked.step - self._formed.get(replica, 0)
        if worked.dropped or since <= AFTER_FORMING or worked.step % every(worked.step) == 0:
            before = self._sums.pop(worked.node, None)
            return [*([before] if before else []), (t, worked)]
        before = self._sums.get(worked.node)
        bare = worked.model_copy(update={"spans": []})
        if before is None or not _together(before[1], worked):
            self._sums[worked.node] = t, bare
            return [before] if before else []
        self._sums[worked.node] = t, bare.model_copy(update=_sum(before[1], worked))
        return []

    def rest(self) -> list[tuple[float, Worked]]:
        """What is left to be written down at the end."""
        left = list(self._sums.values())
        self._sums.clear()
        return left


def _sum(one: Worked, other: Worked) -> dict[str, object]:
    """What both sent, by the other end; and the most memory of both."""
    sent = {
        peer: one.sent_bytes.get(peer, 0) + other.sent_bytes.get(peer, 0) for peer in one.sent_bytes | other.sent_bytes
    }
    most = {name: max(getattr(one, name), getattr(other, name)) for name in ("peak_bytes", "device_peak_bytes")}
    return {"sent_bytes": sent, **most}


def _together(one: Worked, other: Worked) -> bool:
    """Did the same worker do both, in the same generation and hundred of steps?"""
    return (one.worker, one.generation, one.step // TOGETHER) == (
        other.worker,
        other.generation,
        other.step // TOGETHER,
    )
