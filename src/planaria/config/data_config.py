"""Training data: one source of text, or a weighted mixture of several."""

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
    """the source's share of the samples is this divided by the sum of all weights"""
    field: str | None = None
    """as data.field, the default"""
    most: bounds.Positive | None = None
    """as data.most"""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """how often a run may read all of the source, at most; unlimited by default"""


class DataConfig(Section):
    source: str = "stdlib"
    """'stdlib' (Python's own source), a file or folder of text or records (.jsonl, .json, .parquet), a URL of one
    (s3://, https://), or 'hf:NAME' (Hugging Face)"""
    field: str = "text"
    """key of the text in records and Hugging Face datasets"""
    most: bounds.Positive | None = None
    """number of characters to read from the start of the source; all by default"""
    mixture: dict[Key, SourceConfig] = Field(default_factory=dict)
    """several weighted sources instead of source: [data.mixture.NAME] with source, weight, field, most and epochs"""
    tokenizer: str = "bpe"
    """'bpe' (trained on the corpus at first use), 'bytes', or the path of a tokenizer.json or GGUF file; with
    train.start, the default is the tokenizer of the weights"""
    tokenization: Literal["exact", "legacy"] = "exact"
    """exact: encode each document as a whole, with its tokenizer's template tokens (BOS); legacy, for runs from before
    this setting: without these, split at line ends every 2^18 characters"""
    document_mask: bool = False
    """let each token attend only to its own document within a sample"""
    validation: Fraction = 0.02
    """share of every document, at its end, that is reserved for validation"""
    cache: str | None = None
    """folder for tokenizers and token shards; the user's cache folder by default"""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """Return a configuration for each source, in order of names; a single source has the name ""."""
        if not self.mixture:
            return {"": self}
        own = {
            name: {"source": one.source, "field": one.field or self.field, "most": one.most}
            for name, one in sorted(self.mixture.items())
        }
        return {name: self.model_copy(update={"mixture": {}, **found}) for name, found in own.items()}

    @property
    def unplaced(self) -> DataConfig:
        """Return the configuration without settings that do not affect samples: where texts are stored, and how often
        they are read."""
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
