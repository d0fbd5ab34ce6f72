"""The library's whole model in memory: weights are placed one by one, adapters over their base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from planaria.models.transformers.adapters import ADAPTER, base_name, base_reader, inject, merge
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.skeleton import decoder_layers, skeleton


def assemble(decoder: Decoder, read: Callable[[str], Tensor]) -> Any:
    """Return the library's model in evaluation mode; ``read`` returns the trained weights by global name.

    At most one tensor is in memory besides the model.

    :raises UserError: if weights cannot be read, or the base model of adapters is missing or has changed.
    """
    config = decoder.config
    model: Any = skeleton(config, decoder.attention, PLACE)
    base = read
    if decoder.lora is not None:
        inject(decoder_layers(model, config, PLACE)[1], decoder.lora)
        base = base_reader(decoder.lora, decoder.text)
    for name, parameter in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        tensor = read(name) if ADAPTER in name else base(base_name(name))
        weights = nn.Parameter(tensor.to(parameter.dtype), requires_grad=False)
        model.get_submodule(owner)._parameters[attribute] = weights
    model.tie_weights()
    model.generation_config = type(model.generation_config)()  # its defaults may forbid or penalise tokens
    return model.eval()


def assemble_merged(decoder: Decoder, read: Callable[[str], Tensor]) -> Any:
    """Return a trainable model in fp32, with adapters added to their matrices."""
    model = assemble(decoder, read).float()
    merge(model)
    return model.requires_grad_(True)
