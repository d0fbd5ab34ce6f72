"""Updates of a state keep exactly those cached properties that derive from no changed field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from types import CodeType, FunctionType

import pytest

from planaria.control.facts.run_started import RunStarted
from planaria.control.state.base import State
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState

STARTED = RunStarted(name="r", seed=1, stages=2, steps=9, first_step=0, samples_per_step=4, wall_time=0.0)


def names(code: CodeType) -> Iterator[str]:
    """Yield the attributes that a function reads, comprehensions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def inputs(kind: type[State]) -> set[str]:
    """Return the fields that cached properties read, also through other members of the class."""
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    todo, seen = [name for name, member in vars(kind).items() if isinstance(member, cached_property)], set[str]()
    while todo:
        seen.add(name := todo.pop())
        member = vars(kind).get(name)
        function = member.func if isinstance(member, cached_property) else getattr(member, "fget", member)
        if isinstance(function, FunctionType):
            todo += set(names(function.__code__)) - seen
    return seen & own


@pytest.mark.parametrize("kind", [ReplicaState, RunState])
def test_cache_inputs_are_the_fields_that_cached_properties_read(kind: type[State]) -> None:
    assert inputs(kind) == kind.cache_inputs


def test_an_update_of_an_input_renews_cached_properties() -> None:
    replica = RunState.start(STARTED).live[0]
    held = replica.held
    assert replica.updated(phase="idle").held is held
    assert replica.updated(holders={0: "w0"}).held.stages == (0,)


def test_unknown_fields_are_rejected() -> None:
    with pytest.raises(TypeError, match="RunState has no fields \\['unknown'\\]"):
        RunState.start(STARTED).updated(unknown=1)
