"""planaria trains language models on machines that fail, lag and lie.

The library's face; the commands are built on it. ``docs/python.md`` shows it by example. What it offers is imported
when it is first asked for: ``import planaria`` does not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from planaria.api.comparison import ComparisonResult as ComparisonResult
    from planaria.api.comparison import compare as compare
    from planaria.api.recipes import configure as configure
    from planaria.api.recipes import streams as streams
    from planaria.api.run import Run as Run
    from planaria.api.run import load as load
    from planaria.api.training import train as train
    from planaria.config import RunConfig as RunConfig
    from planaria.engine.inline import InlineEngine as InlineEngine
    from planaria.errors import LedgerError as LedgerError
    from planaria.errors import RunStopped as RunStopped
    from planaria.errors import UserError as UserError
    from planaria.observe.live.listener import Step as Step

_HOMES = {
    "ComparisonResult": "planaria.api.comparison",
    "InlineEngine": "planaria.engine.inline",
    "LedgerError": "planaria.errors",
    "Run": "planaria.api.run",
    "RunConfig": "planaria.config",
    "RunStopped": "planaria.errors",
    "Step": "planaria.observe.live.listener",
    "UserError": "planaria.errors",
    "compare": "planaria.api.comparison",
    "configure": "planaria.api.recipes",
    "load": "planaria.api.run",
    "streams": "planaria.api.recipes",
    "train": "planaria.api.training",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planaria' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """``planaria.compare`` is a function here and a package below, which imports would put in its place."""

    @property
    def compare(self) -> Any:
        return __getattr__("compare")

    @compare.setter
    def compare(self, package: ModuleType) -> None:
        del package


sys.modules[__name__].__class__ = _Face
