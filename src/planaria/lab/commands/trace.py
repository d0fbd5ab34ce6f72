"""``python -m planaria.lab.commands.trace``: generate a trace of faults from a failure rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from planaria.cli.entry import program
from planaria.cli.flags import Seed, flag, switch
from planaria.config.durations import seconds
from planaria.faults.trace import burst_sizes, digest, write
from planaria.faults.trace_generation import generate

Loss = Literal["stage", "adjacent", "machine", "region"]


def trace(
    file: Annotated[Path, Argument(metavar="FILE", help="file to write: chaos.trace = FILE")],
    *,
    hourly: Annotated[float, flag("P", "probability that a stage fails within an hour")],
    step_seconds: Annotated[float, flag("S", "duration of one step in seconds", parser=seconds)],
    stages: Annotated[int, flag("N", "stages of the run")],
    steps: Annotated[int, flag("N", "steps of the run")],
    seed: Seed = 0,
    exempt: Annotated[list[int] | None, flag("STAGE", "a stage that never fails; can be repeated")] = None,
    forbid_adjacent: Annotated[bool, switch("--forbid-adjacent", "never two adjacent stages in the same step")] = False,
    ends: Annotated[bool, switch("--ends", "the ends fail at the same rate")] = False,
    adjacent_probability: Annotated[float, flag("P", "probability that a failure also takes the next stage")] = 0.0,
    failure_domain: Annotated[Loss, Option(help="stages that one fault takes")] = "stage",
    machine: Annotated[int, flag("N", "stages in a row that share a machine")] = 2,
) -> int:
    """Generate a trace of faults from a failure rate."""
    exempt_stages = set(exempt or [])
    generated = generate(
        seed,
        hourly,
        step_seconds,
        stages,
        steps,
        exempt_stages,
        forbid_adjacent,
        ends,
        adjacent_probability,
        failure_domain,
        machine,
    )
    write(generated, file)
    bursts = "".join(
        f", {count} × {size} together" for size, count in sorted(burst_sizes(generated).items()) if size > 1
    )
    print(f"{file}: {len(generated.faults)} faults{bursts}, digest {digest(generated)[:16]}")
    return 0


if __name__ == "__main__":
    program(trace, "planaria.lab.commands.trace")
