"""planaria trains language models on machines that fail, lag and lie.

The library's face; the commands are built on it. ``docs/python.md`` shows it by example. What it offers is imported
when it is first asked for: ``import planaria`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from planaria.api.recipes import configure as configure
    from planaria.api.recipes import streams as streams
    from planaria.api.run import Run as Run
    from planaria.api.run import load as load
    from planaria.api.training import train as train
    from planaria.common.errors import LedgerError as LedgerError
    from planaria.common.errors import RunStopped as RunStopped
    from planaria.common.errors import UserError as UserError
    from planaria.config.schema import RunConfig as RunConfig
    from planaria.lab.comparison import ComparisonResult as ComparisonResult
    from planaria.lab.comparison import compare as compare
    from planaria.report.live.listener import Step as Step
    from planaria.runtime.engine.inline import InlineEngine as InlineEngine

_HOMES = {
    "ComparisonResult": "planaria.lab.comparison",
    "InlineEngine": "planaria.runtime.engine.inline",
    "LedgerError": "planaria.common.errors",
    "Run": "planaria.api.run",
    "RunConfig": "planaria.config.schema",
    "RunStopped": "planaria.common.errors",
    "Step": "planaria.report.live.listener",
    "UserError": "planaria.common.errors",
    "compare": "planaria.lab.comparison",
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
