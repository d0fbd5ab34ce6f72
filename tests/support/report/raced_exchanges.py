"""A comparison of exchanges with invented losses."""

from __future__ import annotations

from planaria.lab.compare.race_results import ComparisonResults
from support.report.synthetic_comparison import Manner, compared

STEP_BYTES = {"fault-free": 8e6, "rare": 1e6, "muon": 8e6, "muon-rare": 1e6, "local": 0.0}


def raced_exchanges() -> ComparisonResults:
    """Return a comparison of arms with and without an exchange, of two optimizers."""
    manners = {
        "fault-free": Manner({}, faults=False, step_s=40.0),
        "rare": Manner({"exchange.kind": "diloco", "optim.lr": "0.004"}, faults=False, slower=1.3, step_s=25.0),
        "muon": Manner({"optim.kind": "muon", "optim.lr": "0.002"}, faults=False, slower=0.8, step_s=40.0),
        "muon-rare": Manner({"optim.kind": "muon", "exchange.kind": "diloco"}, faults=False, step_s=25.0),
        "local": Manner({"exchange.kind": "local"}, faults=False, slower=3.0, step_s=20.0),
    }
    found = compared(manners)
    arms = [a.model_copy(update={"step_bytes": STEP_BYTES[a.name], "traffic_per_weight_byte": 0.1}) for a in found.arms]
    return found.model_copy(update={"arms": arms})
