"""Records of a peer with defaults for fields that a test does not care about."""

from __future__ import annotations

from typing import Any

from planaria.swarm.records.lines import PeerStarted, RoundDone


def started(name: str, id: str = "", attack: str = "none", **changes: Any) -> PeerStarted:
    fields: dict[str, Any] = {"model": "tiny", "parameters": 1, "vocab": 257, "first_round": 0}
    return PeerStarted(name=name, id=id or name, attack=attack, **fields | changes)


def round_done(number: int, **changes: Any) -> RoundDone:
    tables = ("seconds", "sent", "accepted", "rejected_unread", "rejected_messages", "layers", "off", "quarantined")
    fields: dict[str, Any] = {name: {} for name in (*tables, "influence", "stats")}
    fields |= dict.fromkeys(("training_completions", "skipped", "reward", "loss", "grad_norm"), 0)
    return RoundDone.model_validate({"round": number, "missing": [], "weights": ""} | fields | changes)
