"""Decisions about checkpoints: who writes what of one, and what becomes of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planaria.record.started import Fact, Standing
from planaria.record.verdicts import Unequal


class Save(Fact):
    """Write every stage into an unfinished checkpoint folder."""

    kind: Literal["save"] = "save"
    replica: int = 0
    generation: int
    step: int
    whole: list[int] = Field(default_factory=list)
    """nodes that write their stage, where its other nodes write their outer state; none: each that is asked"""
    compared: list[int] = Field(default_factory=list)
    """nodes, beside those that write their stage, that tell the digest of their weights: those of a stage are to be
    equal. They write nothing but what ``whole`` has them write"""
    background: bool = False
    """is training to go on as soon as all have a copy of what they write?"""


class Seal(Fact):
    """All stages are written: make the checkpoint appear under its name, at once and whole."""

    kind: Literal["seal"] = "seal"
    step: int
    folder: str
    stages: list[int]
    partial: bool = False
    standings: dict[int, Standing] = Field(default_factory=dict)
    """where each of several replicas was when it was saved"""
    first_block: int = 0
    """all blocks of samples before this one were used then"""
    blocks_ahead: list[int] = Field(default_factory=list)
    """and these beyond"""
    digests: dict[int, dict[str, str]] = Field(default_factory=dict)
    """replica → file → its SHA-256, as those say that wrote them"""
    unequal: list[Unequal] = Field(default_factory=list)
    """stages whose replicas are to be equal and were not"""


class Discard(Fact):
    """A checkpoint could not be saved: remove what has been written of it, which would only fill the disk."""

    kind: Literal["discard"] = "discard"
    step: int
    """its name"""
