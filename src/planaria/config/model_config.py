"""The model: its family and sizes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Natural, Positive
from planaria.config.options import ChoiceName, Options
from planaria.config.section import DERIVED, Section


def even_layers(layers: int, stages: int) -> tuple[int, ...] | None:
    """Return the layers of each block stage, distributed evenly, or None if some stage would have none.

    >>> even_layers(10, 4)
    (3, 3, 2, 2)
    """
    base, larger = divmod(layers, stages)
    return None if base < 1 else (base + 1,) * larger + (base,) * (stages - larger)


class AdapterConfig(Section):
    rank: Natural = 0
    """rank of adapters in decoder layers, if only these are trained (LoRA, arXiv 2106.09685); 0: all weights are"""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """scale of adapters, divided by their rank"""
    targets: str = "linear"
    """matrices with adapters, by the last parts of their names and separated by commas; linear: all of the layers"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """type of the frozen weights in memory and of hidden states within a stage; adapters are fp32"""
    base: Annotated[str, Field(json_schema_extra=DERIVED)] = ""
    """folder of the frozen weights; derived from train.start"""
    base_sha256: Annotated[str, Field(json_schema_extra=DERIVED)] = ""
    """digest of the files in base"""


GROUP = "group"
"""family of the members of a group, which hold their own whole models (``planaria.host``)"""


class SubspaceConfig(Section):
    rank: Natural
    """k: numbers of a hidden state between stages"""
    seed: Natural
    """seed of the run, from which the subspace is drawn"""


class ModelConfig(Section):
    family: ChoiceName = "llama"
    """architecture of the stages: llama; transformers, whose sizes come from train.start or options.config; or
    'module:Class' (docs/extend.md). Families share vocab, dim, layers and context, and interpret the other sizes"""
    options: Options = Options()
    """options of the family"""
    vocab: bounds.Vocab = 2048
    """rows of the embedding table; at least the size of the tokenizer's vocabulary"""
    dim: bounds.Width = 128
    """width of the residual stream"""
    layers: bounds.Layers = 4
    """decoder layers in all stages"""
    ends_layers: Natural = 0
    """decoder layers, the first ones, in the ends stage; routes do not skip or swap them"""
    block_layers: Annotated[tuple[Positive, ...] | None, Field(strict=False, json_schema_extra=DERIVED)] = None
    """decoder layers of each block stage; derived from pipeline.layers, equal by default"""
    heads: bounds.Heads = 4
    """query heads"""
    kv_heads: bounds.Heads | None = None
    """key and value heads (grouped-query attention); as many as heads by default"""
    hidden: bounds.Width = 352
    """width of the SwiGLU feed-forward layer"""
    context: bounds.Context = 128
    """tokens in one sample, the longest sequence in training"""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """base of the rotary position encoding"""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """epsilon of RMSNorm"""
    tied: bool = True
    """share the embedding table with the language-model head"""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """standard deviation of the initial weights"""
    embedding_std: Annotated[float | None, Field(gt=0)] = None
    """standard deviation of the initial embedding; init_std by default"""
    share: Positive = 1
    """number of decoder-layer weights that share one stored number, which is sent and updated once (arXiv 2310.11611)
    """
    share_over: Literal["layer", "model"] = "layer"
    """one shared array for each layer; or one for the model, held by every stage, so that any stage can restore all
    others"""
    lora: AdapterConfig = AdapterConfig()
    subspace: Annotated[SubspaceConfig | None, Field(json_schema_extra=DERIVED)] = None
    """subspace of the residual stream; derived from pipeline.wire and seed"""

    @property
    def kv(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def why_uncuttable(self, stages: int) -> str:
        """Return why the layers cannot be split into this many block stages, or an empty string if they can."""
        left, by_stage = self.layers - self.ends_layers, self.block_layers
        if not stages:
            return ""
        less = f", less model.ends_layers = {self.ends_layers}," if self.ends_layers else ""
        if by_stage is not None and (len(by_stage), sum(by_stage)) != (stages, left):
            return (
                f"pipeline.layers = {list(by_stage)} are {sum(by_stage)} layers in {len(by_stage)} stages; "
                f"model.layers = {self.layers}{less} and pipeline.stages = {stages} require {left} in {stages}"
            )
        if by_stage is None and (left < stages or left % stages):
            fix = (
                f"set model.ends_layers = {self.layers % stages}" if self.layers >= stages else "lower pipeline.stages"
            )
            return f"model.layers = {self.layers}{less} does not divide into pipeline.stages = {stages}; {fix}"
        return ""

    @property
    def one_array(self) -> bool:
        """Whether every stage stores all of the model's numbers."""
        return self.share_over == "model"

    @property
    def written(self) -> int:
        """Rows of the stored matrices that write to the residual stream."""
        return self.dim if self.subspace is None else self.subspace.rank

    @property
    def dense(self) -> Self:
        """Return the same shape with whole matrices."""
        return self.model_copy(update={"share": 1, "share_over": "layer", "subspace": None})

    @property
    def factored(self) -> str:
        """The setting under which stored parameters are not complete matrices; empty if there is none."""
        if self.subspace is not None:
            return "pipeline.wire = { kind = 'subspace' }"
        return f"model.share = {self.share}" if self.share > 1 else ""

    @model_validator(mode="after")
    def _check_sharing(self) -> Self:
        stored = self.dim * self.hidden * 3 // self.share
        if self.share > 1 and stored < self.dim:
            raise ValueError(
                f"model.share = {self.share} leaves a layer of model.dim = {self.dim} fewer numbers than that"
            )
        if self.share > 1 and self.family != "llama":
            raise ValueError(
                f"model.share = {self.share}: only layers of model.family = 'llama' are cut from one array"
            )
        if self.one_array and self.share == 1:
            raise ValueError(
                "model.share_over = 'model' shares nothing with model.share = 1; set model.share = 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.family == "transformers":  # its configuration has them
            if self.embedding_std is not None:
                raise ValueError(
                    "model.embedding_std: model.family = 'transformers' has its own initial weights; remove it"
                )
            return self
        if self.dim % self.heads:
            raise ValueError(f"model.dim = {self.dim} does not divide into model.heads = {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.dim / model.heads = {self.head_dim} is odd; rotary positions need it even")
        if self.heads % self.kv:
            raise ValueError(f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv}")
        return self
