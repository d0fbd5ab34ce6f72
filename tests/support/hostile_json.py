"""Strategies of hostile documents for tests of JSON parsers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e-320", "-0.0", "0", "-1", "1.5", "true",
    "64", "65", "2147483648", "-2147483649", "4294967296", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "18446744073709551616", "1" + "0" * 400, "-" + "9" * 4299, "9" * 6000,
)  # fmt: skip
"""out of range for some type, or of an unexpected type"""
ATOMS = (
    *NUMBERS, "null", '""', '"\\ud800"', '"\\u0000"', '"nan"', '"' + "x" * 5000 + '"', "[]", "{}", "[" * 3000,
    "[1e999]", '{"": 1e999}',
)  # fmt: skip
_PLACE = "\x00place\x00"


def noise() -> st.SearchStrategy[bytes]:
    """Draw bytes, single atoms, and JSON made of atoms."""
    atoms = st.sampled_from(ATOMS)
    nested = st.recursive(
        atoms | st.text(max_size=8).map(json.dumps),
        lambda inner: (
            st.lists(inner, max_size=4).map(lambda parts: f"[{','.join(parts)}]")
            | st.dictionaries(st.text(max_size=8).map(json.dumps), inner, max_size=4).map(
                lambda parts: "{" + ",".join(f"{key}:{part}" for key, part in parts.items()) + "}"
            )
        ),
        max_leaves=8,
    )
    return st.binary(max_size=64) | nested.map(str.encode)


def spoilt(*valid: Any) -> st.SearchStrategy[bytes]:
    """Draw one of these documents with one or two parts replaced, such as a number by one out of range."""

    @st.composite
    def draw(draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
        document: Any = copy.deepcopy(draw(st.sampled_from(valid)))
        atoms = []
        for _ in range(draw(st.integers(1, 2))):
            places = [*_places(document)]
            path = draw(st.sampled_from(places))
            document = _put(document, path, f"{_PLACE}{len(atoms)}")
            atoms.append(draw(st.sampled_from(ATOMS)))
        text = json.dumps(document)
        for number, atom in enumerate(atoms):
            text = text.replace(json.dumps(f"{_PLACE}{number}"), atom)
        return text.encode()

    return draw()


def hostile(*valid: Any) -> st.SearchStrategy[bytes]:
    """Draw hostile input for a parser of documents like these."""
    return noise() | spoilt(*valid)


def _places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _places(value, (*path, key))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from _places(value, (*path, number))


def _put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    document[path[0]] = _put(document[path[0]], path[1:], value)
    return document
