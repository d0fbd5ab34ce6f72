"""What all sections of a recipe have in common."""

from __future__ import annotations

from typing import get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

DERIVED: JsonDict = {"derived": True}
"""marks a field that follows from others (``json_schema_extra``): nobody sets it by itself"""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def section_of(annotation: object) -> type[Section] | None:
    """The section that a field of this type is; None for other fields."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def entry_of(annotation: object) -> type[Section] | None:
    """The section that every entry is of a field that is a table of any names; None for other fields."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None
