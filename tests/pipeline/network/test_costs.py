from __future__ import annotations

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig, NetworkConfig, PipelineConfig
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import Costs, MessageCosts, message_bytes

both = MessageBytes.both


def test_one_number_applies_to_every_stage_and_the_embedding_is_free() -> None:
    costs = Costs(NetworkConfig(forward_s=[0.5], backward_s=[1.5]))
    visits = ((0, 0), (1, 1), (7, 2), (0, 8))
    assert [costs.compute("forward", stage, hop) for stage, hop in visits] == [0, 0.5, 0.5, 0.5]
    assert [costs.compute("backward", stage, hop) for stage, hop in visits] == [0, 1.5, 1.5, 1.5]


def test_a_list_is_indexed_by_stage() -> None:
    costs = Costs(NetworkConfig(forward_s=[0.1, 0.2, 0.3]))
    visits = ((0, 0), (2, 1), (1, 2), (0, 3))
    assert [costs.compute("forward", stage, hop) for stage, hop in visits] == [0, 0.3, 0.2, 0.1]
    assert costs.compute("backward", 2, 1) == 0


def test_layers_beside_the_embedding_have_costs_of_their_own() -> None:
    costs = Costs(NetworkConfig(forward_s=[0.1, 0.2], entry_forward_s=0.4, entry_backward_s=0.8))
    assert [costs.compute(kind, 0, 0) for kind in ("forward", "backward")] == [0.4, 0.8]
    assert costs.compute("forward", 0, 3) == 0.1


def test_a_list_that_is_too_short_is_refused() -> None:
    with pytest.raises(UserError, match=r"network\.backward_s has 2 numbers, none for stage 4"):
        Costs(NetworkConfig(backward_s=[1.0, 2.0])).compute("backward", 4, 4)


def test_messages_cost_latency_and_transmission_time() -> None:
    assert Costs(NetworkConfig()).carry(0, 1, 1000) == 0
    assert Costs(NetworkConfig(latency_s=0.25)).carry(0, 1, 1000) == 0.25
    costs = Costs(NetworkConfig(latency_s=0.25, bandwidth=2000.0))
    assert costs.carry(1, 2, 1000) == 0.75
    assert costs.transmit(1, 2, 1000) == 0.5


def test_prices_are_whole_nanoseconds() -> None:
    prices = MessageCosts(Costs(NetworkConfig(forward_s=[0.1], latency_s=1e-3, bandwidth=3e6)), both(1))
    assert prices.compute("forward", 1, 1) == 100_000_000
    assert (prices.transmit(0, 1, "forward"), prices.carry(0, 1, "forward")) == (333, 1_000_333)
    assert prices.seconds(3 * prices.compute("forward", 1, 1)) == 0.3


def test_a_message_has_the_bytes_of_one_activation() -> None:
    model = ModelConfig(dim=64, heads=4, context=32)
    numbers = 3 * 32 * 64
    for wire, forward, backward in (("fp32", 4, 4), ("bf16", 2, 2), ("8/4", 1 + 1 / 32, 1 / 2 + 1 / 32)):
        found = message_bytes(model, PipelineConfig(microbatch_size=3, wire=wire))
        assert found == (forward * numbers, backward * numbers)


def test_a_queued_latency_occupies_the_link() -> None:
    network = NetworkConfig(latency_s=0.25, bandwidth=2000.0, latency_queued=True)
    assert Costs(network).transmit(1, 2, 1000) == Costs(network).carry(1, 2, 1000) == 0.75


def test_a_shadow_costs_the_next_stages_forward() -> None:
    costs = Costs(NetworkConfig(forward_s=[0.1, 0.2, 0.3], backward_s=[1.0]), {0: 1, 1: 2})
    visits = ((0, 0), (1, 1), (2, 2), (0, 3))
    assert [costs.shadow("forward", stage, hop) for stage, hop in visits] == [0.2, 0.3, 0, 0]
    assert [costs.shadow("backward", stage, hop) for stage, hop in visits] == [0, 0, 0, 0]
