"""A node's part in an exchange of gradients: its state until the commit, and the states of copies and successors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, ModelConfig, RunConfig
from planaria.control.facts.events import MessageCompressed
from planaria.exchange.aggregate import AGGREGATORS, mean
from planaria.exchange.base import Weights
from planaria.lab.reference.replicas import ReferenceReplicas
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.worker.exchange_round import RoundMember
from planaria.runtime.worker.outer_state import OuterState, UpdateReport
from planaria.runtime.worker.plan_execution import exchange_gradients
from planaria.runtime.worker.runner import NonFinite, StageRunner
from planaria.runtime.worker.step_samples import StepInputs

MODEL = ModelConfig(vocab=64, dim=16, layers=4, heads=2, hidden=32, context=8)
NODES = (1, 3, 5)


def recipe(**options: Any) -> RunConfig:
    return RunConfig(model=MODEL, exchange=ExchangeConfig(replicas=len(NODES), options=Options(options)))


def runners(config: RunConfig, seed: int = 0) -> dict[int, StageRunner]:
    """The block stage of each replica, with its own gradient."""
    found = {}
    for node in NODES:
        found[node] = StageRunner(config, 1)
        found[node].begin(StepInputs(microbatches=1))
        generator = torch.Generator().manual_seed(100 * seed + node)
        shapes = {name: parameter.shape for name, parameter in found[node].parameters.items()}
        found[node].set_gradients({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    return found


def states(config: RunConfig, of: Mapping[int, StageRunner]) -> dict[int, OuterState]:
    found = {node: OuterState(config.exchange) for node in of}
    for node, outer in found.items():
        outer.begin({}, of[node].state().weights, rounds=0)
    return found


def agree(outer: Mapping[int, OuterState], of: Mapping[int, StageRunner]) -> None:
    updates = {node: outer[node].update(runner) for node, runner in of.items()}
    for node, runner in of.items():
        outer[node].settle(updates, node, runner)


def residual(outer: OuterState) -> dict[str, torch.Tensor]:
    return dict(outer.settled["residual"])


def test_a_steps_residual_is_pending_until_its_commit() -> None:
    config = recipe(bits=4)
    outer = states(config, runners(config))
    agree(outer, runners(config))
    assert not any(residual(state) for state in outer.values()), "the step may still be dropped"
    for state in outer.values():
        state.commit()
    before = {node: residual(state) for node, state in outer.items()}
    assert all(any(tensor.any() for tensor in kept.values()) for kept in before.values())
    agree(outer, of := runners(config, seed=1))
    for state in outer.values():
        state.drop()
        state.commit()  # of another step, which came to nothing here
    assert all(residual(state)[name] is kept for node, state in outer.items() for name, kept in before[node].items())
    agree(outer, again := runners(config, seed=1))
    assert all(torch.equal(of[n].grads[name], again[n].grads[name]) for n in NODES for name in of[n].grads)


def reported(report: UpdateReport) -> dict[str, Any]:
    """Return the report on the node's own message; empty if none was sent."""
    return next((fields for kind, fields in report.facts(first=True) if kind is MessageCompressed), {})


def test_compression_errors_are_reported_at_the_commit() -> None:
    config = RunConfig(model=MODEL, exchange=ExchangeConfig(replicas=len(NODES), compress="econtrol:4bits"))
    outer, of = states(config, runners(config)), runners(config)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in of[1].grads.values()))
    agree(outer, of)
    assert not reported(outer[1].settle({node: outer[node].update(of[node]) for node in NODES}, 1, of[1]))
    outer[1].drop()
    assert not reported(outer[1].commit()), "it came to nothing"
    agree(outer, runners(config))
    reports = {node: outer[node].commit() for node in NODES}
    assert not [*reports[1].facts(first=False)]
    first = reported(reports[1])
    assert first["norm"] == pytest.approx(norm, rel=1e-2) and first["full"] == "beginning"
    assert first["sent_bytes"] == first["dense_bytes"] and first["relative_error"] == first["estimate_error"] == 0.0
    agree(outer, runners(config, seed=1))
    second = reported(outer[1].commit())
    assert second["full"] is None and second["sent_bytes"] < 0.15 * second["dense_bytes"]
    assert 0.0 < second["relative_error"] < 0.02 and second["residual"] == second["estimate_error"] > 0.0


def test_the_reason_for_a_full_message_is_reported() -> None:
    config = RunConfig(model=MODEL, exchange=ExchangeConfig(replicas=len(NODES), compress="ef21:top10%"))
    outer = states(config, of := runners(config))

    def why() -> Any:
        agree(outer, runners(config))
        return {reported(outer[node].commit())["full"] for node in NODES}

    assert why() == {"beginning"} and why() == {None}
    outer[3].begin(outer[1].state_for_transfer(to_successor=False), of[3].state().weights, rounds=2)
    for state in outer.values():
        state.after_member_change()
    assert why() == {"rebuilt"} and why() == {None}
    for node, state in outer.items():  # another number begins with what is shared
        state.begin(state.state_for_transfer(to_successor=False), of[node].state().weights, rounds=4)
    assert why() == {"replicas"} and why() == {None}


def test_a_single_replica_keeps_no_outer_state() -> None:
    config = RunConfig(model=MODEL, exchange=ExchangeConfig(kind="diloco"))
    outer = OuterState(config.exchange)
    outer.begin({}, StageRunner(config, 1).state().weights, rounds=0)
    assert outer.state_for_transfer(to_successor=True) == {}


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rounding_reveals_a_gradient_that_is_not_finite(bits: int) -> None:
    config = recipe(bits=bits)
    of = runners(config)
    next(iter(of[3].parameters.values())).grad[0] = torch.inf
    outer = states(config, of)
    outer[1].update(of[1])
    with pytest.raises(NonFinite, match="stage 1 is not finite; lower"):
        outer[3].update(of[3])


class FakeMessages:
    """Messages of one node, to which all others have already sent."""

    def __init__(self, node: int, member: RoundMember, updates: Mapping[int, torch.Tensor]) -> None:
        self.round_member, self._updates = member, updates
        self.assignment = SimpleNamespace(node=node, step=0, present=SimpleNamespace(peers=lambda _: NODES))
        self.control_link = SimpleNamespace(set_activity=lambda *_: None)
        self.sent: dict[int, torch.Tensor] = {}

    def send_share(self, node: int, flat: torch.Tensor) -> None:
        self.sent[node] = flat

    def take_shares(self, nodes: Sequence[int], like: torch.Tensor | None) -> list[torch.Tensor]:
        return [self._updates[node] for node in nodes]

    def report(self, report: UpdateReport, round: int, first: bool) -> None:
        assert not report.rejected


@pytest.mark.parametrize("bits", [32, 4])
def test_workers_and_one_process_use_the_same_aggregator(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(values: Mapping[int, Weights], counts: Mapping[int, float]) -> dict[str, torch.Tensor]:
        return {name: tensor / 2 for name, tensor in mean(values, counts).items()}

    monkeypatch.setitem(AGGREGATORS, "half", half)
    config, plain = recipe(bits=bits, aggregator="half"), recipe(bits=bits)
    inline, apart, whole = runners(config), runners(config), runners(plain)
    ReferenceReplicas(config, Arrangement({1: NODES}), inline).agree()
    ReferenceReplicas(plain, Arrangement({1: NODES}), whole).agree()
    updates = {node: outer.update(apart[node]).blocking for node, outer in states(config, apart).items()}
    for node, runner in apart.items():
        member = RoundMember(config.exchange)
        member.begin({}, runner, rounds=0)
        messages = FakeMessages(node, member, updates)
        exchange_gradients(messages, runner)
        assert messages.sent.keys() == {*NODES} - {node}
        assert all(torch.equal(flat, updates[node]) for flat in messages.sent.values())
    for node in NODES:
        for name, gradient in inline[node].grads.items():
            assert torch.equal(apart[node].grads[name], gradient)
            assert torch.equal(gradient, whole[node].grads[name] / 2)
