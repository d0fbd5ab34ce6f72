from __future__ import annotations

import pytest
import torch

from planaria.engine.mail import Mail
from planaria.plan.actions import Action
from planaria.transport.wire import Content, Header, WireError

SHAPE = (2, 3)
FORWARD = Action("forward", 4, 2, node=2, source=1, target=3)
"""waits for what microbatch 4 sends forward at hop 1"""
BACKWARD = Action("backward", 4, 2, node=2, source=3, target=1)
"""waits for what microbatch 4 sends back at hop 3"""
LOCAL = Action("forward", 4, 0, node=0, source=None, target=1)


def header(generation: int = 5, step: int = 9, content: Content = Content.FORWARD, hop: int = 1) -> Header:
    return Header(content, generation, step, 4, hop, torch.float32, SHAPE)


@pytest.fixture
def mail() -> Mail:
    made = Mail(SHAPE)
    made.turn(5, 9)
    return made


def test_a_frame_waits_for_its_action_and_is_handed_over_once(mail: Mail) -> None:
    payload = torch.ones(SHAPE)
    assert not mail.has(FORWARD)
    mail.put(header(), payload)
    assert mail.has(FORWARD)
    assert not mail.has(BACKWARD)
    assert mail.take(FORWARD) is payload
    assert not mail.has(FORWARD)


def test_activations_and_gradients_do_not_mix(mail: Mail) -> None:
    mail.put(header(content=Content.BACKWARD, hop=3), torch.zeros(SHAPE))
    mail.put(header(content=Content.BACKWARD, hop=1), torch.ones(SHAPE))
    assert mail.has(BACKWARD)
    assert not mail.has(FORWARD)


def test_an_action_with_data_of_its_own_waits_for_nobody(mail: Mail) -> None:
    assert mail.has(LOCAL)
    assert mail.take(LOCAL) is None


@pytest.mark.parametrize(("generation", "step"), [(5, 10), (6, 9), (6, 0)])
def test_a_neighbour_may_be_ahead(generation: int, step: int, mail: Mail) -> None:
    mail.put(header(generation, step), torch.ones(SHAPE))
    assert not mail.has(FORWARD)
    mail.turn(generation, step)
    assert mail.has(FORWARD)


def test_what_belongs_to_the_past_is_gone(mail: Mail) -> None:
    mail.put(header(generation=4), torch.ones(SHAPE))
    mail.put(header(step=9), torch.ones(SHAPE))
    mail.turn(6, 9)  # a new generation repeats the step
    assert not mail.has(FORWARD)
    mail.turn(5, 9)
    assert not mail.has(FORWARD), "dropped, not hidden"


@pytest.mark.parametrize(
    "odd",
    [
        Header(Content.STATE, 5, 9, 4, 1, torch.float32, SHAPE),
        Header(Content.FORWARD, 5, 9, 4, 1, torch.float32, (3, 2)),
        Header(Content.FORWARD, 5, 9, 4, 1, torch.bfloat16, SHAPE),
    ],
)
def test_what_is_no_activation_of_this_model_is_refused(odd: Header, mail: Mail) -> None:
    with pytest.raises(WireError, match=r"for step 9; activations here are torch.float32 \[2, 3\]"):
        mail.put(odd, torch.zeros(odd.shape, dtype=odd.dtype))
