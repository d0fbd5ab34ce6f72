"""Byzantine-robust aggregation: a registry of rules.

``exchange.robust`` is ``"multikrum"``, ``"nnm:median"``, or a table such as
``{ rule = "flag", byzantine = 2, mix = "nnm", rounds = 5, scope = "replica" }``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from planaria.common.errors import UserError, suggestion
from planaria.config.registry import Registry
from planaria.exchange import weight_message
from planaria.exchange.base import OnWeights, TooManyByzantine, UpdateWeights, Weights
from planaria.exchange.robust.base import CoordinateRule, GramRule, RobustRule
from planaria.exchange.robust.clipping import CenteredClipping
from planaria.exchange.robust.combining import (
    BUCKET,
    Mix,
    coefficients,
    combine,
    low_weight_members,
    rival_coefficients,
    weighted_sum,
)
from planaria.exchange.robust.coordinate import Median, TrimmedMean
from planaria.exchange.robust.flag import Flag
from planaria.exchange.robust.geometric import GeometricMedian
from planaria.exchange.robust.krum import Krum, MultiKrum
from planaria.exchange.robust.products import NotFinite, zeros_like_vector

RULES: Registry[RobustRule] = Registry(
    "rule",
    "exchange.robust.rule",
    RobustRule,
    {
        "median": Median,
        "trimmed_mean": TrimmedMean,
        "krum": Krum,
        "multikrum": MultiKrum,
        "geometric_median": GeometricMedian,
        "clipping": CenteredClipping,
        "flag": Flag,
    },
    location="exchange.robust",
)

STRIKES = 3
Scope = Literal["stage", "replica"]


@dataclass(frozen=True)
class RobustAggregator:
    """A rule, and the mixing of vectors before it."""

    rule: RobustRule
    mix: Mix = "none"
    on_weights: OnWeights | None = None
    """receives the weight of each member in a round's value, if the rule has coefficients"""
    strikes: int = STRIKES
    """rejections before exclusion, the default of :attr:`~planaria.exchange.base.Exchange.strikes`"""
    scope: Scope = "stage"
    """scope of a judgement: the updates that each stage receives, or whole replicas (``weighing.py``)"""
    known_weights: UpdateWeights | None = None
    """weights of the members over all stages, if ``scope`` is ``"replica"``"""

    def min_members(self) -> int:
        """Return the minimum number of members with which the rule tolerates its Byzantine ones; a bucket with one
        counts as Byzantine."""
        return self.rule.min_members() if self.mix != "bucketing" else BUCKET * (self.rule.min_members() - 1) + 1

    @property
    def is_iterative(self) -> bool:
        """Whether it needs the previous round's value."""
        return isinstance(self.rule, GramRule) and self.rule.is_iterative

    def after_rejecting(
        self, rejected: int, on_weights: OnWeights, known_weights: UpdateWeights | None = None
    ) -> RobustAggregator:
        """Return the rule after ``rejected`` updates were rejected; these count as Byzantine.

        ``on_weights`` and ``known_weights`` as in :meth:`~planaria.exchange.base.Exchange.after_rejecting`.
        """
        rule = self.rule.model_copy(update={"byzantine": max(0, self.rule.byzantine - rejected)})
        return replace(self, rule=rule, on_weights=on_weights, known_weights=known_weights)

    def aggregate(self, decoded: Mapping[int, Weights], draw: int, last: Weights | None = None) -> dict[str, Tensor]:
        """Return one value of several members' values, in order.

        :param draw: a number that all members know.
        :param last: the previous round's value; zero if there is none.
        :raises TooManyByzantine: if there are too few, or one is not finite (``update_validation.py`` rejects these
            earlier).
        """
        if len(decoded) < self.min_members():
            raise TooManyByzantine(
                f"{len(decoded)} members are too few to tolerate {self.rule.byzantine} Byzantine ones; "
                f"{self.min_members()} or more are needed"
            )
        like = next(iter(decoded.values()))
        if not like:  # an empty fragment
            return {}
        vectors = [weight_message.pieces(weights) for weights in decoded.values()]
        before = weight_message.pieces(last) if last else None
        if self.scope == "replica":
            return weight_message.unflatten(self._of_whole_replicas(vectors, [*decoded], before), like)
        try:
            combined = combine(self.rule, vectors, self.mix, draw, before)
        except NotFinite as error:
            raise TooManyByzantine("a member's vector is not finite, and was not rejected") from error
        if self.on_weights is not None and combined.coefficients is not None and combined.gram is not None:
            self.on_weights(self._update_weights([*decoded], combined.coefficients, combined.gram, draw))
        return weight_message.unflatten(combined.value, like)

    def _of_whole_replicas(self, vectors: list[list[Tensor]], members: list[int], last: list[Tensor] | None) -> Tensor:
        """Return the value with the weights computed over all stages."""
        assert self.known_weights is not None, "the weights of whole replicas are not known"
        c = torch.tensor([self.known_weights.coefficients[member] for member in members], dtype=torch.float64)
        if self.is_iterative and last is None:
            last = zeros_like_vector(vectors[0])
        return weighted_sum(vectors, c, last if self.is_iterative else None)

    def weigh_members(self, members: Sequence[int], gram: Tensor, draw: int) -> UpdateWeights:
        """Return the weights of ``members``, also by other rules, from inner products G [n + 1, n + 1]
        (``products.py``).

        :raises ValueError: if there are too few members.
        """
        assert isinstance(self.rule, GramRule)
        weights = coefficients(self.rule, gram, self.mix, draw, self.is_iterative)
        return self._update_weights(members, weights, gram, draw)

    def _update_weights(self, members: Sequence[int], weight_tensor: Tensor, gram: Tensor, draw: int) -> UpdateWeights:
        weights = weight_tensor.tolist()

        def by_rivals() -> dict[str, dict[int, float]]:
            little = low_weight_members(weights, self.rule.byzantine)
            if not little or not isinstance(self.rule, GramRule):
                return {}
            rules = {name: RULES.make(name, {"byzantine": self.rule.byzantine}) for name in RULES.shipped}
            rivals = rival_coefficients(rules, self.rule, gram, self.mix, draw)
            return {name: {members[index]: float(c[index]) for index in little} for name, c in rivals.items()}

        return UpdateWeights(dict(zip(members, weights, strict=True)), by_rivals)


def make_robust_aggregator(setting: str | Mapping[str, Any], members: int) -> RobustAggregator:
    """Return the rule that ``exchange.robust`` configures for ``members``.

    :raises UserError: for an unknown name or incompatible settings.
    """
    options = _parse_short_form(setting) if isinstance(setting, str) else dict(setting)
    rule, mix = options.pop("rule", None), options.pop("mix", "none")
    strikes, scope = options.pop("strikes", STRIKES), options.pop("scope", "stage")
    if not isinstance(rule, str):
        raise UserError(f"exchange.robust = {setting!r}: set rule to one of {', '.join(RULES.names)}")
    if mix not in get_args(Mix):
        raise UserError(f"exchange.robust.mix = {mix!r}: no such choice; {suggestion(str(mix), get_args(Mix))}")
    if type(strikes) is not int or strikes < 0:
        raise UserError(f"exchange.robust.strikes = {strikes!r}: use 0 or more steps (0: never)")
    if scope not in get_args(Scope):
        raise UserError(f"exchange.robust.scope = {scope!r}: no such choice; {suggestion(str(scope), get_args(Scope))}")
    aggregator = RobustAggregator(RULES.make(rule, options), mix, strikes=strikes, scope=scope)
    if scope == "replica" and isinstance(aggregator.rule, CoordinateRule):
        raise UserError(
            f"exchange.robust.scope = 'replica': {rule!r} treats each coordinate separately, so stages cannot be "
            "weighted together; remove scope, or use a rule that compares distances, such as 'multikrum'"
        )
    if members < aggregator.min_members():
        raise UserError(
            f"exchange.robust: {rule!r} with byzantine = {aggregator.rule.byzantine} and mix = {mix!r} needs "
            f"exchange.replicas = {aggregator.min_members()} or more, not {members}; lower byzantine, or add replicas"
        )
    return aggregator


def _parse_short_form(setting: str) -> dict[str, Any]:
    """Return the table of the short form RULE or MIX:RULE."""
    mix, colon, rule = setting.partition(":")
    return {"rule": rule, "mix": mix} if colon and mix in get_args(Mix) else {"rule": setting}
