"""A swarm's run in words and two numbers: did collaborating help the honest peers, and what was lost to attackers."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.report.verdict import Verdict
from planaria.report.words import counted, listed
from planaria.swarm.records.outcome import ALL, LayerOutcome, Outcome, PeerOutcome


def verdict(outcome: Outcome, last: int) -> Verdict:
    """Good: all peers finished, and no honest peer is worse off than alone, or than it began.

    A peer is better or worse off where Wilson's 95 % intervals of its last evaluations do not overlap.
    """
    honest = [peer for peer in outcome.honest if peer.points]
    stopped = [peer.name for peer in outcome.peers if not peer.finished]
    shadowed = [peer for peer in honest if peer.last(last).alone is not None]
    signs = [_better(peer, last) for peer in (shadowed or honest)]
    worse = signs.count(-1)
    good = False if stopped or worse else None if not signs or not any(signs) else True
    return Verdict(
        good,
        _badge(stopped, signs),
        _said(outcome, last, signs, shadowed),
        _numbers(outcome, honest, shadowed, last),
        _lost(outcome, stopped),
    )


def _better(peer: PeerOutcome, last: int) -> int:
    """1: better off, −1: worse, 0: counting does not tell."""
    now = peer.last(last)
    mine, theirs = now.accuracy.interval, (now.alone or peer.points[0].accuracy).interval
    return (mine[0] > theirs[1]) - (mine[1] < theirs[0])


def _badge(stopped: Sequence[str], signs: Sequence[int]) -> str:
    if stopped:
        return f"{counted(len(stopped), 'peer')} did not finish"
    if -1 in signs:
        return f"{signs.count(-1)} of {counted(len(signs), 'peer')} worse off"
    return f"{signs.count(1)} of {counted(len(signs), 'peer')} better off" if any(signs) else "no clear difference"


def _said(outcome: Outcome, last: int, signs: Sequence[int], shadowed: Sequence[PeerOutcome]) -> str:
    attackers = sum(not peer.honest for peer in outcome.peers)
    among = f", {counted(attackers, 'attacker')} among them" if attackers else ""
    said = f"{counted(len(outcome.peers), 'peer')}{among}, learned for {counted(outcome.rounds, 'round')}."
    if not signs:
        return f"{said} No honest peer has been evaluated yet."
    than = "than alone" if shadowed else "than at the start"
    whose = f"Of {counted(len(signs), 'honest peer')}"
    said += f" {whose}, {signs.count(1)} clearly solved more {than}, {signs.count(-1)} clearly less."
    said += _fallen(outcome, last)
    return said if shadowed else f"{said} None learned alone beside it (shadow = true), so what caused that is unknown."


def _fallen(outcome: Outcome, last: int) -> str:
    """Return a sentence if the honest peers solve fewer problems than at the start."""
    starts = [peer.points[0].accuracy.rate or 0.0 for peer in outcome.honest if peer.points]
    before, now = sum(starts) / len(starts), outcome.accuracy(last)
    return f" Accuracy fell: {before:.2f} at the start, {now:.2f} in the end." if now < before else ""


def _numbers(
    outcome: Outcome, honest: Sequence[PeerOutcome], shadowed: Sequence[PeerOutcome], last: int
) -> list[tuple[str, str]]:
    if not honest:
        return []
    gains = []
    for peer in shadowed or honest:
        now = peer.last(last)
        before = (now.alone or peer.points[0].accuracy).rate
        if now.accuracy.rate is not None and before is not None:
            gains.append(now.accuracy.rate - before)
    numbers = [(f"{outcome.accuracy(last):.2f}", "of held-out problems solved, honest peers' mean")]
    if gains:
        over = "learning alone" if shadowed else "the start"
        between = f"; {min(gains):+.2f} to {max(gains):+.2f}" if len(gains) > 1 else ""
        numbers.insert(0, (f"{sum(gains) / len(gains):+.2f}", f"of problems solved, over {over}{between}"))
    return numbers


def _lost(outcome: Outcome, stopped: Sequence[str]) -> str:
    parts = [f"{listed(list(stopped))} did not finish"] if stopped else []
    found = outcome.layers.get(ALL, LayerOutcome())
    let, refused = found.stopped.eligible - found.stopped.hits, found.misjudged
    if found.stopped.eligible:
        parts.append(f"{let:,} of {counted(found.stopped.eligible, 'poisoned completion')} were let through")
    if refused.hits:
        parts.append(f"{refused.hits:,} of {counted(refused.eligible, 'completion')} of honest peers were refused")
    rounds = {layer: sum(one.off.values()) for layer, one in outcome.layers.items() if one.off}
    if rounds:
        whole = counted(outcome.rounds * len(outcome.honest), "round")
        off = listed([f"{layer} in {count:,}" for layer, count in rounds.items()])
        parts.append(f"layers switched themselves off, of {whole} over all honest peers: {off}")
    nothing = "Nothing was lost: no poison is known, and no honest work was refused."
    return f"Lost: {'; '.join(parts)}." if parts else nothing
