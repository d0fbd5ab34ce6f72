"""The samples of a step: batches by microbatch, their document masks and targets, and the time that reading takes.

Which samples a microbatch holds is a pure function of the step, independent of the worker that computes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.config.schema import DataConfig
from planaria.control.facts import decisions as d
from planaria.data.dataset import Split, open_data
from planaria.data.stream import BatchReader, Stream
from planaria.models.llama_layers import mask_of
from planaria.pipeline.plan.actions import StepPlan
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.setup import Setup

Masks = Callable[[int], Tensor]
"""microbatch → document mask, bool [microbatch_size, 1, context, context]"""
Lengths = Callable[[int], int]
"""microbatch → tokens of its samples that stages compute; later ones, such as padding, have no effect on any target"""
ALIGNED = 8
"""tokens: lengths are multiples, which matrix products handle faster"""


def batches(stream: Stream, first_sample: int, size: int) -> BatchReader:
    """Return the batches of a step: microbatch ``i`` holds samples ``first_sample + i * size`` and the next
    ``size - 1``."""

    def batch(microbatch: int) -> tuple[Tensor, Tensor]:
        return stream.batch(first_sample + microbatch * size, size)

    return batch


def masks(data: DataConfig, stream: Stream, batch: BatchReader, first_sample: int, size: int) -> Masks | None:
    """Return the document masks of :func:`batches`, or None without ``data.document_mask``.

    Every stage computes them from the samples, so they are not sent.
    """

    def mask(microbatch: int) -> Tensor:
        return mask_of(stream.documents(first_sample + microbatch * size, batch(microbatch)[0]))

    return mask if data.document_mask else None


class TargetCounts(NamedTuple):
    """The numbers of targets in a step's microbatches, if these differ: in dialogues only answers are learned.

    A step's loss is the sum over its targets divided by their number in the whole step, over all replicas that add up
    gradients. The mean of the microbatches' means would have another gradient.
    """

    counts: Sequence[int]
    """number of targets in each microbatch"""
    total: int
    """number of targets in the step"""
    microbatches: int
    """number of microbatches in the step"""
    replica_total: int
    """number of targets in the microbatches whose mean is the gradient of a stage: those of its replica"""

    def weight(self, microbatch: int) -> float:
        """Return the factor of a microbatch's mean loss in the mean over the step's microbatches: n B / N."""
        return self.counts[microbatch] * self.microbatches / self.total

    def at(self, node: int, plan: StepPlan, present: Arrangement, lockstep: bool) -> TargetCounts:
        """Return the same for a ``node`` and its replica; ``lockstep``: replicas step with gradients of their own."""
        ends = present.nodes(0)
        first = ends[min(present.peers(node).index(node), len(ends) - 1)]
        of_replica = [microbatch for microbatch, route in enumerate(plan.routes) if route[0] == first]
        replica_total = sum(self.counts[microbatch] for microbatch in of_replica)
        if lockstep:
            return self._replace(total=replica_total, microbatches=len(of_replica), replica_total=replica_total)
        return self._replace(replica_total=replica_total)

    def renumbered(self, indices: Iterable[int]) -> TargetCounts:
        """Return the counts of the microbatches in ``indices``, renumbered from 0."""
        return self._replace(counts=[self.counts[index] for index in indices])


def learned_targets(stream: Stream, first_sample: int, size: int, microbatches: int) -> TargetCounts | None:
    """Return the numbers of targets in a step of ``microbatches``, or None if all tokens are targets."""
    if not stream.rows:
        return None
    counts = [int(stream.learned(first_sample + number * size, size).sum()) for number in range(microbatches)]
    return TargetCounts(counts, sum(counts), microbatches, sum(counts))


def lengths(stream: Stream, first_sample: int, size: int) -> Lengths | None:
    """Return the computed lengths of :func:`batches`, or None if all tokens are targets."""

    @cache
    def length(microbatch: int) -> int:
        return computed_length(stream.learned(first_sample + microbatch * size, size))

    return length if stream.rows else None


def computed_length(learned: npt.NDArray[np.bool_]) -> int:
    """Return the number of tokens up to the last learned target of a microbatch, rounded up to :data:`ALIGNED`.

    ``learned``: bool [microbatch_size, context].
    """
    last = int(np.flatnonzero(learned.any(axis=0)).max(initial=0))
    return min(-(-(last + 1) // ALIGNED) * ALIGNED, int(learned.shape[1]))


def to_device(tensor: Tensor, device: str) -> Tensor:
    """Return a host tensor on ``device``; a copy to a GPU is asynchronous, from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


class StepData(NamedTuple):
    """The samples of a step that a stage needs."""

    batch: BatchReader | None
    masks: Masks | None
    target_counts: TargetCounts | None = None
    lengths: Lengths | None = None
    first_sample: int = 0
    """number of the step's first sample in its stream; a step that is repeated has the same one"""


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step or validation."""

    batch: BatchReader | None = None
    """the microbatches' tokens and targets, at the ends"""
    train: bool = True
    microbatches: int = 1
    masks: Masks | None = None
    weights: Sequence[float] | None = None
    """factor of each microbatch in a coded step; default 1"""
    target_counts: TargetCounts | None = None
    """numbers of targets, if they differ between microbatches"""
    lengths: Lengths | None = None
    """computed tokens, if later ones have no effect"""
    first_sample: int = 0
    """number of the step's first sample, for random rounding"""

    def weigh(self, loss: Tensor, microbatch: int) -> Tensor:
        """Return a microbatch's part of the step's loss, given its mean over its targets."""
        part = loss / self.microbatches
        if self.weights is not None:
            part = part * self.weights[microbatch]
        return part if self.target_counts is None else part * self.target_counts.weight(microbatch)


class ReadTimer:
    """Measures how long the main thread reads batches."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """seconds spent reading batches in the current step"""
        self._unreported_s = 0.0

    def timed(self, batch: BatchReader) -> BatchReader:
        """Return the same batch, timed, for a new step."""
        self.step_s = 0.0

        def read(microbatch: int) -> tuple[Tensor, Tensor]:
            began = time.monotonic()
            tokens = batch(microbatch)
            seconds = time.monotonic() - began
            self.step_s += seconds
            self._unreported_s += seconds
            return tokens

        return read

    def pop_seconds(self) -> float:
        """Return the seconds of reading since the last call."""
        seconds, self._unreported_s = self._unreported_s, 0.0
        return seconds


Injected = Callable[[BatchReader, int | None], BatchReader]
"""(batch, training step or None) → the batch with an injected fault"""


class RunSamples:
    """A run's samples, opened when a step needs them."""

    def __init__(self, setup: Setup, resolved: ResolvedRun, reading: ReadTimer) -> None:
        self._setup = setup
        self._config = setup.config
        self._resolved = resolved
        self._reading = reading
        self._streams: dict[Split, Stream] = {}

    def samples_of(self, order: d.RunStep, stage: int, injected: Injected | None = None) -> StepData:
        """Return the tokens for stage 0, and for every stage the document masks, if ``data.document_mask`` is set, and
        the numbers of targets, if the data are dialogues.

        :param injected: wraps the source of batches in a fault.
        """
        data, train = self._config.data, order.mode == "train"
        first = self._setup.offset + order.block * self._resolved.block if train else 0
        if stage and not (data.document_mask or data.dialogues):
            return StepData(None, None, first_sample=first)
        stream = self._stream("train" if train else "validation")
        size = self._config.pipeline.microbatch_size
        source = batches(stream, first, size)
        if injected is not None:
            source = injected(source, order.step if train else None)
        batch = self._reading.timed(source)
        document_masks = masks(data, stream, batch, first, size)
        count = self._resolved.block // size if train else self._config.train.eval_microbatches
        counts, ends = learned_targets(stream, first, size, count), lengths(stream, first, size)
        return StepData(None if stage else batch, document_masks, counts, ends, first)

    def _stream(self, split: Split) -> Stream:
        if split not in self._streams:
            dataset = open_data(self._setup.dataset)
            self._streams[split] = Stream(dataset, split, self._config.model.context, self._config.seed)
        return self._streams[split]
