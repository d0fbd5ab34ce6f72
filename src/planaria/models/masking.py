"""A mask over a task vector: one bit per parameter keeps the tuned number or restores the parent's.

The idea is that of arXiv 2405.09055, whose masks are sampled and rescale kept numbers. These do neither: each number of
a masked model is bit for bit the tuned one or the parent's, and anyone with both models can apply the mask again.

A mask file names the tensors of the exported model in the order of their bits, so that it can be applied without
planaria. Files of the first format name none: their bits follow the sorted parameter names of a model in memory.
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

from planaria.common import documents
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.models.task_vectors import Named

START = 1.0
"""initial value of every logit: all numbers are kept"""
UNORDERED, FORMAT = "planaria mask 1", "planaria mask 2"
"""metadata keys of a file's note: formats without and with the order of bits"""
BITS = (
    "mask.N is for model N of 'tuned'. Its bits follow 'tensors', one after the other, row by row, eight to a byte, "
    "the most significant first. 1: the number of the tuned model; 0: that of the parent."
)

Mask = Mapping[str, Tensor]
"""bool tensors by name: true keeps the tuned number"""


class MaskNote(Record):
    """The models of a mask, by :func:`planaria.models.task_vectors.digest`, and the order of its bits."""

    safe: str
    tuned: tuple[str, ...]
    result: str
    """the masked model"""
    bits: str = ""
    """how to read the bits, in words"""
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """name in the exported file and shape of each tensor, in the order of the bits; empty in the first format"""


def keep_all_logits(like: Named) -> dict[str, Tensor]:
    """Return the logits of a mask that keeps all."""
    return {name: torch.full_like(tensor, START) for name, tensor in like.items()}


def binary_mask(logits: Named) -> dict[str, Tensor]:
    """Return m = 1[x > 0]."""
    return {name: x > 0 for name, x in logits.items()}


def straight_through(logits: Tensor, gradient: Tensor, contribution: Tensor) -> Tensor:
    """Return ∂L/∂x = ∂L/∂θ ⊙ c ⊙ σ'(x): the step 1[x > 0] gets the slope of σ (arXiv 1308.3432, section 4).

    ``gradient``: of the loss by the merged weights; ``contribution``: of the masked model to its parent.
    """
    slope = torch.sigmoid(logits)
    return gradient * contribution * slope * (1 - slope)


def select_by_mask(safe: Named, tuned: Named, mask: Mask) -> dict[str, Tensor]:
    """Return the tuned number where the mask is true, else the parent's."""
    return {name: torch.where(mask[name], tuned[name], safe[name]) for name in safe}


def merge_masked(safe: Named, contributions: Sequence[Named], masks: Sequence[Mask]) -> dict[str, Tensor]:
    """Return θ = θ₀ + Σ mᵢ ⊙ cᵢ for several models."""
    merged = {name: tensor.clone() for name, tensor in safe.items()}
    for contribution, mask in zip(contributions, masks, strict=True):
        for name in merged:
            merged[name] += torch.where(mask[name], contribution[name], 0.0)
    return merged


def random_mask(mask: Mask, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a random mask with the same density in every tensor, as a control."""
    drawn = {}
    for name, bits in mask.items():
        order = torch.randperm(bits.numel(), generator=generator).to(bits.device)
        drawn[name] = bits.flatten()[order].view(bits.shape)
    return drawn


def kept_shares(mask: Mask) -> dict[str, float]:
    """Return the share of each tensor that is kept."""
    return {name: float(bits.float().mean()) for name, bits in mask.items()}


def density(mask: Mask) -> float:
    """Return the share of all parameters that is kept."""
    return sum(int(bits.sum()) for bits in mask.values()) / sum(bits.numel() for bits in mask.values())


def pack(mask: Mask, order: Sequence[str]) -> Tensor:
    """Return the bits of the tensors in this order, eight per byte: uint8 [⌈parameters / 8⌉]."""
    bits = torch.cat([mask[name].flatten().cpu() for name in order])
    return torch.from_numpy(np.packbits(bits.numpy()))


def unpack(packed: Tensor, like: Named, order: Sequence[str]) -> dict[str, Tensor]:
    """Return the mask that :func:`pack` packed in this order, for tensors of the shapes of ``like``."""
    total = sum(like[name].numel() for name in order)
    bits = torch.from_numpy(np.unpackbits(packed.numpy(), count=total)).bool()
    mask, at = {}, 0
    for name in order:
        shape = like[name].shape
        mask[name] = bits[at : at + shape.numel()].view(shape).to(like[name].device)
        at += shape.numel()
    return mask


def to_bytes(masks: Sequence[Mask], note: MaskNote, exported: Mapping[str, str]) -> bytes:
    """Return the masks of one or more models as a safetensors file. ``exported``: parameter → name in an
    exported file."""
    order = sorted(masks[0], key=exported.__getitem__)
    tensors = tuple((exported[name], tuple(masks[0][name].shape)) for name in order)
    whole = note.model_copy(update={"bits": BITS, "tensors": tensors})
    about = json.dumps(whole.model_dump(mode="json"), sort_keys=True)  # one entry, as safetensors does not order them
    return save({f"mask.{number}": pack(mask, order) for number, mask in enumerate(masks)}, metadata={FORMAT: about})


def read_masks(file: Path, like: Named, exported: Mapping[str, str]) -> tuple[list[dict[str, Tensor]], MaskNote]:
    """Return the masks in a file for models of these shapes, and the file's note. ``exported`` as in :func:`to_bytes`.

    :raises UserError: if it is unreadable, not a mask, or for models of another shape.
    """
    length = -(-sum(tensor.numel() for tensor in like.values()) // 8)
    fix = "use the mask.safetensors of a repair of this model"
    try:
        with safe_open(file, framework="pt") as opened:
            about, keys = opened.metadata() or {}, {*opened.keys()}
            note_json = about.get(FORMAT, about.get(UNORDERED))
            if note_json is None:
                raise UserError(f"{file} is not a mask; {fix}")
            note = documents.parse_model(MaskNote, note_json, file, fix)
            names = [f"mask.{number}" for number in range(len(note.tuned))]
            if keys != {*names}:
                raise UserError(f"{file} has {len(keys)} masks for {len(names)} models; {fix}")
            for name in names:
                stored = opened.get_slice(name)
                if stored.get_dtype() != "U8" or list(stored.get_shape()) != [length]:
                    raise UserError(f"{file}: {name} has {stored.get_shape()} bytes, this model's have {length}; {fix}")
            order = _parameter_order(note, like, exported, f"{file}: ", fix) if FORMAT in about else sorted(like)
            return [unpack(opened.get_tensor(name), like, order) for name in names], note
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({str(error).splitlines()[0]}); {fix}") from None


def _parameter_order(note: MaskNote, like: Named, exported: Mapping[str, str], location: str, fix: str) -> list[str]:
    """Return the parameters in the order of the file."""
    names = {exported[name]: name for name in like}
    for name, shape in note.tensors:
        if name not in names:
            raise UserError(f"{location}has bits for {documents.quote(name)}, which this model does not have; {fix}")
        if shape != (ours := tuple(like[names[name]].shape)):
            raise UserError(f"{location}{name} has shape {list(shape)}, this model's has {list(ours)}; {fix}")
    order = [names[name] for name, _ in note.tensors]
    if len(order) != len(names) or len({*order}) != len(names):
        raise UserError(f"{location}names {len(order)} tensors, this model has {len(names)}; {fix}")
    return order
