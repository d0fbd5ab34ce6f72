"""What all sections of a recipe have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

DERIVED: JsonDict = {"derived": True}
"""marks a field that follows from others (``json_schema_extra``): nobody sets it by itself"""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
