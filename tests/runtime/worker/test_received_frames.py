"""A worker's received frames wait until taken, are delivered once, and are dropped with their generation and step."""

from __future__ import annotations

import random

import pytest
import torch

from planaria.config.options import Options
from planaria.config.schema import ModelConfig, PipelineConfig
from planaria.pipeline.codecs import make_model_codec
from planaria.pipeline.codecs.base import Visit
from planaria.pipeline.codecs.floats import Bf16, Fp32
from planaria.pipeline.codecs.subspace import SubspaceCodec
from planaria.runtime.transport import wire
from planaria.runtime.transport.wire import (
    Activation,
    CopyMessage,
    FrameContent,
    GradientShare,
    Label,
    State,
    TensorHeader,
    WireError,
)
from planaria.runtime.worker.received_frames import FrameId, ReceivedFrames

SHAPE = (2, 3)
FORWARD = Activation(5, 9, 4, 1, FrameContent.FORWARD)


def header(label: Label = FORWARD, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> TensorHeader:
    return TensorHeader(label, dtype, shape)


@pytest.fixture
def frames_in() -> ReceivedFrames:
    made = ReceivedFrames(Fp32(), SHAPE)
    made.advance(5, 9)
    return made


LABELS: list[Label] = [
    FORWARD,
    FORWARD._replace(content=FrameContent.BACKWARD),
    FORWARD._replace(hop=2),
    FORWARD._replace(microbatch=5),
    GradientShare(5, 9),
    CopyMessage(5, 9, 4, FrameContent.COPY_BEFORE),
    CopyMessage(5, 9, 4, FrameContent.COPY_AFTER),
    CopyMessage(5, 9, 5, FrameContent.COPY_BEFORE),
    State(5),
]


@pytest.mark.parametrize("label", LABELS, ids=str)
def test_a_frame_waits_until_it_is_taken_and_is_delivered_once(frames_in: ReceivedFrames, label: Label) -> None:
    payload, frame = torch.ones(SHAPE), FrameId(1, label)
    assert frame not in frames_in and frames_in.missing([frame, FrameId(3, label)]) == [1, 3]
    frames_in.put(1, header(label), payload)
    assert frame in frames_in and frames_in.missing([frame, FrameId(3, label)]) == [3], "no other peer has sent this"
    assert not [other for other in LABELS if other != label and FrameId(1, other) in frames_in], "nor anything else"
    assert frames_in.take(frame) is payload
    assert frame not in frames_in


@pytest.mark.parametrize(
    "label", [FORWARD, GradientShare(5, 9), CopyMessage(5, 9, 4, FrameContent.COPY_AFTER)], ids=str
)
@pytest.mark.parametrize(("generation", "step"), [(5, 10), (6, 9), (6, 0)])
def test_a_neighbour_may_be_ahead(label: Label, generation: int, step: int, frames_in: ReceivedFrames) -> None:
    ahead = label._replace(generation=generation, step=step)
    frames_in.put(1, header(ahead), torch.ones(SHAPE))
    assert FrameId(1, label) not in frames_in
    frames_in.advance(generation, step)
    assert FrameId(1, ahead) in frames_in


@pytest.mark.parametrize(
    "label", [FORWARD, GradientShare(5, 9), CopyMessage(5, 9, 4, FrameContent.COPY_AFTER)], ids=str
)
def test_frames_of_the_past_are_dropped(label: Label, frames_in: ReceivedFrames) -> None:
    old, frame = label._replace(generation=4), FrameId(1, label)
    frames_in.put(1, header(old), torch.ones(SHAPE))
    frames_in.put(1, header(old, shape=(7,)), torch.ones(7))  # of the past: not checked
    frames_in.put(1, header(label), torch.ones(SHAPE))
    frames_in.advance(6, 9)  # a new generation repeats the step
    assert frame not in frames_in
    frames_in.advance(4, 0)
    assert frame not in frames_in and FrameId(1, old) not in frames_in, "dropped, not hidden"


def test_an_untaken_state_is_dropped_with_its_generation(frames_in: ReceivedFrames) -> None:
    frames_in.put(1, header(State(2)), torch.ones(SHAPE))
    frames_in.advance(5, 9)
    assert FrameId(1, State(2)) in frames_in
    frames_in.advance(6, 9)
    assert FrameId(1, State(2)) not in frames_in


@pytest.mark.parametrize("wrong", [header(shape=(3, 2)), header(dtype=torch.bfloat16)], ids=["shape", "dtype"])
def test_other_shapes_and_types_are_refused(wrong: TensorHeader, frames_in: ReceivedFrames) -> None:
    with pytest.raises(wire.WireError, match=r"sent .* for step 9; activations here are torch\.float32 \[2, 3\]"):
        frames_in.put(1, wrong, torch.zeros(wrong.shape, dtype=wrong.dtype))
    assert FrameId(1, FORWARD) not in frames_in


def test_other_types_than_the_recipes_wire_are_refused() -> None:
    frames_in = ReceivedFrames(Bf16(), SHAPE)
    frames_in.advance(5, 9)
    with pytest.raises(wire.WireError, match=r"activations here are torch.bfloat16 \[2, 3\]"):
        frames_in.put(1, header(), torch.zeros(SHAPE))
    frames_in.put(1, header(dtype=torch.bfloat16), torch.zeros(SHAPE, dtype=torch.bfloat16))
    assert FrameId(1, FORWARD) in frames_in


def test_kept_activations_are_converted_on_arrival() -> None:
    landed: list[torch.Tensor] = []

    def land(payload: torch.Tensor) -> torch.Tensor:
        landed.append(payload)
        return payload + 1

    frames_in, past = ReceivedFrames(Fp32(), SHAPE, land), FORWARD._replace(step=8)
    frames_in.advance(5, 9)
    for label in (FORWARD, past, GradientShare(5, 9)):
        frames_in.put(1, header(label), torch.zeros(SHAPE))
    with pytest.raises(wire.WireError, match="activations here are"):
        frames_in.put(1, header(FORWARD._replace(hop=2), shape=(3, 2)), torch.zeros(3, 2))
    assert len(landed) == 1 and frames_in.take(FrameId(1, FORWARD)).sum() == 6
    assert frames_in.take(FrameId(1, GradientShare(5, 9))).sum() == 0


@pytest.mark.parametrize(
    "label", [wire.UpdatePart(1, FrameContent.BLOCKING), wire.Ping(1, FrameContent.PING), wire.EdgeClosing()], ids=str
)
def test_frames_that_no_one_takes_are_refused(label: Label, frames_in: ReceivedFrames) -> None:
    with pytest.raises(wire.WireError, match="which no worker waits for"):
        frames_in.put(1, header(label), torch.zeros(SHAPE))


@pytest.mark.parametrize("cases", [10_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chosen", ["6/4", Options({"kind": "subspace", "rank": 32})])
def test_damaged_messages_of_a_codec_are_refused_or_bounded(chosen: str | Options, cases: int) -> None:
    """Messages with changed bytes, of other lengths or types: none raises anything but WireError."""
    shape, rng = (1, 2, 64), random.Random(5)
    pipeline = PipelineConfig(wire=chosen)
    model = ModelConfig(vocab=300, dim=64, heads=4, tied=False, subspace=pipeline.subspace(seed=7))
    codec = make_model_codec(model, pipeline)
    sound = codec.encode(torch.randn(shape), "forward", Visit(1, 2, 3), torch.tensor([[3, 299]]))
    frames_in, refused = ReceivedFrames(codec, shape), 0
    frames_in.advance(1, 9)
    for microbatch in range(cases):
        message = sound.clone()
        for _ in range(rng.randint(1, 4)):
            message[rng.randrange(len(message) if rng.random() < 0.5 else 4)] = rng.randrange(256)
        if rng.random() < 0.2:
            message = message[: rng.randrange(len(message))] if rng.random() < 0.5 else message.to(torch.float32)
        label = Activation(1, 9, microbatch, 0, FrameContent.FORWARD)
        try:
            frames_in.put(1, TensorHeader(label, message.dtype, tuple(message.shape)), message)
        except WireError as error:
            refused += 1
            assert "step 9" in str(error) and "FORWARD" in str(error) and "\n" not in str(error)
            continue
        taken = frames_in.take(FrameId(1, label))
        largest = float(taken[:4].view(torch.bfloat16).float().max())
        if largest > 1e30:  # products overflow
            continue
        most = 6 + largest * 128 * 32**0.5 if isinstance(codec, SubspaceCodec) else largest * 32
        assert codec.decode(taken, shape, "forward").abs().max() <= most
    assert 0.2 * cases < refused < 0.8 * cases


@pytest.mark.parametrize("chosen", ["6/4", Options({"kind": "subspace", "rank": 32})])
def test_messages_far_above_the_usual_magnitude_are_refused(chosen: str | Options) -> None:
    """16 times as large is accepted; 10,000 times as large only before 64 messages, or in another generation."""
    shape = (1, 2, 64)
    pipeline = PipelineConfig(wire=chosen)
    model = ModelConfig(vocab=300, dim=64, heads=4, tied=False, subspace=pipeline.subspace(seed=7))
    codec, draw = make_model_codec(model, pipeline), torch.Generator().manual_seed(0)
    frames_in, count = ReceivedFrames(codec, shape), 0
    frames_in.advance(1, 9)

    def receive(factor: float, generation: int = 1, sender: int = 1) -> None:
        nonlocal count
        gradient = factor * torch.randn(shape, generator=draw)
        message = codec.encode(gradient, "backward", Visit(1, count, 3))
        label = Activation(generation, 9, count := count + 1, 0, FrameContent.BACKWARD)
        frames_in.put(sender, TensorHeader(label, message.dtype, tuple(message.shape)), message)

    for factor in (1e4, *(63 * [1.0]), 16.0):
        receive(factor)
    for factor in (1e4, 1e20):
        with pytest.raises(WireError, match=r"BACKWARD of microbatch .* times the median of the last 64 messages"):
            receive(factor)
    receive(1e4, sender=2)
    receive(16.0)
    frames_in.advance(2, 9)
    receive(1e4, generation=2)
