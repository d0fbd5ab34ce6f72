"""Which loss, and its numbers; what they do is in ``loss.py``. No torch here: every command's help reads this."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria.config.bounds import Fraction, Natural, Positive
from planaria.config.schema import Section

NonNegative = Annotated[float, Field(ge=0)]
Above = Annotated[float, Field(gt=0)]
DivergenceKind = Literal["k1_mean", "k3_mean", "k3_sum"]
PUBLISHED: tuple[DivergenceKind, float] = ("k3_mean", 50.0)
"""the filter of arXiv 2605.22537: k3 below 50, here of the mean over a completion's tokens"""
K1_THRESHOLD = 0.5
"""nats a token: generators nearer than this are usual among peers that train the same model"""


class LossConfig(Section):
    kind: Literal["grpo", "dr_grpo", "dapo", "nois", "vis", "tis", "f_nois", "f_vis", "f_tis", "sequence_mask"] = (
        "f_tis"
    )
    """which loss: grpo, dr_grpo, dapo, nois (no correction for who generated), vis (ratio to the generator, clipped),
    tis (truncated weight), f_nois, f_vis, f_tis (the same, far failures filtered), or sequence_mask"""
    clip_low: Fraction = 0.2
    """ratios below 1 less this earn no more"""
    clip_high: NonNegative | None = None
    """ratios above 1 plus this earn no more; 0.28 (dapo) or as clip_low unless given"""
    cap: Above = 2.0
    """tis, f_tis: largest weight of a token, whatever the generator claims; vis, f_vis: largest ratio that a failure
    has a gradient at"""
    beta: NonNegative = 0.0
    """weight of the divergence from the reference policy; 0 needs none"""
    filter_kind: DivergenceKind | Literal["published"] | None = None
    """f_nois, f_vis, f_tis: how the distance to a generator is measured: k1_mean (unless given), k3_mean or k3_sum; or
    published, the filter of F-TIS's authors: k3_mean below 50"""
    filter_threshold: NonNegative | None = None
    """f_nois, f_vis, f_tis: failures this far or farther teach nothing; 0.5 for k1_mean, 50 for published; k3_mean and
    k3_sum have no default"""
    mask_threshold: NonNegative = K1_THRESHOLD
    """sequence_mask: failures farther than this (k1_mean) teach nothing"""
    log_ratio_bound: Above = 20.0
    """logarithms of probability ratios are cut off here before they are exponentiated"""
    overlong: Natural = 0
    """the last tokens before sampling.max_new, over which a completion's reward falls by 1, whether right or wrong;
    0: length costs nothing"""
    length: Positive | None = None
    """dr_grpo: the constant that stands for every completion's length; the longest that may be drawn is usual"""

    @property
    def high(self) -> float:
        """The upper clip in force."""
        if self.clip_high is not None:
            return self.clip_high
        return 0.28 if self.kind == "dapo" else self.clip_low

    @property
    def filter(self) -> tuple[DivergenceKind, float]:
        """How f_nois, f_vis and f_tis measure the distance to a generator, and from where on failures teach nothing."""
        kind, default = PUBLISHED if self.filter_kind == "published" else (self.filter_kind or "k1_mean", K1_THRESHOLD)
        return kind, default if self.filter_threshold is None else self.filter_threshold

    @property
    def term(self) -> str:
        """The kind without its filter."""
        return self.kind.removeprefix("f_")

    @model_validator(mode="after")
    def _says_what_it_measures(self) -> Self:
        if self.filter_threshold is not None and self.filter_kind is None:
            raise ValueError(
                f"loss.filter_threshold = {self.filter_threshold} means nothing without loss.filter_kind: "
                "say k1_mean, k3_mean, k3_sum or published"
            )
        if self.filter_kind in ("k3_mean", "k3_sum") and self.filter_threshold is None:
            raise ValueError(f"loss.filter_kind = {self.filter_kind!r} has no default; give loss.filter_threshold")
        if self.kind == "dr_grpo" and self.length is None:
            raise ValueError("loss.kind = 'dr_grpo' divides by a constant; give loss.length, the longest completion")
        if self.term == "vis" and self.cap <= 1 + self.high:
            raise ValueError(f"loss.cap = {self.cap} is not above the clip at {1 + self.high:g}; give a larger one")
        return self
