"""How often a run reads each source of its mixture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.data.stream import Stream


def epochs(config: RunConfig, train: Stream, samples: int) -> Iterator[str]:
    """A line for each source of the mixture; nothing without one. ``samples``: all that the run takes, to its end.

    :raises UserError: when that is more of a source than its ``epochs`` allow, naming the steps that they allow.
    """
    mixture, left = config.data.mixture, samples - config.train.steps * config.samples
    taken = train.turns.before(samples)
    for place, (name, source) in enumerate(train.sources.items() if mixture else ()):
        count, most = taken[place], mixture[name].epochs
        if most is not None and count > most * source.windows:
            allowed = int(most * source.windows)
            steps = range(config.train.steps)
            last = bisect_right(steps, allowed, key=lambda s: train.turns.before(left + s * config.samples)[place]) - 1
            fewer = f"set train.steps to {last} or less" if last > 0 else "take fewer samples in a step"
            raise UserError(
                f"data.mixture.{name}.epochs = {most:g}: train.steps = {config.train.steps} takes {count} of its "
                f"samples, and there are {source.windows}: {count / source.windows:.2f} epochs; {fewer}, lower its "
                "weight, or raise its epochs"
            )
        share, read = count / max(1, samples), count / source.windows
        yield f"mixture       {name}: {share:.1%} of the samples, {read:.2f} epochs of its {source.windows:,}"
