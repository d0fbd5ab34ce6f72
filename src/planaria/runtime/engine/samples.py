"""The samples of a step: batches by microbatch, their document masks, and the time that reading them takes.

Which samples a microbatch holds is a pure function of the step, independent of the worker that computes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.config.schema import DataConfig
from planaria.control import decisions as d
from planaria.data.dataset import Split, open_data
from planaria.data.stream import Stream
from planaria.models.llama_layers import document_mask
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.setup import Setup

Batch = Callable[[int], tuple[Tensor, Tensor]]
"""microbatch → (tokens, targets), both [microbatch_size, context] int64"""
Masks = Callable[[int], Tensor]
"""microbatch → document mask, bool [microbatch_size, 1, context, context]"""


def batches(stream: Stream, first_sample: int, size: int) -> Batch:
    """Microbatch ``i`` holds samples ``first_sample + i * size`` and the ``size - 1`` after it."""

    def batch(microbatch: int) -> tuple[Tensor, Tensor]:
        return stream.batch(first_sample + microbatch * size, size)

    return batch


def masks(data: DataConfig, stream: Stream, batch: Batch) -> Masks | None:
    """Return the document masks of a ``batch`` of ``stream``; None without ``data.document_mask``.

    Every stage computes them from the samples, so they are not sent.
    """
    return (lambda microbatch: document_mask(batch(microbatch)[0], stream.separator)) if data.document_mask else None


def placed(tensor: Tensor, device: str) -> Tensor:
    """Return a host tensor on ``device``; a copy to a GPU is asynchronous, from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


class Data(NamedTuple):
    """The samples of a step that a stage needs."""

    batch: Batch | None
    masks: Masks | None


class Reading:
    """Times how long the main thread reads batches."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """seconds spent reading batches in the current step"""
        self._unreported_s = 0.0

    def of(self, batch: Batch) -> Batch:
        """Return the same batch, timed, for a new step."""
        self.step_s = 0.0

        def read(microbatch: int) -> tuple[Tensor, Tensor]:
            began = time.monotonic()
            found = batch(microbatch)
            took = time.monotonic() - began
            self.step_s, self._unreported_s = self.step_s + took, self._unreported_s + took
            return found

        return read

    def newly(self) -> float:
        """Return the seconds of reading since the last call."""
        took, self._unreported_s = self._unreported_s, 0.0
        return took


Injected = Callable[[Batch, int | None], Batch]
"""(batch, training step or None) → the batch with an injected fault"""


class Samples:
    """A run's samples, opened when a step needs them."""

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
