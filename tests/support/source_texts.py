"""Read a source, and the message with which one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data.corpus import iter_documents


def texts(source: Path | str, field: str = "text", **options: Any) -> list[str]:
    return list(iter_documents(DataConfig(source=str(source), field=field, **options)))


def refusal(source: Path | str, field: str = "text") -> str:
    """Return the one line with which reading a source fails."""
    with pytest.raises(UserError) as caught:
        texts(source, field)
    assert "\n" not in str(caught.value)
    return str(caught.value)
