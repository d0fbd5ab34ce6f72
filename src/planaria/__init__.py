"""planaria trains language models on machines that fail, lag and lie.

The public Python interface, on which the commands are built; ``docs/install.md`` has examples. Members are imported on
first use, so ``import planaria`` does not load torch.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.2.0"

if TYPE_CHECKING:
    from planaria.common.errors import LedgerError as LedgerError
    from planaria.common.errors import RunStopped as RunStopped
    from planaria.common.errors import UserError as UserError
    from planaria.config.schema import RunConfig as RunConfig
    from planaria.group.group import Group as Group
    from planaria.group.group import host as host
    from planaria.group.group import join as join
    from planaria.lab.compare.api import ComparisonResult as ComparisonResult
    from planaria.lab.compare.api import compare as compare
    from planaria.lab.reference.engine import ReferenceEngine as ReferenceEngine
    from planaria.report.observe.progress import Step as Step
    from planaria.runtime.api.configure import configure as configure
    from planaria.runtime.api.configure import streams as streams
    from planaria.runtime.api.run import Run as Run
    from planaria.runtime.api.run import load as load
    from planaria.runtime.api.training import train as train

_HOMES = {
    "ComparisonResult": "planaria.lab.compare.api",
    "Group": "planaria.group.group",
    "LedgerError": "planaria.common.errors",
    "ReferenceEngine": "planaria.lab.reference.engine",
    "Run": "planaria.runtime.api.run",
    "RunConfig": "planaria.config.schema",
    "RunStopped": "planaria.common.errors",
    "Step": "planaria.report.observe.progress",
    "UserError": "planaria.common.errors",
    "compare": "planaria.lab.compare.api",
    "configure": "planaria.runtime.api.configure",
    "host": "planaria.group.group",
    "join": "planaria.group.group",
    "load": "planaria.runtime.api.run",
    "streams": "planaria.runtime.api.configure",
    "train": "planaria.runtime.api.training",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planaria' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
