"""How vectors become shorter messages: a registry of compressors, each one file."""

from __future__ import annotations

from planaria.config.registry import Registry
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.plain import Plain
from planaria.exchange.compress.quantised import Quantised
from planaria.exchange.compress.randk import RandK
from planaria.exchange.compress.sign import Sign
from planaria.exchange.compress.topk import TopK

COMPRESSORS: Registry[Compressor] = Registry(
    "compressor",
    "exchange.compress.kind",
    Compressor,  # type: ignore[type-abstract]
    {"plain": Plain, "quantised": Quantised, "topk": TopK, "randk": RandK, "sign": Sign},
    place="exchange.compress",
)
