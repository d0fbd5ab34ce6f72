"""Options of a part chosen by name, kept as written until the chosen class validates them.

A section such as ``[recovery]`` names its choice and has the choice's options in ``[recovery.options]``. The chosen
class declares their names, types and bounds (``config/registry.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

NAME = "options"
"""field that holds them, in every section that has some"""
_CHOICE = "names a choice"
ChoiceName = Annotated[str, _CHOICE]
"""type of the field that names a choice, in the section of its options"""


def choice_of(section: type[BaseModel]) -> str | None:
    """Return the field of a section that names a choice, or None without one."""
    return next((name for name, field in section.model_fields.items() if _CHOICE in field.metadata), None)


class Options(Mapping[str, Any]):
    """Names and JSON values: immutable and hashable, so that sections with options are too."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._text = json.dumps(dict(values or {}), sort_keys=True, default=str)

    def __getitem__(self, name: str) -> Any:
        return json.loads(self._text)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(json.loads(self._text))

    def __len__(self) -> int:
        return len(json.loads(self._text))

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Options):
            return self._text == other._text
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return repr(dict(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        mapping_schema = core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema())
        instance_schema = core_schema.is_instance_schema(cls)
        parsed = core_schema.no_info_after_validator_function(cls, mapping_schema)
        return core_schema.json_or_python_schema(
            json_schema=parsed,
            python_schema=core_schema.union_schema([instance_schema, parsed]),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )
