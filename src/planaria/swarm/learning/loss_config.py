"""Loss section of a recipe; ``loss.py`` has the formulas. Imports no torch: every command's help reads this module."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria.config.bounds import Natural, Positive
from planaria.config.schema import Section

NonNegative = Annotated[float, Field(ge=0)]
Above = Annotated[float, Field(gt=0)]
DivergenceKind = Literal["k1_mean", "k3_mean", "k3_sum"]
PUBLISHED: tuple[DivergenceKind, float] = ("k3_mean", 50.0)
"""filter of arXiv 2605.22537: k3 below 50, here of the mean over a completion's tokens"""
K1_THRESHOLD = 0.5
"""nats per token; peers that train the same model are usually nearer"""
_CLIPPED = ("grpo", "dr_grpo", "dapo", "vis", "tis", "dis", "f_vis", "f_tis", "sequence_mask")
_FILTERED = ("f_nois", "f_vis", "f_tis")
USED_BY: dict[str, tuple[str, ...]] = {
    "clip_low": _CLIPPED,
    "clip_high": _CLIPPED,
    "cap": ("vis", "tis", "f_vis", "f_tis"),
    "filter_kind": _FILTERED,
    "filter_threshold": _FILTERED,
    "mask_threshold": ("sequence_mask",),
    "length": ("dr_grpo",),
}
"""setting → kinds of loss that use it; all kinds use the other settings"""


class LossConfig(Section):
    kind: Literal[
        "grpo", "dr_grpo", "dapo", "nois", "vis", "tis", "dis", "f_nois", "f_vis", "f_tis", "sequence_mask"
    ] = "f_tis"
    """loss: grpo, dr_grpo, dapo, nois (no correction for the generator), vis (clipped ratio to the generator), tis
    (truncated weight), dis (tokens masked by their ratio to the generator), f_nois, f_vis, f_tis (nois, vis, tis with
    far failures filtered), or sequence_mask"""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """1 minus the lower clip of the ratio; by default 0.2; dis: required, tokens with a lower ratio are masked, none
    with 1. A round has one update, so the ratio of other kinds than vis, f_vis and dis is 1 and never clipped"""
    clip_high: NonNegative | None = None
    """upper clip of the ratio minus 1; by default 0.28 (dapo) or clip_low; dis: required, tokens with a higher ratio
    are masked. As with clip_low, only vis, f_vis and dis reach it"""
    cap: Above = 2.0
    """tis, f_tis: maximum weight of a token; vis, f_vis: maximum ratio at which a failure has a gradient"""
    beta: NonNegative = 0.0
    """weight of the divergence from the reference policy; 0 uses no reference"""
    filter_kind: DivergenceKind | Literal["published"] | None = None
    """f_nois, f_vis, f_tis: measure of the distance to a generator: k1_mean (default), k3_mean, k3_sum, or published,
    F-TIS's filter: k3_mean below 50"""
    filter_threshold: NonNegative | None = None
    """f_nois, f_vis, f_tis: failures at least this far teach nothing; 0.5 for k1_mean, 50 for published; k3_mean and
    k3_sum have no default"""
    mask_threshold: NonNegative = K1_THRESHOLD
    """sequence_mask: failures farther than this (k1_mean) teach nothing"""
    log_ratio_bound: Above = 20.0
    """bound of the logarithms of probability ratios before exponentiation"""
    overlong: Natural = 0
    """last tokens before sampling.max_new over which the reward falls by 1, right or wrong; 0: length is free"""
    length: Positive | None = None
    """dr_grpo: constant divisor of every completion's sum; usually the maximum length"""

    @property
    def low(self) -> float:
        """Return 1 minus the lower clip in force."""
        return 0.2 if self.clip_low is None else self.clip_low

    @property
    def high(self) -> float:
        """Return the upper clip minus 1 in force."""
        if self.clip_high is not None:
            return self.clip_high
        return 0.28 if self.kind == "dapo" else self.low

    @property
    def filter(self) -> tuple[DivergenceKind, float]:
        """Return the measure of the filter and the distance from which failures teach nothing."""
        kind, default = PUBLISHED if self.filter_kind == "published" else (self.filter_kind or "k1_mean", K1_THRESHOLD)
        return kind, default if self.filter_threshold is None else self.filter_threshold

    @property
    def term(self) -> str:
        return self.kind.removeprefix("f_")

    @property
    def bounds_staleness(self) -> bool:
        """Return whether it weights a token by its ratio to the generator, with a bound for both signs of Â."""
        return self.term in ("tis", "vis", "dis")

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        for name, kinds in USED_BY.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and self.kind not in kinds:
                uses = " or ".join(filter(None, (", ".join(map(repr, kinds[:-1])), repr(kinds[-1]))))
                raise ValueError(
                    f"loss.{name} = {value!r} has no effect with loss.kind = {self.kind!r}; remove it, or use {uses}"
                )
        return self

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.filter_threshold is not None and self.filter_kind is None:
            raise ValueError(
                f"loss.filter_threshold = {self.filter_threshold} has no effect without loss.filter_kind; "
                "set it to k1_mean, k3_mean, k3_sum or published"
            )
        if self.filter_kind in ("k3_mean", "k3_sum") and self.filter_threshold is None:
            raise ValueError(
                f"loss.filter_kind = {self.filter_kind!r} has no default threshold; set loss.filter_threshold"
            )
        if self.kind == "dr_grpo" and self.length is None:
            raise ValueError("loss.kind = 'dr_grpo' divides by a constant; set loss.length to the longest completion")
        if self.kind == "dis" and (missing := [key for key in ("clip_low", "clip_high") if getattr(self, key) is None]):
            examples = {"clip_low": 0.3, "clip_high": 5}
            raise ValueError(
                "loss.kind = 'dis' has no default bounds; set "
                + " and ".join(f"loss.{key} (such as {examples[key]})" for key in missing)
            )
        if self.kind == "dis" and not self.low and not self.high:
            raise ValueError(
                "loss.clip_low = 0 and loss.clip_high = 0 mask every token with loss.kind = 'dis'; increase them, such "
                "as to 0.3 and 5"
            )
        if self.term == "vis" and self.cap <= 1 + self.high:
            raise ValueError(f"loss.cap = {self.cap} is not above the clip at {1 + self.high:g}; use a larger value")
        return self
