"""Base of all sections of a recipe."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

DERIVED: JsonDict = {"derived": True}
"""marks a derived field (``json_schema_extra``), which users do not set"""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def formerly(name: str, *was: str) -> Any:
    """Return the metadata of a field ``name`` that recipes of older versions call ``was``."""
    return Field(validation_alias=AliasChoices(name, *was))


def present_name(section: type[BaseModel], key: str) -> str:
    """Return the present name of the field that recipes of older versions call ``key``; ``key`` if there is none."""
    for name, field in section.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices) and key in field.validation_alias.choices:
            return name
    return key


def section_of(annotation: object) -> type[Section] | None:
    """Return the section class of a field of this type, or None for other fields."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def entry_of(annotation: object) -> type[Section] | None:
    """Return the section class of the entries of a table with free names; None for others."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def meaning(section: type[BaseModel], field: str) -> str:
    """Return the description of a field: pydantic's, the docstring below it, or an empty string if there is neither."""
    if text := section.model_fields[field].description:
        return text
    return next((text for owner in section.__mro__ if (text := _docstrings(owner).get(field))), "")


@cache
def _docstrings(owner: type) -> Mapping[str, str]:
    """Return field → docstring. Read on demand, because pydantic would take half a second in every process."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):  # no source, or source changed after import
        return {}
    docstrings = {}
    for definition in tree.body:
        for before, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
            match before, below:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                    docstrings[field] = inspect.cleandoc(text)
    return docstrings
