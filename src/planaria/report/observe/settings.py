"""A run's configuration for trackers: flat and without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from planaria.common.filesystems import is_url, shown
from planaria.config.schema import RunConfig

Setting = str | int | float | bool | None

SECRET = "***"
_SECRETS = re.compile(r"(?:^|_)(?:key|keys|token|secret|password|passwd|passphrase|credential|credentials|auth)$", re.I)
"""endings of the names of settings that hold secrets"""


def settings(config: RunConfig) -> dict[str, Setting]:
    """Return all settings by dotted name, lists as text.

    Secrets are replaced by ``***``; URLs lose user, password and query.
    """
    return dict(_flat(config.model_dump(mode="json"), ""))


def _flat(table: Mapping[str, Any], location: str) -> Iterator[tuple[str, Setting]]:
    for key, value in table.items():
        name = f"{location}{key}"
        if value and not isinstance(value, bool) and _SECRETS.search(str(key)):
            yield name, SECRET
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, _plain(value)


def _plain(value: Any) -> Setting:
    if isinstance(value, list):
        return "[" + ", ".join(str(dict(_flat(v, "")) if isinstance(v, Mapping) else _plain(v)) for v in value) + "]"
    if isinstance(value, str) and is_url(value):
        return re.sub(r"\?[^\s,]*", f"?{SECRET}", shown(value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)
