"""What a worker's stage needs of the samples of a step, whichever stage it has."""

from __future__ import annotations

from collections.abc import Callable

from planaria.control import decisions as d
from planaria.data.dataset import Split, open_data
from planaria.data.stream import Stream
from planaria.runtime.engine.batches import Batch, batches, masks
from planaria.runtime.engine.coded_step import Data
from planaria.runtime.engine.reading import Reading
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.setup import Setup

Injected = Callable[[Batch, int | None], Batch]
"""(batch, training step or None) → the batch as a fault makes it"""


class Samples:
    """A run's samples, opened once a step asks for them; ``reading`` tells how long they take."""

    def __init__(self, setup: Setup, resolved: ResolvedRun, reading: Reading) -> None:
        self._setup, self._config = setup, setup.config
        self._resolved, self._reading = resolved, reading
        self._streams: dict[Split, Stream] = {}

    def of(self, order: d.RunStep, stage: int, injected: Injected | None = None) -> Data:
        """Return the tokens for stage 0 and, if ``data.document_mask`` is set, the document masks for every stage.

        :param injected: wraps the source of batches in a fault.
        """
        if stage and not self._config.data.document_mask:
            return Data(None, None)
        train = order.mode == "train"
        stream = self._stream("train" if train else "validation")
        first = self._setup.offset + order.block * self._resolved.block if train else 0
        source = batches(stream, first, self._config.pipeline.microbatch_size)
        if injected is not None:
            source = injected(source, order.step if train else None)
        batch = self._reading.of(source)
        apart = masks(self._config.data, stream, batch)
        return Data(None if stage else batch, apart)

    def _stream(self, split: Split) -> Stream:
        if split not in self._streams:
            dataset = open_data(self._setup.dataset)
            self._streams[split] = Stream(dataset, split, self._config.model.context, self._config.seed)
        return self._streams[split]
