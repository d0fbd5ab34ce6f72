"""A mask over what a model learned: one bit for each parameter, which says whether it stays or goes back.

The idea is that of arXiv 2405.09055. Its masks are drawn, and rescale what they keep; these are neither, so that of one
model every number is bit for bit the tuned one or its parent's, and everybody who has both can apply the mask again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from planaria import documents
from planaria.documents import Record
from planaria.errors import UserError
from planaria.model.fusing import Named

START = 1.0
"""of every logit: at first all is kept"""
FORMAT = "planaria mask 1"

Mask = Mapping[str, Tensor]
"""bool tensors by name: true where the tuned number stays"""


class Note(Record):
    """What a mask belongs to, by :func:`planaria.model.fusing.digest`."""

    safe: str
    tuned: tuple[str, ...]
    result: str
    """what comes of it"""


def begun(like: Named) -> dict[str, Tensor]:
    """Logits of a mask that keeps all."""
    return {name: torch.full_like(tensor, START) for name, tensor in like.items()}


def hard(logits: Named) -> dict[str, Tensor]:
    """m = 1[x > 0]."""
    return {name: x > 0 for name, x in logits.items()}


def straight_through(logits: Tensor, gradient: Tensor, contribution: Tensor) -> Tensor:
    """∂L/∂x = ∂L/∂θ ⊙ c ⊙ σ'(x): the step of 1[x > 0] has the slope of σ (arXiv 1308.3432, section 4).

    ``gradient``: of the loss by the merged weights; ``contribution``: what the masked model adds to its parent.
    """
    slope = torch.sigmoid(logits)
    return gradient * contribution * slope * (1 - slope)


def chosen(safe: Named, tuned: Named, mask: Mask) -> dict[str, Tensor]:
    """Of each coordinate the tuned number where the mask is true, else the safe one: bit for bit one of both."""
    return {name: torch.where(mask[name], tuned[name], safe[name]) for name in safe}


def blended(safe: Named, contributions: Sequence[Named], masks: Sequence[Mask]) -> dict[str, Tensor]:
    """θ = θ₀ + Σ mᵢ ⊙ cᵢ, of several models at once."""
    found = {name: tensor.clone() for name, tensor in safe.items()}
    for contribution, mask in zip(contributions, masks, strict=True):
        for name in found:
            found[name] += torch.where(mask[name], contribution[name], 0.0)
    return found


def shuffled(mask: Mask, generator: torch.Generator) -> dict[str, Tensor]:
    """A mask that keeps as much of every tensor, but at random: what does *which* is kept bring?"""
    found = {}
    for name, bits in mask.items():
        order = torch.randperm(bits.numel(), generator=generator).to(bits.device)
        found[name] = bits.flatten()[order].view(bits.shape)
    return found


def kept(mask: Mask) -> dict[str, float]:
    """The share of each tensor that stays."""
    return {name: float(bits.float().mean()) for name, bits in mask.items()}


def density(mask: Mask) -> float:
    """The share of all parameters that stays."""
    return sum(int(bits.sum()) for bits in mask.values()) / sum(bits.numel() for bits in mask.values())


def pack(mask: Mask) -> Tensor:
    """All bits in the order of names, eight a byte: uint8 [⌈parameters / 8⌉]."""
    bits = torch.cat([mask[name].flatten().cpu() for name in sorted(mask)])
    return torch.from_numpy(np.packbits(bits.numpy()))


def unpack(packed: Tensor, like: Named) -> dict[str, Tensor]:
    """What :func:`pack` made, for tensors of these shapes."""
    total = sum(tensor.numel() for tensor in like.values())
    bits = torch.from_numpy(np.unpackbits(packed.numpy(), count=total)).bool()
    found, at = {}, 0
    for name in sorted(like):
        shape = like[name].shape
        found[name] = bits[at : at + shape.numel()].view(shape).to(like[name].device)
        at += shape.numel()
    return found


def to_bytes(masks: Sequence[Mask], note: Note) -> bytes:
    """The masks of one model or several as a safetensors file."""
    about = json.dumps(note.model_dump(mode="json"), sort_keys=True)  # one entry: safetensors has no order of several
    return save({f"mask.{number}": pack(mask) for number, mask in enumerate(masks)}, metadata={FORMAT: about})


def read_masks(file: Path, like: Named) -> tuple[list[dict[str, Tensor]], Note]:
    """The masks in a file for models of these shapes, and what they belong to.

    :raises UserError: when it cannot be read, is none, or is for models of another size.
    """
    length = -(-sum(tensor.numel() for tensor in like.values()) // 8)
    mend = "give the mask.safetensors of a repair of this model"
    try:
        with safe_open(file, framework="pt") as opened:
            about, names = opened.metadata() or {}, sorted(opened.keys())
            if FORMAT not in about:
                raise UserError(f"{file}: is no mask; {mend}")
            note = documents.parse_model(Note, about[FORMAT], file, mend)
            if len(names) != len(note.tuned) or names != [f"mask.{number}" for number in range(len(names))]:
                raise UserError(f"{file}: has {len(names)} masks for {len(note.tuned)} models; {mend}")
            for name in names:
                part = opened.get_slice(name)
                if part.get_dtype() != "U8" or list(part.get_shape()) != [length]:
                    raise UserError(f"{file}: {name} has {part.get_shape()} bytes, this model's have {length}; {mend}")
            return [unpack(opened.get_tensor(name), like) for name in names], note
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]}); {mend}") from None
