"""The family ``transformers``: any causal decoder of the library, cut into stages without code for its architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.activations import PassBytes, PassMode
from planaria.models.family import Family, TextModel
from planaria.models.foreign_weights import WeightsFile
from planaria.models.transformers.alike import unlike_stages
from planaria.models.transformers.check import require_cuttable
from planaria.models.transformers.decoder import Decoder, assemble
from planaria.models.transformers.files import open_decoder
from planaria.models.transformers.generation import LibraryText
from planaria.models.transformers.recipe_section import lora_of, section_from_config, settings_beside
from planaria.models.transformers.stage_costs import layer_parameters, layer_work, pass_bytes
from planaria.models.transformers.stages import TransformersBlock, TransformersEnds


class TransformersFamily(Family):
    """A causal decoder of ``transformers``."""

    config: str
    """the model's config.json: its path, or its contents, which a run's own configuration has"""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """the library's implementation of attention; eager where the model has no sdpa"""

    has_global_names: ClassVar[bool] = True
    completes_texts: ClassVar[bool] = True
    interchangeable: ClassVar[bool] = False
    modules_to_preload: ClassVar[tuple[str, ...]] = ("transformers.models.auto.modeling_auto",)
    accepts_document_mask: ClassVar[bool] = True
    supports_adapters: ClassVar[bool] = True

    def accepts_shorter_samples(self) -> bool:
        return "longrope" not in self.config  # its frequencies depend on the number of tokens

    def decoder(self, config: ModelConfig) -> Decoder:
        """Return the model that ``config`` describes."""
        return Decoder(self.config, self.attention, lora_of(config))

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> TransformersBlock | TransformersEnds:
        """:raises ValueError: if there is no such stage, or the layers do not divide into the stages."""
        return self.decoder(config).build(config, stages, stage)

    def initialise(self, built: nn.Module, config: ModelConfig, stages: int, stage: int, seed: int) -> None:
        assert isinstance(built, TransformersBlock | TransformersEnds)
        self.decoder(config).initialise(built, config, stages, stage, seed)

    @classmethod
    def completed_section(cls, stated: Mapping[str, Any]) -> dict[str, Any]:
        return section_from_config(stated)

    @classmethod
    def settings_beside(cls, folder: Path, named: str, own: ModelConfig, stated: Mapping[str, Any]) -> dict[str, Any]:
        return settings_beside(folder, named, own, stated)

    @classmethod
    def open_folder(cls, folder: Path) -> WeightsFile:
        return open_decoder(folder)

    def text_model(self, config: ModelConfig, read: Callable[[str], Tensor], context: int) -> TextModel:
        return LibraryText(assemble(self.decoder(config), read), context)

    def global_name(self, config: ModelConfig, stages: int, stage: int, local: str) -> str:
        return self.decoder(config).global_name(config, stages, stage, local)

    def tables(self, config: ModelConfig) -> tuple[str, str]:
        facts = self.decoder(config).facts
        return facts.table, facts.tied_head

    def check(self, config: ModelConfig, stages: int, masked: bool) -> None:
        """Compare a small model of the architecture, cut into stages, with the library's whole one.

        :raises UserError: if they differ, or sizes in ``config`` are not the model's.
        """
        facts = self.decoder(config).facts
        for name, size in (("vocab", facts.vocab), ("dim", facts.width), ("layers", facts.layers)):
            if getattr(config, name) != size:
                raise UserError(f"model.{name} = {getattr(config, name)}: the model's config has {size}; remove it")
        decoder = self.decoder(config).base
        positions = getattr(decoder.config, "max_position_embeddings", None)
        if require_cuttable(decoder, masked).longest and isinstance(positions, int) and config.context > positions:
            raise UserError(f"model.context = {config.context}: the model has {positions} positions; use at most these")
        if config.lora.rank and not config.lora.base:
            raise UserError("model.lora.rank: adapters need trained weights under them; set train.start")
        if config.lora.rank:
            with torch.device("meta"):
                self.build_stage(config, stages, 1)

    def warnings(self, config: ModelConfig) -> list[str]:
        return [*self.decoder(config).differences]

    def pass_bytes(self, config: ModelConfig, stages: int, stage: int, passes: PassMode) -> PassBytes | None:
        return pass_bytes(self.decoder(config), config, stages, stage, passes)

    def layer_work(self, config: ModelConfig) -> tuple[float, ...]:
        return layer_work(self.decoder(config), config)

    def layer_sizes(self, config: ModelConfig) -> tuple[int, ...]:
        return layer_parameters(self.decoder(config), config)

    def stage_difference(self, config: ModelConfig, stages: int) -> str:
        if config.lora.rank:
            return "adapters are known only up to a change of basis, so no stage's can be made from others'"
        return unlike_stages(self.decoder(config).facts.kinds, config, stages)
