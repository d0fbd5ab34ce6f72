"""Weights loaded by the library itself, for files with other names than those in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.models.transformers.skeleton import in_one_line, read_config, skeleton


@lru_cache(maxsize=1)
def load_weights(folder: Path, text: str, fix: str = "download it again") -> dict[str, Tensor]:
    """Load a folder's weights as the library does, by its names in memory; ``text``: the model's config.json.

    :raises UserError: if tensors are missing, ending with ``fix``, or have no place in the model.
    """
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with hide_progress():
            model, report = load(
                folder,
                config=read_config(json.loads(text), str(folder)),
                dtype=torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except UserError:
        raise
    except Exception as error:  # the library may raise anything
        raise UserError(f"{folder}: transformers cannot load it: {in_one_line(error)}") from None
    if missing := sorted(report["missing_keys"]):  # the library draws random ones
        raise UserError(f"{folder}: weights: {missing[0]} is missing; {fix}")
    if unknown := sorted(report["unexpected_keys"]):
        raise UserError(f"{folder}: weights: {unknown[0]} has no place in the model that config.json describes")
    _require_known_buffers(model, f"{folder}: weights")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _require_known_buffers(model: Any, location: str) -> None:
    """Refuse buffers, such as a router's biases, which stages would lose.

    Buffers that follow from config.json are allowed.
    """
    kept = model.state_dict().keys()
    buffers = dict(skeleton(model.config, model.config._attn_implementation, location).named_buffers())
    for name, buffer in model.named_buffers():
        if name in kept and not torch.equal(buffer, buffers[name].to(buffer.dtype)):
            raise UserError(f"{location}: {name} is a buffer, not a parameter, and its values would be lost")


@contextmanager
def hide_progress() -> Iterator[None]:
    """Hide the library's progress bars and reports."""
    from transformers.utils import logging

    shown: Any = logging
    before, level = shown.is_progress_bar_enabled(), shown.get_verbosity()
    shown.disable_progress_bar()
    shown.set_verbosity_error()
    try:
        yield
    finally:
        shown.set_verbosity(level)
        if before:
            shown.enable_progress_bar()
