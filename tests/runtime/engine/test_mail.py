from __future__ import annotations

import pytest
import torch

from planaria.runtime.engine.mail import Awaited, Mail
from planaria.runtime.transport.wire import (
    Activation,
    Content,
    CopyMessage,
    Goodbye,
    GradientShare,
    Header,
    Label,
    OfferPart,
    Ping,
    State,
    WireError,
)

SHAPE = (2, 3)
FORWARD = Activation(5, 9, 4, 1, Content.FORWARD)


def header(label: Label = FORWARD, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> Header:
    return Header(label, dtype, shape)


@pytest.fixture
def mail() -> Mail:
    made = Mail(SHAPE, torch.float32)
    made.turn(5, 9)
    return made


LABELS: list[Label] = [
    FORWARD,
    FORWARD._replace(content=Content.BACKWARD),
    FORWARD._replace(hop=2),
    FORWARD._replace(microbatch=5),
    GradientShare(5, 9),
    CopyMessage(5, 9, 4, Content.COPY_BEFORE),
    CopyMessage(5, 9, 4, Content.COPY_AFTER),
    CopyMessage(5, 9, 5, Content.COPY_BEFORE),
    State(5),
]


@pytest.mark.parametrize("label", LABELS, ids=str)
def test_a_frame_waits_until_it_is_taken_and_is_handed_over_once(mail: Mail, label: Label) -> None:
    payload, frame = torch.ones(SHAPE), Awaited(1, label)
    assert frame not in mail and mail.missing([frame, Awaited(3, label)]) == [1, 3]
    mail.put(1, header(label), payload)
    assert frame in mail and mail.missing([frame, Awaited(3, label)]) == [3], "nobody else has sent this"
    assert not [other for other in LABELS if other != label and Awaited(1, other) in mail], "nor anything else"
    assert mail.take(frame) is payload
    assert frame not in mail


def test_all_that_may_come_in_a_step_is_kept_apart(mail: Mail) -> None:
    frames = [Awaited(sender, label) for sender in (1, 3) for label in LABELS]
    for number, frame in enumerate(frames):
        mail.put(frame.sender, header(frame.label), torch.full(SHAPE, float(number)))
    assert [mail.take(frame)[0, 0].item() for frame in frames] == list(range(len(frames)))


@pytest.mark.parametrize("label", [FORWARD, GradientShare(5, 9), CopyMessage(5, 9, 4, Content.COPY_AFTER)], ids=str)
@pytest.mark.parametrize(("generation", "step"), [(5, 10), (6, 9), (6, 0)])
def test_a_neighbour_may_be_ahead(label: Label, generation: int, step: int, mail: Mail) -> None:
    ahead = label._replace(generation=generation, step=step)  # type: ignore[union-attr, call-arg]
    mail.put(1, header(ahead), torch.ones(SHAPE))
    assert Awaited(1, label) not in mail
    mail.turn(generation, step)
    assert Awaited(1, ahead) in mail


@pytest.mark.parametrize("label", [FORWARD, GradientShare(5, 9), CopyMessage(5, 9, 4, Content.COPY_AFTER)], ids=str)
def test_what_belongs_to_the_past_is_gone(label: Label, mail: Mail) -> None:
    old, frame = label._replace(generation=4), Awaited(1, label)  # type: ignore[union-attr, call-arg]
    mail.put(1, header(old), torch.ones(SHAPE))
    mail.put(1, header(old, shape=(7,)), torch.ones(7))  # of a past that nobody judges
    mail.put(1, header(label), torch.ones(SHAPE))
    mail.turn(6, 9)  # a new generation repeats the step
    assert frame not in mail
    mail.turn(4, 0)
    assert frame not in mail and Awaited(1, old) not in mail, "dropped, not hidden"


def test_a_state_that_nobody_has_taken_goes_with_its_generation(mail: Mail) -> None:
    mail.put(1, header(State(2)), torch.ones(SHAPE))
    mail.turn(5, 9)
    assert Awaited(1, State(2)) in mail
    mail.turn(6, 9)
    assert Awaited(1, State(2)) not in mail


@pytest.mark.parametrize("odd", [header(shape=(3, 2)), header(dtype=torch.bfloat16)], ids=["shape", "dtype"])
def test_what_is_no_activation_of_this_model_is_refused(odd: Header, mail: Mail) -> None:
    with pytest.raises(WireError, match=r"for step 9; activations here are torch.float32 \[2, 3\]"):
        mail.put(1, odd, torch.zeros(odd.shape, dtype=odd.dtype))
    assert Awaited(1, FORWARD) not in mail


def test_what_is_not_in_the_type_that_the_recipe_has_travel_is_refused() -> None:
    mail = Mail(SHAPE, torch.bfloat16)
    mail.turn(5, 9)
    with pytest.raises(WireError, match=r"activations here are torch.bfloat16 \[2, 3\]"):
        mail.put(1, header(), torch.zeros(SHAPE))
    mail.put(1, header(dtype=torch.bfloat16), torch.zeros(SHAPE, dtype=torch.bfloat16))
    assert Awaited(1, FORWARD) in mail


def test_activations_that_are_kept_land_as_they_arrive_and_others_stay_as_they_are() -> None:
    landed: list[torch.Tensor] = []

    def land(payload: torch.Tensor) -> torch.Tensor:
        landed.append(payload)
        return payload + 1

    mail, past = Mail(SHAPE, torch.float32, land), FORWARD._replace(step=8)
    mail.turn(5, 9)
    for label in (FORWARD, past, GradientShare(5, 9)):
        mail.put(1, header(label), torch.zeros(SHAPE))
    with pytest.raises(WireError, match="activations here are"):
        mail.put(1, header(FORWARD._replace(hop=2), shape=(3, 2)), torch.zeros(3, 2))
    assert len(landed) == 1 and mail.take(Awaited(1, FORWARD)).sum() == 6
    assert mail.take(Awaited(1, GradientShare(5, 9))).sum() == 0


@pytest.mark.parametrize("label", [OfferPart(1, Content.BLOCKING), Ping(1, Content.PING), Goodbye()], ids=str)
def test_what_nobody_takes_out_is_refused(label: Label, mail: Mail) -> None:
    with pytest.raises(WireError, match="which nobody here waits for"):
        mail.put(1, header(label), torch.zeros(SHAPE))
