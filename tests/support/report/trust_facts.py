"""Facts of a run whose replicas weigh each other's updates."""

from __future__ import annotations

from pathlib import Path

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord


def counted(round: int, stage: int, of: dict[int, float]) -> e.UpdatesWeighted:
    return e.UpdatesWeighted(worker=f"w{stage}", node=stage, stage=stage, generation=1, round=round, counted=of)


def compared(round: int, of: dict[int, float], rivals: dict[str, dict[int, float]]) -> e.UpdatesWeighted:
    return counted(round, 0, of).model_copy(update={"rivals": rivals})


def refused(round: int, node: int, replica: int, reason: str, stage: int = 1) -> e.UpdateRejected:
    return e.UpdateRejected(
        worker=f"w{node}", node=node, stage=stage, generation=1, round=round, replica=replica, reason=reason
    )


def record(*facts: e.Event, replicas: int = 3, robust: str | Options = "") -> RunRecord:
    robust = robust or ("krum" if replicas > 4 else "median")
    config = RunConfig(exchange=ExchangeConfig(replicas=replicas, robust=robust))
    return RunRecord(Path("x"), config, [(float(t), fact) for t, fact in enumerate(facts)], [], [])


SHORT, NAN = "its blocking part: torch.float32 [3], not torch.float32 [4]", "its blocking part: <not> finite"

FACTS = (
    counted(0, 0, {0: 0.5, 1: 0.5, 2: 0.0}), counted(0, 1, {0: 0.5, 1: 0.0, 2: 0.5}),
    counted(1, 0, {0: 0.4, 1: 0.6}), refused(1, 0, 2, NAN, 0), refused(1, 2, 2, NAN, 0),
    refused(3, 1, 2, SHORT), refused(4, 1, 2, SHORT), refused(4, 3, 2, SHORT),
)  # fmt: skip
