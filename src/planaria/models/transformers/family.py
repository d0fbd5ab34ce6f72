"""The family ``transformers``: any causal decoder of the library, cut into stages without code for its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.config.section import DERIVED
from planaria.models.activations import PassBytes, Passes
from planaria.models.family import Family
from planaria.models.transformers.adapters import LINEAR, Lora
from planaria.models.transformers.alike import unlike_stages
from planaria.models.transformers.check import require_cuttable
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.skeleton import read_config
from planaria.models.transformers.stages import Block, Ends
from planaria.models.transformers.weighing import layer_parameters, layer_work, pass_bytes


class TransformersFamily(Family):
    """A causal decoder of ``transformers``."""

    config: str
    """the model's config.json: its path, or its contents, which a run's own configuration has"""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """the library's implementation of attention; eager where the model has no sdpa"""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """rank of adapters, if only these are trained (LoRA, arXiv 2106.09685); 0: all weights are"""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """scale of adapters, divided by their rank"""
    lora_targets: str = LINEAR
    """matrices with adapters, by the last parts of their names and separated by commas; linear: all of the layers"""
    lora_base: Literal["fp32", "bf16"] = "fp32"
    """type of the frozen weights in memory and of hidden states within a stage; adapters are fp32"""
    base: Annotated[str, Field(json_schema_extra=DERIVED)] = ""
    """folder of the weights under adapters; derived from train.start"""
    base_sha256: Annotated[str, Field(json_schema_extra=DERIVED)] = ""
    """digest of the files in base"""

    named: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    interchangeable: ClassVar[bool] = False
    preload: ClassVar[tuple[str, ...]] = ("transformers.models.auto.modeling_auto",)
    masks: ClassVar[bool] = True

    @property
    def decoder(self) -> Decoder:
        targets = tuple(name.strip() for name in self.lora_targets.split(","))
        lora = Lora(self.lora_rank, self.lora_alpha, targets, self.base, self.base_sha256, self.lora_base)
        return Decoder(self.config, self.attention, lora if self.lora_rank else None)

    @property
    def based(self) -> bool:
        return self.lora_rank > 0

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> Block | Ends:
        """:raises ValueError: if there is no such stage, or the layers do not divide into the stages."""
        return self.decoder.build(config, stages, stage)

    def initialise(self, built: nn.Module, config: ModelConfig, stages: int, stage: int, seed: int) -> None:
        assert isinstance(built, Block | Ends)
        self.decoder.initialise(built, config, stages, stage, seed)

    def global_name(self, config: ModelConfig, stages: int, stage: int, local: str) -> str:
        return self.decoder.global_name(config, stages, stage, local)

    def tables(self, config: ModelConfig) -> tuple[str, str]:
        facts = self.decoder.facts
        return facts.table, facts.tied_head

    def check(self, config: ModelConfig, stages: int, masked: bool) -> None:
        """Compare a small model of the architecture, cut into stages, with the library's whole one.

        :raises UserError: if they differ, or sizes in ``config`` are not the model's.
        """
        found = self.decoder.facts
        for name, value in (("vocab", found.vocab), ("dim", found.width), ("layers", found.layers)):
            if getattr(config, name) != value:
                raise UserError(f"model.{name} = {getattr(config, name)}: the model's config has {value}; leave it out")
        decoder = self.decoder.base
        positions = getattr(decoder.config, "max_position_embeddings", None)
        if require_cuttable(decoder, masked).longest and isinstance(positions, int) and config.context > positions:
            raise UserError(f"model.context = {config.context}: the model has {positions} positions; use at most these")
        settings = ("lora_alpha", "lora_targets", "lora_base")
        if not self.lora_rank and (unused := next((name for name in settings if name in self.model_fields_set), "")):
            raise UserError(f"model.options.{unused}: has no effect without lora_rank; leave it out")
        if self.lora_rank and not self.base:
            raise UserError("model.options.lora_rank: adapters need trained weights under them; give train.start")
        if self.lora_rank:
            with torch.device("meta"):
                self.build_stage(config, stages, 1)

    def warnings(self, config: ModelConfig) -> list[str]:
        return [*self.decoder.differences]

    def pass_bytes(self, config: ModelConfig, stages: int, stage: int, passes: Passes) -> PassBytes | None:
        return pass_bytes(self.decoder, config, stages, stage, passes)

    def layer_work(self, config: ModelConfig) -> tuple[float, ...]:
        return layer_work(self.decoder, config)

    def layer_sizes(self, config: ModelConfig) -> tuple[int, ...]:
        return layer_parameters(self.decoder, config)

    def unlike(self, config: ModelConfig, stages: int) -> str:
        if self.lora_rank:
            return "adapters are known only up to a change of basis, so no stage's can be made from others'"
        return unlike_stages(self.decoder.facts.kinds, config, stages)


def decoder_of(config: ModelConfig) -> Decoder:
    """Return the decoder of a model of the family ``transformers``."""
    return TransformersFamily.model_validate(dict(config.options)).decoder


def model_section(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the settings of ``[model]`` for the config.json ``place`` with these ``values``.

    :raises UserError: if the model cannot be cut.
    """
    if isinstance(values.get("text_config"), Mapping):  # a model that takes pictures: only its text model is exported
        text = read_config(values, place)
        values = {name: value for name, value in text.to_dict().items() if not name.startswith("_")}
        values |= {"model_type": text.model_type}
    decoder = Decoder.of(values)
    try:
        found = decoder.facts
    except UserError as error:
        raise UserError(str(error).replace(PLACE, place, 1)) from None
    sizes = {"vocab": found.vocab, "dim": found.width, "layers": found.layers, "tied": bool(found.tied_head)}
    context = int(values.get("max_position_embeddings") or values.get("n_positions") or 2048)
    return {"family": "transformers", "options": {"config": decoder.text}, "context": context, **sizes}
