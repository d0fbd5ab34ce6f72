"""Every set of one, two (and, with m = 3, three) stages of seven is killed in a live fleet, one set after the other.

The ends, neighbours, and the hosts of each other's parities are among them. All that is lost comes back from what the
others remember: in step with training, no step is lost; with retained snapshots, all go back and make the steps since
again. Either way weights, moments, clocks and generators are at the end those of a run that lost nothing, byte for
byte. With m > 1, one is killed while it gives to another that is being rebuilt.
"""

from __future__ import annotations

import hashlib
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Claim, Row, conclude, parser
from benchmarks.fleet_run import VOCAB, bytes_data, ending, require_finished, run_fleet
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from planaria.faults.trace import Fault

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord

NAME, STAGES = "lost_sets", 6
APART = 4
"""steps from one set to the next"""


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--tolerate", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--most", type=int, default=1000, help="sets of each kind, for a short look")
    given = flags.parse_args()
    rows = []
    for tolerate in given.tolerate:
        for every in (0, 2):
            rows += _rows(tolerate, every, given.most)
    return conclude(NAME, given, rows, ["Weights, moments, clocks and generators of all seven stages are compared."])


def _rows(tolerate: int, every: int, most: int) -> list[Row]:
    """One run that loses set after set, beside one that loses nothing."""
    members = range(STAGES + 1)
    sets = [lost for size in range(1, tolerate + 1) for lost in list(combinations(members, size))[:most]]
    moments = ("forward", "backward", "commit", "any")
    faults = [
        Fault(step=APART * (number + 1), stage=stage, moment=moments[number % len(moments)])  # type: ignore[arg-type]
        for number, lost in enumerate(sets)
        for stage in lost
    ]
    if tolerate > 1:  # a donor dies while it gives: one more is lost than was
        extra = APART * (len(sets) + 1)
        gives = Fault(step=extra - every, stage=4, moment="transfer")  # in the step to which all have gone back
        faults += [Fault(step=extra, stage=2, moment="forward"), gives]
    steps = APART * (len(sets) + 3)
    how = "in step" if not every else f"retained, every {every}"
    struck = run_fleet(_recipe(tolerate, every, steps, f"m{tolerate}-{every}"), tuple(faults))
    untroubled = run_fleet(_recipe(tolerate, every, steps, f"m{tolerate}-{every}-none"))
    require_finished(untroubled)
    ended = ending(struck) == "finished"
    alike = [float(ended and one == other) for one, other in zip(_shas(struck), _shas(untroubled), strict=True)]
    beside: dict[str, float | int | str] = {"m": tolerate, "mode": how, "sets": len(sets), "ended": ending(struck)}
    forms = [fact.outcome for _, fact in struck.history if getattr(fact, "kind", "") == "form"]
    odd = sum(outcome in ("rolled back", "skipping") for outcome in forms)
    killed = sum(getattr(fact, "kind", "") == "fault_injected" for _, fact in struck.history)
    return [
        Row("stages as if nothing had been lost", alike or [0.0], "7 of 7, byte for byte", Claim(low=1.0), beside),
        Row("workers killed", [float(killed)], f"{len(faults)} in the trace", Claim(low=float(len(faults))), beside),
        Row("generations that went to the disk", [float(odd)], "0", Claim(high=0.0), beside),
    ]


def _recipe(tolerate: int, every: int, steps: int, name: str) -> RunConfig:
    return RunConfig(
        name=f"{NAME}-{name}",
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=32, layers=STAGES, heads=2, hidden=64, context=32),
        pipeline=PipelineConfig(stages=STAGES, microbatches=4, microbatch_size=1),
        data=bytes_data(),
        train=TrainConfig(steps=steps, eval_every=0),
        fleet=FleetConfig(spares=tolerate),
        checkpoint=CheckpointConfig(every=0),
        recovery=RecoveryConfig(strategy="snapshot", options=Options({"tolerate": tolerate, "every": every})),
    )


def _shas(record: RunRecord) -> list[str]:
    """A digest of each stage's weights, moments, clocks and generators at the end; none where there is no end."""
    from planaria.models.packing import pack
    from planaria.runtime.checkpoint.stage_file import read_stage
    from planaria.runtime.checkpoint.store import CheckpointStore

    saved = CheckpointStore(Path(record.folder) / "checkpoints").newest(whole_only=True)
    if saved is None:
        return [""] * (STAGES + 1)
    states = [read_stage(saved.folder, stage, saved.step) for stage in range(STAGES + 1)]
    return [hashlib.sha256(pack(state).numpy().tobytes()).hexdigest() for state in states]


if __name__ == "__main__":
    raise SystemExit(main())
