"""Compression of vectors: a registry of compressors.

Error feedback, which compensates their losses, is in ``feedback.py`` and ``estimates.py``.
"""

from __future__ import annotations

from planaria.config.registry import Registry
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.dense import Plain, Quantised, Sign
from planaria.exchange.compress.sparse import RandK, TopK

COMPRESSORS: Registry[Compressor] = Registry(
    "compressor",
    "exchange.compress.kind",
    Compressor,  # type: ignore[type-abstract]
    {"plain": Plain, "quantised": Quantised, "topk": TopK, "randk": RandK, "sign": Sign},
    place="exchange.compress",
)
