"""Base of all sections of a recipe, their settings, and the rejection of unknown keys."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from planaria.common.errors import UserError, suggestion
from planaria.config.options import NAME, choice_of

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


def settings_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section], str]]:
    """Yield each setting's dotted name, the section that has it, and its name there."""
    for name, field in section.model_fields.items():
        if field.json_schema_extra == DERIVED:
            continue
        if inner := section_of(field.annotation):
            yield from settings_of(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", section, name


def refuse_unknown(
    tree: Mapping[str, Any], section: type[Section], location: str, prefix: str = "", root: type[Section] | None = None
) -> None:
    """Raise UserError for the first key of ``tree`` that ``section`` does not have, before types are checked.

    :param root: the recipe's root section, in which similar settings are suggested; default: ``section``.
    """
    root = root or section
    for written, value in tree.items():
        key = present_name(section, written)
        if key not in section.model_fields:
            elsewhere = [name for name, _, last in settings_of(root) if last == key]
            option = as_option(key, section, prefix)
            fix = f"did you mean {elsewhere[0]!r}?" if elsewhere else suggestion(key, section.model_fields)
            fixes = [option, fix] if option and elsewhere else [option or fix]
            raise UserError(f"{location}: {prefix}{key}: unknown key; {'; or '.join(fixes)}")
        inner = section.model_fields[key].annotation
        if inner_section := section_of(inner):
            refuse_unknown(_keys(value, location, f"{prefix}{key}"), inner_section, location, f"{prefix}{key}.", root)
        elif entry := entry_of(inner):
            for name, content in _keys(value, location, f"{prefix}{key}").items():
                inside = f"{prefix}{key}.{name}"
                refuse_unknown(_keys(content, location, inside), entry, location, f"{inside}.", root)


def _keys(value: object, location: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{location}: {name} is a section; set its keys below [{name}]")
    return value


def as_option(key: str, section: type[Section], prefix: str) -> str:
    """Return a hint on writing ``key`` as an option of a choice; may be empty."""
    if NAME not in section.model_fields or get_close_matches(key, section.model_fields, cutoff=0.75):
        return ""
    return f"set an option of {prefix}{choice_of(section)} as {prefix}{NAME}.{key}"


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
