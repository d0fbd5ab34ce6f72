"""The table that is printed before a run: its stages, their predicted memory and traffic, and the run's duration.

Memory is predicted in ``memory.py``, from ``models/activations.py`` and ``models/transformers/stage_costs.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planaria.common.stdio import Notify
from planaria.config import durations
from planaria.config.schema import RunConfig
from planaria.models.families import stage_parameters, trained_parameters
from planaria.models.llama_stages import stage_layers
from planaria.pipeline.network.costs import Costs, message_bytes
from planaria.runtime.fleet.devices import NO_INVENTORY, Inventory, free_memory
from planaria.runtime.prediction.memory import (
    DoesNotFit,
    StageMemory,
    combined_peak,
    devices_of,
    fit_to_this_machine,
    homes_of,
    own_workers,
    predicted_peaks,
)
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.prediction.traffic import exchange_costs, link_bytes, one_replica
from planaria.runtime.preparation.requirements import stage_state_bytes
from planaria.runtime.resolved_run import ResolvedRun

MAX_ROWS = 12
"""lines about stages; if there are more, those in the middle share one"""
HEAD = ["stage", "layers", "parameters", "trained", "memory", "= state", "+ in flight", "+ passes", "+ process", "sent"]


class StageRow(NamedTuple):
    """A stage before a run; bytes."""

    stage: int
    layers: range
    parameters: int
    trained: int
    state: int
    """weights, gradients and moments"""
    memory: StageMemory | None
    """None: unknown, but not less than ``state``"""
    sent: int
    """activations and their gradients that its worker sends to other stages in a step"""
    exchanged: float
    """mean bytes that its worker sends to other replicas in a round of their exchange"""


def stage_rows(run: ResolvedRun, devices: Inventory = NO_INVENTORY) -> list[StageRow]:
    """Return the stages of a run; ``devices``: its CUDA devices, if they are known."""
    config, stages = run.config, run.config.pipeline.stages
    model, memory = config.model, predicted_peaks(config, devices)
    states, sent, costs = stage_state_bytes(config), _bytes_sent(config), exchange_costs(config)
    rows = []
    for stage in range(stages + 1):
        count = stage_parameters(model, stages, stage)
        trained, layers = trained_parameters(model, stages, stage), stage_layers(model, stages, stage)
        exchanged = costs[stage].total if costs and trained else 0.0
        stage_memory = memory[stage] if memory else None
        rows.append(StageRow(stage, layers, count, trained, states[stage], stage_memory, sent[stage], exchanged))
    return rows


def _bytes_sent(config: RunConfig) -> Counter[int]:
    arrangement, sent_bytes = ResolvedRun(one_replica(config)).arrangement, Counter[int]()
    for (source, _), nbytes in link_bytes(config).items():
        sent_bytes[arrangement.stage[source]] += nbytes
    return Counter({stage: nbytes // len(arrangement.nodes(stage)) for stage, nbytes in sent_bytes.items()})


def fit_or_show(config: RunConfig, notify: Notify | None) -> tuple[RunConfig, str]:
    """Return :func:`fit_to_this_machine`; first send the table of a run that does not fit to ``notify``.

    :raises DoesNotFit: if the settings do not fit.
    """
    try:
        return fit_to_this_machine(config)
    except DoesNotFit as error:
        if notify is not None:
            for line in table(error.config):
                notify(line)
        raise


def table(config: RunConfig, done: int = 0, step_s: float | None = None) -> list[str]:
    """Return the lines about a checked run, to print before it starts.

    :param done: steps that an earlier part of the run has made
    :param step_s: seconds of a step as measured in that part
    """
    run, devices = ResolvedRun(config), devices_of(config)
    rows = stage_rows(run, devices)
    time = _time(run, config.train.steps - done, step_s)
    return [*stage_lines(rows), *_machine_lines(config, rows, devices), _traffic(run, rows), time]


def stage_lines(rows: Sequence[StageRow]) -> list[str]:
    """Return a heading and at most :data:`MAX_ROWS` aligned lines."""
    columns = len(HEAD) + any(row.exchanged for row in rows)
    first = len(rows) if len(rows) <= MAX_ROWS else MAX_ROWS - 2
    groups = [*([row] for row in rows[:first]), *filter(None, (rows[first:-1], rows[max(first, len(rows) - 1) :]))]
    lines = [[*HEAD, "exchanged"][:columns], *(_cells(group)[:columns] for group in groups)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) if n > 1 else cell.ljust(width) for n, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]


def _cells(group: Sequence[StageRow]) -> list[str]:
    """Return the cells of one stage, or of the largest of several."""
    row, last = max(group, key=lambda memory: memory.memory.peak if memory.memory else memory.state), group[-1]
    layers = range(group[0].layers.start, last.layers.stop)
    layer_numbers = f"{layers.start}–{layers.stop - 1}" if len(layers) > 1 else str(layers.start) if layers else "–"
    parts = [f"> {size(row.state)}", size(row.state), "?", "?", "?"]
    if row.memory is not None:
        memory = row.memory
        rest = memory.peak - memory.state - memory.kept - memory.working
        parts = [size(nbytes) for nbytes in (memory.peak, memory.state, memory.kept, memory.working, rest)]
    name = str(row.stage) if row.stage else "ends"
    if len(group) > 1:
        name, parts[0] = f"{group[0].stage}–{last.stage}", f"≤ {parts[0]}"
    counts = (millions(row.parameters), millions(row.trained))
    return [name, layer_numbers, *counts, *parts, size(row.sent), size(row.exchanged)]


def size(nbytes: float) -> str:
    """Return bytes with two or three digits.

    >>> size(4.2e9), size(227e9), size(0), size(12_345)
    ('4.20 GB', '227 GB', '0', '0.01 MB')
    """
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:#.3g} GB".replace(". ", " ")
    return f"{nbytes / 1e6:.{0 if nbytes >= 1e7 else 2}f} MB" if nbytes else "0"


def millions(count: int) -> str:
    """Return a number of parameters.

    >>> millions(4_022_468_096), millions(81_000)
    ('4,022.5 M', '0.081 M')
    """
    return f"{count / 1e6:,.{1 if count >= 1e6 else 3}f} M"


def _machine_lines(config: RunConfig, rows: Sequence[StageRow], devices: Inventory) -> Iterator[str]:
    """Yield the predicted and the available memory of each device."""
    memory = [row.memory for row in rows if row.memory is not None]
    here = own_workers(config)
    crowd = 1 if config.engine == "inline" else here
    free = " free" if config.train.device == "cpu" else ""
    positions = [(f"device {d.name}", homes_of(devices, crowd).get(d.name, 0), d.memory) for d in devices.devices]
    if config.train.device == "cpu":
        positions = [("this machine", crowd, free_memory())]
    for location, workers, room in positions if memory else ():
        of = f" of {size(room)}{free}" if 0 < room < 1 << 60 else ""
        peak = size(combined_peak(config, memory, workers))
        yield f"memory        {location}: {_pluralise(workers)}, about {peak}{of}"
    if not memory and config.train.device == "cuda" and not devices.devices:
        yield f"memory        not predicted: no device is known here ({devices.lacks or 'other machines have them'})"
    elif not memory:
        yield "memory        activations are not predicted: the family gives no formula, or passes are emulated"
    wanted = (config.pipeline.stages + 1) * config.exchange.replicas
    if config.engine == "fleet" and here < wanted:
        where = "the cluster" if config.fleet.kind == "ray" else "machines that join; each checks its memory then"
        yield f"memory        {_pluralise(wanted - here)} on {where}"


def _pluralise(count: int, noun: str = "worker") -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _traffic(run: ResolvedRun, rows: Sequence[StageRow]) -> str:
    config, every = run.config, run.exchange.interval
    line = f"sent          {size(config.exchange.replicas * sum(row.sent for row in rows))} between stages in a step"
    if any(row.exchanged for row in rows):
        when = f"every {every} steps" if every and every > 1 else "every step"
        line += f"; {size(sum(row.exchanged for row in rows))} from each replica to others, {when}"
    return line


def _time(run: ResolvedRun, steps: int, measured_s: float | None) -> str:
    seconds, source = measured_s, "at the speed of the steps before"
    if seconds is None:
        seconds, source = stated_step_s(run), "by the costs in [network], not measured here"
    if seconds is None:
        return "time          unknown until step 3: [network] states no costs"
    return f"time          {durations.text(steps * seconds)} for {_pluralise(steps, 'step')}, {source}"


def stated_step_s(run: ResolvedRun) -> float | None:
    """Return the seconds of a step by the schedule or the costs in ``network``, or None without any.

    In one process, passes follow one another, those of all replicas too.
    """
    config, network = run.config, run.config.network
    if run.schedule is not None:
        return run.schedule.step_s
    if not (network.forward_s or network.backward_s):
        return None
    plan = ResolvedRun(one_replica(config)).training(0)
    simulated = simulate(plan, Costs(network), message_bytes(config.model, config.pipeline))
    return config.exchange.replicas * simulated.passes_s if config.engine == "inline" else simulated.step_s
