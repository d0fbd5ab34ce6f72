"""Sixteen hex digits for what peers must agree on before they compare numbers: tokenizers and weights."""

from __future__ import annotations

import hashlib
import json

from torch import nn

from planaria.data.tokenizer import Tokenizer
from planaria.models.fusing import digest
from planaria.swarm.policy.base import Policy, encode_prompt

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
    """Of every parameter, trained or not: :func:`planaria.models.fusing.digest`."""
    return digest(dict(module.named_parameters()))


def held(policy: Policy) -> str:
    """Equal for two peers that find every completion equally likely: the same weights and prompts."""
    parts = [weights_fingerprint(policy.module)]
    if (asking := getattr(policy, "asking", None)) is not None:
        parts.append(asking.fingerprint)
    if before := encode_prompt(policy, ""):
        parts.append(f"begins with {before}")
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
