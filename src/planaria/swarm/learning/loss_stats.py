"""What a loss says of itself: numbers by which to see that something is off."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class LossStats:
    """Sums over the tokens that were trained on; those of microbatches add up. ``means`` is what one reads."""

    samples: float = 0.0
    filtered: float = 0.0
    """samples whose advantage the filter or the sequence mask took"""
    tokens: float = 0.0
    claimed: float = 0.0
    """tokens whose generator told their log-probability"""
    clipped: float = 0.0
    """tokens that the clip gives no gradient"""
    capped: float = 0.0
    """tokens whose weight (tis) or ratio (vis) was cut to the cap"""
    ratio: float = 0.0
    """π_θ/π_gen of claimed tokens, before any cap"""
    mismatch: float = 0.0
    """log π_gen − log π_θ of claimed tokens, in nats, each cut off at the bound"""
    reference: float = 0.0
    """k3 estimate of KL(π_θ‖π_ref), in nats"""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """Shares and means over tokens, by name, and samples filtered; what no token speaks for is left out."""
        of_all = {"clipped": self.clipped, "kl_reference": self.reference}
        of_claimed = {"capped": self.capped, "ratio": self.ratio, "kl_mismatch": self.mismatch}
        found = {name: value / self.tokens for name, value in of_all.items() if self.tokens}
        found |= {name: value / self.claimed for name, value in of_claimed.items() if self.claimed}
        return found | {"filtered": self.filtered}
