"""Training data: one source of text, or a weighted mixture of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction
from planaria.config.names import Key
from planaria.config.section import Section, formerly

Format = Literal["auto", "text", "messages", "prompt"]
DIALOGUES = ("messages", "prompt")
"""formats of records that hold dialogues"""


class SourceConfig(Section):
    """One source of a mixture: ``[data.mixture.NAME]``."""

    source: str
    """source of this domain, as data.source"""
    weight: bounds.Weight
    """the source's share of the samples is this divided by the sum of all weights"""
    field: str | None = None
    """record field with the text; default: data.field"""
    format: Format = "auto"
    """format of the source, as data.format"""
    max_chars: Annotated[bounds.Positive | None, formerly("max_chars", "most")] = None
    """maximum number of characters to read, as data.max_chars"""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """maximum number of times that a run reads the whole source; unlimited by default"""


class DataConfig(Section):
    source: str = "stdlib"
    """'stdlib' (Python's own source), a file or folder of text or records (.jsonl, .json, .parquet), a URL of one
    (s3://, https://), or 'hf:NAME' (Hugging Face)"""
    field: str = "text"
    """key of the text in records and Hugging Face datasets"""
    format: Format = "auto"
    """content of a record: text, 'messages' (a dialogue), or 'prompt' (and 'completion'); auto: as the first record of
    local files, else text"""
    learn: Literal["answers", "all", "last"] = "answers"
    """tokens of a dialogue that are learned: the assistant's answers, all, or the last answer"""
    pack: bool = True
    """put several dialogues into one sample, masked from each other; else one, padded"""
    template: str | None = None
    """chat template of dialogues: a Jinja file, or a folder or GGUF file that has one; by default the tokenizer's"""
    max_chars: Annotated[bounds.Positive | None, formerly("max_chars", "most")] = None
    """number of characters to read from the start of the source; all by default"""
    mixture: dict[Key, SourceConfig] = Field(default_factory=dict)
    """several weighted sources instead of source: [data.mixture.NAME] with source, weight, field, format, max_chars and
    epochs"""
    tokenizer: str = "bpe"
    """'bpe' (trained on the corpus at first use), 'bytes', or the path of a tokenizer.json or GGUF file; with
    train.start, the default is the tokenizer of the weights"""
    tokenization: Literal["exact", "legacy"] = "exact"
    """exact: encode each document as a whole, with its tokenizer's template tokens (BOS); legacy, for runs from before
    this setting: without these, split at line ends every 2^18 characters"""
    document_mask: bool = False
    """let each token attend only to its own document within a sample"""
    validation: Fraction = 0.02
    """share of every document, at its end, that is reserved for validation; of dialogues: whole ones, with at most this
    share of the tokens"""
    cache: str | None = None
    """folder for tokenizers and token shards; the user's cache folder by default"""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """Return a configuration for each source, in order of names; a single source has the name ""."""
        if not self.mixture:
            return {"": self}
        own_settings = {
            name: {
                "source": config.source,
                "field": config.field or self.field,
                "format": config.format,
                "max_chars": config.max_chars,
            }
            for name, config in sorted(self.mixture.items())
        }
        return {name: self.model_copy(update={"mixture": {}, **source}) for name, source in own_settings.items()}

    @property
    def dialogues(self) -> bool:
        """Whether records are dialogues, or prompts with completions."""
        return any(source.format in DIALOGUES for source in self.sources.values())

    @property
    def sample_settings(self) -> DataConfig:
        """Return the configuration without settings that do not affect samples: where texts are stored, and how often
        they are read."""
        free = {name: config.model_copy(update={"epochs": None, "source": ""}) for name, config in self.mixture.items()}
        # A resolved "auto" is text.
        expected = "auto" if self.format == "text" else self.format
        return self.model_copy(update={"mixture": free, "source": "", "cache": None, "format": expected})

    @model_validator(mode="before")
    @classmethod
    def _set_document_mask(cls, values: Any) -> Any:
        """Mask packed dialogues from each other."""
        if not isinstance(values, Mapping):
            return values
        mixture = values.get("mixture")
        tables = [values, *(mixture.values() if isinstance(mixture, Mapping) else ())]
        formats = {t.get("format") if isinstance(t, Mapping) else getattr(t, "format", None) for t in tables}
        if formats.isdisjoint(DIALOGUES) or values.get("pack") is False:
            return values
        if values.get("document_mask") is False:
            raise ValueError(
                "data.document_mask = false: dialogues in one sample would see each other; set data.pack = false"
            )
        return {**values, "document_mask": True}

    @model_validator(mode="after")
    def _check_mixture_weights(self) -> Self:
        total = sum(config.weight for config in self.mixture.values())
        for name, config in self.mixture.items():
            if config.weight * bounds.MAX_MIXTURE_PERIOD < total:
                raise ValueError(
                    f"data.mixture.{name}.weight = {config.weight:g} is less than one in "
                    f"{bounds.MAX_MIXTURE_PERIOD} of all weights; raise it, or remove the source"
                )
        return self
