"""What a model reads: one source of text, or a mixture of several by weight."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction
from planaria.config.names import Key
from planaria.config.section import Section


class SourceConfig(Section):
    """One source of a mixture: ``[data.mixture.NAME]``."""

    source: str
    """as data.source"""
    weight: bounds.Weight
    """the source's share of the samples is this, divided by the sum of all weights"""
    field: str | None = None
    """as data.field, which it is unless given"""
    most: bounds.Positive | None = None
    """as data.most"""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """how often a run may read all of it, at most; as often as it takes unless given"""


class DataConfig(Section):
    source: str = "stdlib"
    """'stdlib' (Python's own source), a file or folder of text or records (.jsonl, .json, .parquet), the URL of such
    (s3://, https://), or 'hf:NAME' (Hugging Face)"""
    field: str = "text"
    """the text's key in records and Hugging Face datasets"""
    most: bounds.Positive | None = None
    """characters that are read of the source, from its beginning; all unless given"""
    mixture: dict[Key, SourceConfig] = Field(default_factory=dict)
    """several sources by weight, in place of source: [data.mixture.NAME] with source, weight, field, most and epochs"""
    tokenizer: str = "bpe"
    """'bpe' (trained on the corpus at first use), 'bytes', or the path of a tokenizer.json or GGUF file; with
    train.start that of the weights, unless given"""
    tokenization: Literal["exact", "legacy"] = "exact"
    """exact: each document as its tokenizer encodes it in one go, with the tokens that its template adds (BOS); legacy,
    of runs that began before this setting: without those, and cut at line ends every 2^18 characters"""
    document_mask: bool = False
    """a token sees those of its own document only, and none of others in the same sample"""
    validation: Fraction = 0.02
    """the tail of every document that is kept for validation"""
    cache: str | None = None
    """folder for tokenizers and token shards; the user's cache folder unless given"""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """Each source by itself, by its name and in the order of names; a single one has the name ""."""
        if not self.mixture:
            return {"": self}
        own = {
            name: {"source": one.source, "field": one.field or self.field, "most": one.most}
            for name, one in sorted(self.mixture.items())
        }
        return {name: self.model_copy(update={"mixture": {}, **found}) for name, found in own.items()}

    @property
    def unplaced(self) -> DataConfig:
        """The same without what has no say in which samples there are: where texts lie, and how often they are read."""
        free = {name: one.model_copy(update={"epochs": None, "source": ""}) for name, one in self.mixture.items()}
        return self.model_copy(update={"mixture": free, "source": "", "cache": None})

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        total = sum(one.weight for one in self.mixture.values())
        for name, one in self.mixture.items():
            if one.weight * bounds.MIXTURE < total:
                raise ValueError(
                    f"data.mixture.{name}.weight = {one.weight:g} is less than one in {bounds.MIXTURE} of all weights; "
                    "raise it, or leave the source out"
                )
        return self
