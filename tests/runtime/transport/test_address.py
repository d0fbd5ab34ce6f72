"""The ways in which one process reaches another, by their machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.address import RELAY, Address, Reach, dial_addresses, listening, should_listen

CONTROLLER = Reach(advertise="203.0.113.5", relay="127.0.0.1:7001")
OPEN = Reach(machine="g1", relay="203.0.113.5:7001")
HIDDEN = Reach(machine="g2", reachable=False, relay="203.0.113.5:7001")
HIDDEN_TOO = Reach(machine="g3", reachable=False, relay="203.0.113.5:7001")
AT_HOME = listening("0.0.0.0", 7002, CONTROLLER)
AT_OPEN = listening("198.51.100.7", 4001, OPEN)
AT_HIDDEN = listening("192.168.1.2", 4002, HIDDEN)


@pytest.mark.parametrize(
    ("to", "by", "expected"),
    [
        (AT_HOME, CONTROLLER, ("127.0.0.1:7002",)),
        (AT_HOME, OPEN, ("203.0.113.5:7002", RELAY)),
        (AT_OPEN, CONTROLLER, ("198.51.100.7:4001", RELAY)),
        (AT_OPEN, HIDDEN, ("198.51.100.7:4001", RELAY)),
        (AT_HIDDEN, HIDDEN, ("192.168.1.2:4002",)),
        (AT_HIDDEN, OPEN, (RELAY,)),
        (AT_HIDDEN, HIDDEN_TOO, (RELAY,)),
        (AT_HIDDEN, Reach(machine="g4"), ()),
    ],
)
def test_the_ways_to_a_process(to: Address, by: Reach, expected: tuple[str, ...]) -> None:
    assert dial_addresses(str(to), by) == expected


def test_on_one_machine_an_address_is_host_and_port() -> None:
    assert str(listening("127.0.0.1", 5, Reach())) == "127.0.0.1:5"
    assert dial_addresses("127.0.0.1:5", Reach()) == ("127.0.0.1:5",)
    assert str(listening("::1", 5, Reach())) == "[::1]:5"


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (AT_OPEN, AT_HIDDEN, True),
        (AT_HIDDEN, AT_OPEN, False),
        (AT_HIDDEN, AT_HIDDEN, True),
        (AT_HOME, AT_OPEN, True),
        (AT_HIDDEN, listening("10.0.0.1", 1, HIDDEN_TOO), True),
    ],
)
def test_the_end_that_can_be_reached_waits(first: Address, second: Address, waits: bool) -> None:
    assert should_listen(str(first), str(second)) is waits


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_an_address(text: str, other: str) -> None:
    assert isinstance(dial_addresses(text, CONTROLLER), tuple) and should_listen(text, other) in (True, False)


@given(st.builds(Address, *[st.from_regex(r"[a-z0-9.:]{1,20}", fullmatch=True)] * 3))
def test_parsing_inverts_writing_an_address(address: Address) -> None:
    back = Address.parse(str(address))
    assert (back.inside, back.outside) == (address.inside, address.outside)
    assert address.inside == address.outside or back.machine == address.machine
