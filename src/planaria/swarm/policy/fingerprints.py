"""Sixteen hex digits for what peers must agree on before they compare numbers: tokenizers and weights."""

from __future__ import annotations

import hashlib
import json

from torch import nn

from planaria.data.tokenizer import Tokenizer
from planaria.model.fusing import digest
from planaria.swarm.policy.base import Policy

_WITHOUT = ("version", "truncation", "padding", "post_processor")
"""parts of a tokenizer.json that neither our encoding nor decoding ever asks"""


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that read every text as the same ids, write every id as the same text and end with one id.

    The converse does not hold: the same tokenizer written down by another library may have another fingerprint.
    """
    parts = {key: part for key, part in json.loads(tokenizer.to_json()).items() if key not in _WITHOUT}
    content = json.dumps([tokenizer.end, parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def weights_fingerprint(module: nn.Module) -> str:
    """The first 16 hex digits of :func:`weights_digest`: enough against accidents, not against a forger."""
    return weights_digest(module)[:16]


def weights_digest(module: nn.Module) -> str:
    """Of every parameter, trained or not: :func:`planaria.model.fusing.digest`."""
    return digest(dict(module.named_parameters()))


def held(policy: Policy) -> str:
    """What two peers have in common if they find every completion equally likely: weights, and how they ask."""
    weights, asking = weights_fingerprint(policy.module), getattr(policy, "asking", None)
    return weights if asking is None else hashlib.sha256(f"{weights} {asking.fingerprint}".encode()).hexdigest()[:16]
