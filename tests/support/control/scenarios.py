"""Single scenarios of the controller: a small fleet at work."""

from __future__ import annotations

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from support.control.simulated_fleet import SimulatedFleet

STAGES = 4


def fleet(**changed: object) -> SimulatedFleet:
    plain: dict[str, object] = {
        "name": "run", "seed": 1, "stages": STAGES, "steps": 6, "first_step": 0, "samples_per_step": 8,
        "wall_time": 0.0, "spares": 1, "extra_edges": [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)],
    }  # fmt: skip
    return SimulatedFleet(e.RunStarted.model_validate(plain | changed))


def work_until(simulation: SimulatedFleet, phase: str, step: int) -> None:
    """Let workers work until the controller waits for reports of ``phase`` at ``step``."""
    for turn in range(1000):
        if (simulation.state.phase, simulation.state.step) == (phase, step):
            return
        simulation.work(simulation.pending()[turn % len(simulation.pending())])
    raise AssertionError(f"never in {phase} at step {step}")


def last(simulation: SimulatedFleet, kind: type[d.Form]) -> d.Form:
    return next(fact for fact in reversed(simulation.history) if isinstance(fact, kind))


def decision_kinds(simulation: SimulatedFleet) -> list[str]:
    """Decisions by name; consecutive ones of the same name once."""
    names = [fact.kind for fact in simulation.history if isinstance(fact, d.Fact) and not isinstance(fact, EVENTS)]  # type: ignore[attr-defined]
    return [name for n, name in enumerate(names) if not n or names[n - 1] != name]


EVENTS = e.Event.__args__[0].__args__  # type: ignore[attr-defined]


def seals(simulation: SimulatedFleet) -> list[int]:
    return [fact.step for fact in simulation.history if isinstance(fact, d.Seal)]
