"""What makes up for what compressors lose: a registry of methods."""

from __future__ import annotations

from planaria.config.registry import Registry
from planaria.exchange.feedback.base import Feedback
from planaria.exchange.feedback.econtrol import EControl
from planaria.exchange.feedback.ef14 import EF14, Naive
from planaria.exchange.feedback.ef21 import EF21
from planaria.exchange.feedback.ef21w import EF21W

FEEDBACKS: Registry[Feedback] = Registry(
    "feedback",
    "exchange.compress.feedback",
    Feedback,  # type: ignore[type-abstract]
    {"none": Naive, "ef14": EF14, "ef21": EF21, "ef21w": EF21W, "econtrol": EControl},
    place="exchange.compress",
)
