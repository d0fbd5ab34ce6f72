"""Events and decisions round-trip through JSON."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, RecoveryConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import ORDER, Order

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
    ExchangeConfig: st.builds(
        ExchangeConfig,
        kind=st.sampled_from(["noloco", "diloco", "mine:Mine"]),
        options=st.builds(
            Options, st.dictionaries(st.sampled_from(["every", "alpha", "mine"]), st.integers() | st.floats(0, 0.9))
        ),
        patience_s=st.floats(0, 100),
    ),
    RecoveryConfig: st.builds(
        RecoveryConfig,
        strategy=st.sampled_from(["checkfree", "checkfree_plus, echo, checkpoint"]),
        options=st.builds(
            Options,
            st.dictionaries(st.sampled_from(["bits", "moments", "mine"]), st.integers() | st.text() | st.booleans()),
        ),
    ),
}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values(a) for a in inner])
    if origin is typing.Annotated:
        return values(inner[0])
    if origin is list:
        return st.lists(values(inner[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    assert issubclass(annotation, BaseModel), annotation
    return st.builds(annotation, **{name: _held(field) for name, field in annotation.model_fields.items()})


def _held(field: FieldInfo) -> st.SearchStrategy[Any]:
    """Return a strategy for a field's values within its bounds and pattern."""
    bounds = {name: getattr(m, name) for m in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
    if field.annotation is int and field.metadata:
        least = bounds.get("ge", bounds.get("gt", -1) + 1)
        return st.integers(least, min(2**40, bounds.get("le", bounds.get("lt", 2**40 + 1) - 1)))
    if field.annotation is float and bounds:
        least, most = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
        open_ends = {"exclude_min": "gt" in bounds, "exclude_max": "lt" in bounds}
        return st.floats(least, most, allow_nan=False, allow_infinity=False, **open_ends)
    if patterns := [m.pattern for m in field.metadata if getattr(m, "pattern", None)]:
        return st.from_regex(patterns[0], fullmatch=True)
    if field.annotation is str and field.metadata:  # the name of a file
        return st.from_regex("[a-z][a-z0-9.]{0,20}", fullmatch=True)
    return values(field.annotation)


@pytest.mark.parametrize(
    ("kinds", "adapter"),
    [(e.Event, e.EVENT), (e.Report, e.REPORT), (d.Decision, d.DECISION), (Order, ORDER)],
    ids=["event", "report", "decision", "order"],
)
def test_facts_round_trip_through_json(kinds: Any, adapter: Any) -> None:
    @given(values(kinds))
    def check(fact: BaseModel) -> None:
        text = fact.model_dump_json()
        assert "\n" not in text
        again = adapter.validate_json(text)
        assert type(again) is type(fact)
        assert again == fact

    check()
