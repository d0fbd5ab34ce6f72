"""A causal decoder of ``transformers``, described by its config.json, and its stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import stage_layers
from planaria.models.seeding import seed_of
from planaria.models.transformers.adapters import (
    ADAPTER,
    Lora,
    base_name,
    base_reader,
    freeze,
    initialise_adapters,
    inject,
    load_base,
    merge,
)
from planaria.models.transformers.alike import kinds
from planaria.models.transformers.skeleton import (
    build_decoder,
    decoder_layers,
    initialise,
    layer_output,
    library_config,
    materialise,
    random_settings,
    read_config,
    skeleton,
)
from planaria.models.transformers.stages import ModelFrame, TransformersBlock, TransformersEnds, build

PLACE = "model.options.config"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class SkeletonFacts(NamedTuple):
    """Properties of a model, read from its skeleton."""

    path: str
    """name of the list of decoder layers, the prefix of their names"""
    in_tuple: int
    """size of the tuple that decoder layers return; 0: a tensor"""
    width: int
    """D, the width of hidden states"""
    vocab: int
    layers: int
    table: str
    """name of the embedding table's weights"""
    tied_head: str
    """name of the head's weights, if it is tied to the table; else empty"""
    parameters: int
    attention: str
    """the library's implementation that this model has"""
    kinds: tuple[int, ...]
    """kind of each layer; equal numbers for equal layers"""


@dataclass(frozen=True)
class Decoder:
    """A model without weights."""

    text: str
    """contents of its config.json"""
    attention: str = "sdpa"
    """the library's implementation of attention; eager where the model has no sdpa"""
    lora: Lora | None = None
    """adapters, if only these are trained"""

    @classmethod
    def of(cls, values: Mapping[str, Any], attention: str = "sdpa") -> Self:
        """Return the model of a config.json with these ``values``."""
        return cls(json.dumps(dict(values), sort_keys=True), attention)

    @property
    def values(self) -> dict[str, Any]:
        """Contents of config.json; UserError if it is not a JSON object."""
        try:
            content = json.loads(self.text)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(f"{PLACE} = {self.text!r:.80}: no such file; use the path of a model's config.json")
        return content

    @property
    def config(self) -> Any:
        """The library's configuration; UserError if the library rejects it."""
        return read_config(self.values, PLACE)

    @property
    def differences(self) -> Iterator[str]:
        """Differences from the library's training, one clause each."""
        config = library_config(self.values, PLACE)
        if zeroed := random_settings(config):
            settings = ", ".join(f"{name} = {was:g}" for name, was in zeroed.items())
            yield f"{settings} of its config.json are set to 0, so that a repeated step is the same step"
        if any(getattr(config, name, None) for name in _EXPERTS):
            yield "its experts are trained without a balancing loss"

    @property
    def facts(self) -> SkeletonFacts:
        """Facts about the model without adapters; UserError if it cannot be cut."""
        return _facts(self.base)

    @property
    def base(self) -> Decoder:
        """The model without adapters."""
        return replace(self, lora=None)

    def build(self, model: ModelConfig, stages: int, stage: int) -> TransformersBlock | TransformersEnds:
        """Build a stage with undefined weights on the current device; ``model`` determines the cut.

        :raises ValueError: if there is no such stage, or the layers do not divide into the stages.
        """
        if not 0 <= stage <= stages or model.why_uncuttable(stages):
            raise ValueError(f"no stage {stage} of {stages} in a model of {model.layers} layers")
        device = torch.get_default_device()
        dtype = torch.float32 if self.lora is None else self.lora.dtype
        frame = ModelFrame(self.config, self.attention, PLACE, self.facts.in_tuple, device.type != "meta", dtype)
        built = build(frame, stage_layers(model, stages, stage), stage)
        if self.lora is not None and len(built.layers):
            inject(built.layers, self.lora)
        if device.type != "meta":
            materialise(built, device)
            built.to(device)  # buffers
        if self.lora is not None:
            frozen = {name: self.global_name(model, stages, stage, base_name(name)) for name in freeze(built)}
            if device.type != "meta":
                load_base(built, self.lora, self.text, frozen)
                built.to(device)  # ties a frozen head again
        return built

    def initialise(
        self, built: TransformersBlock | TransformersEnds, model: ModelConfig, stages: int, stage: int, seed: int
    ) -> None:
        """Draw weights as the library does, each layer from ``seed`` and its number, so that every cut is alike."""
        if self.lora is not None:
            named = (
                (self.global_name(model, stages, stage, name), parameter)
                for name, parameter in built.named_parameters()
            )
            initialise_adapters(named, seed)
            return
        shell, *layers = built.parts
        for number, layer in [(-1, shell), *zip(stage_layers(model, stages, stage), layers, strict=True)]:
            torch.default_generator.manual_seed(seed_of(f"{seed} layer {number}"))
            initialise(built.frame.model, layer)

    def global_name(self, model: ModelConfig, stages: int, stage: int, local: str) -> str:
        """Return the library's name of a stage's parameter; ValueError for a name outside of its layers."""
        if local.startswith("whole."):
            return local.removeprefix("whole.")
        _, index, rest = local.split(".", 2)
        layers = stage_layers(model, stages, stage)
        if not 0 <= int(index) < len(layers):
            raise ValueError(f"{local}: stage {stage} has {len(layers)} layers")
        return f"{self.facts.path}.{layers[int(index)]}.{rest}"

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by global name; a tied head is not listed. Takes no memory."""
        flat = model.model_copy(update={"ends_layers": 0, "block_layers": None})
        with torch.device("meta"):
            stages = [self.build(flat, 1, stage) for stage in (0, 1)]
        return {
            self.global_name(flat, 1, stage, local): tuple(parameter.shape)
            for stage, built in enumerate(stages)
            for local, parameter in built.named_parameters()
        }

    def assemble(self, named: Mapping[str, Tensor]) -> Any:
        """Return the library's model with these weights, by global name.

        :raises RuntimeError: if a weight is missing or has no place.
        """
        model: Any = build_decoder(self.config, self.facts.attention)
        missing, unknown = model.load_state_dict(
            {name: tensor.detach() for name, tensor in named.items()}, strict=False
        )
        model.tie_weights()
        parameters = dict(model.named_parameters())
        if wrong := [*unknown, *(name for name in missing if name in parameters)]:
            raise RuntimeError(f"{wrong[0]} has no counterpart in the whole model")
        return model.train()


@lru_cache(maxsize=16)
def _facts(decoder: Decoder) -> SkeletonFacts:
    config = decoder.config
    model = skeleton(config, decoder.attention, PLACE, buffers=False)
    path, layers = decoder_layers(model, config, PLACE)
    in_tuple, width = layer_output(model, layers, PLACE)
    return SkeletonFacts(
        path,
        in_tuple,
        width,
        vocab=int(config.vocab_size),
        layers=int(config.num_hidden_layers),
        **_tables(model),
        parameters=sum(p.numel() for p in model.parameters()),
        attention=str(model.config._attn_implementation),  # type: ignore[union-attr]
        kinds=kinds(list(layers)),
    )


def _tables(model: Any) -> dict[str, str]:
    """Return the facts about a model's embedding and head."""
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    return {"table": names[id(table)], "tied_head": names[id(head)] if tied else ""}


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
