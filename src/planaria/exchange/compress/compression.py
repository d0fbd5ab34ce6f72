"""Compressed messages of a round: a compressor, and the error feedback that compensates its loss.

``exchange.compress`` is a short form such as ``"econtrol:top1%"``, or a table with more settings: ``{ kind = "topk",
keep = 0.01, bits = 8, feedback = "econtrol", eta = 0.002 }``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from planaria.common.errors import UserError, suggestion
from planaria.config.registry import Registry
from planaria.exchange import weight_message
from planaria.exchange.base import CompressionEffect, Parts, Shapes, StageOuterState, Update, Updates, Weights
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.chunks import CHUNK
from planaria.exchange.compress.dct import DCT
from planaria.exchange.compress.dense import UNCOMPRESSED, GroupQuantised, Sign, Uncompressed
from planaria.exchange.compress.estimates import EF21, EF21W, EControl
from planaria.exchange.compress.feedback import EF14, DecayedErrorFeedback, Feedback, NoFeedback, at_least_fp32
from planaria.exchange.compress.sparse import RandK, TopK
from planaria.exchange.compress.topk2 import TopK2

COMPRESSORS: Registry[Compressor] = Registry(
    "compressor",
    "exchange.compress.kind",
    Compressor,  # type: ignore[type-abstract]
    {
        "plain": Uncompressed,
        "quantised": GroupQuantised,
        "topk": TopK,
        "topk2": TopK2,
        "dct": DCT,
        "randk": RandK,
        "sign": Sign,
    },
    location="exchange.compress",
)
FEEDBACKS: Registry[Feedback] = Registry(
    "feedback",
    "exchange.compress.feedback",
    Feedback,  # type: ignore[type-abstract]
    {
        "none": NoFeedback,
        "ef14": EF14,
        "decayed": DecayedErrorFeedback,
        "ef21": EF21,
        "ef21w": EF21W,
        "econtrol": EControl,
    },
    location="exchange.compress",
)

_SHORT = re.compile(r"(?:(?P<feedback>\w+):)?(?:(?P<kind>top|rand)(?P<keep>[\d.]+)%|(?P<bits>\d+)bits|(?P<name>\w+))")
_EF14 = EF14()
_KINDS = {"top": "topk", "rand": "randk"}


@dataclass(frozen=True)
class Compression:
    """A compressor with its feedback. A lossless compressor needs no feedback."""

    compressor: Compressor = UNCOMPRESSED
    feedback: Feedback = _EF14
    me: int | None = None
    """the sending member, for feedback that scales its vectors"""

    @property
    def exact(self) -> bool:
        """Whether receivers decode the exact vectors."""
        return self.compressor.exact

    @property
    def parts(self) -> Parts:
        """Parts of an outer state that the feedback needs."""
        return {} if self.exact else self.feedback.parts

    def codec(self, outer: StageOuterState) -> Compressor:
        """Return the codec of the round's messages: uncompressed until estimates are initialised."""
        return self.compressor if self._carries_vectors(outer) and not self.feedback.measuring(outer) else UNCOMPRESSED

    def _carries_vectors(self, outer: StageOuterState) -> bool:
        """Whether messages carry the feedback's vectors instead of the exact ones."""
        return all(outer[part] for part, sharing in self.parts.items() if sharing != "own")

    def update(self, outer: StageOuterState, exact: Weights, prefetched: Tensor | None = None) -> Update:
        """Return an update of ``exact``, with the state its sender keeps once others have received it."""
        codec = self.codec(outer)
        if self.exact:
            return Update(weight_message.pack(exact), prefetched)
        if not self._carries_vectors(outer):
            blocking, kept = weight_message.pack(exact), self.feedback.parts_after_start(exact)
            return Update(blocking, prefetched, kept, _measure_message(blocking, exact, {**outer.parts, **kept}))
        count = sum(tensor.numel() for tensor in exact.values())
        meant = self.feedback.target(outer, exact, self._delta_of(outer, exact, count))
        scale = self._scale(outer, self.me)
        vector = weight_message.flat(meant)
        blocking = codec.encode(vector if scale == 1.0 else vector / scale, outer.rounds)
        sent = _scale_weights(weight_message.unflatten(codec.decode(blocking, count, outer.rounds), meant), scale)
        kept = self.feedback.next_parts(outer, exact, meant, sent)
        return Update(blocking, prefetched, kept, _measure_message(blocking, exact, kept, (meant, sent), codec.exact))

    def _delta_of(self, outer: StageOuterState, exact: Weights, count: int) -> float:
        """Return the compressor's δ for the message of ``exact``."""
        if self.compressor.guaranteed:
            return self.compressor.delta(count)
        judged = [weight_message.flat(vector) for vector in self.feedback.measured_vectors(outer, exact) if vector]
        return min((self.compressor.reached(v, outer.rounds) for v in judged), default=self.compressor.delta(count))

    def receive(
        self, outer: StageOuterState, updates: Updates, me: int, like: Weights, exact_alone: bool = True
    ) -> tuple[dict[int, dict[str, Tensor]], Mapping[str, Weights]]:
        """Return the members' decoded vectors in order of id, and what ``me`` keeps; nothing if its own update was
        rejected.

        :param exact_alone: whether a single update is used exactly, since no other member uses it.
        :raises ValueError: if a message does not match the round's codec.
        """
        codec = self.codec(outer)
        vectors = {}
        for member in sorted(updates):
            decoded = weight_message.unpack(updates[member].blocking, like, codec, outer.rounds)
            vectors[member] = _scale_weights(decoded, self._scale(outer, member))
        kept = updates[me].kept if me in updates else {}
        if len(updates) > 1 or not kept or codec.exact or not exact_alone:
            return vectors, kept
        exact, kept = self.feedback.settle_alone(kept, vectors[me])
        return {me: dict(exact)}, kept

    def _scale(self, outer: StageOuterState, member: int | None) -> float:
        """Return the divisor of the member's vector; 1 for exact vectors."""
        if member is None or self.exact or not self._carries_vectors(outer):
            return 1.0
        return self.feedback.scale(outer, member)

    def with_measurements(self, outer: StageOuterState, sent: Mapping[int, Weights]) -> StageOuterState:
        """Return ``outer`` with smoothness measured from the differences that members have ``sent``."""
        measuring = self._carries_vectors(outer) and not self.exact and self.feedback.measuring(outer)
        return self.feedback.measure(outer, sent) if measuring else outer

    def result(self, outer: StageOuterState, joined: Weights) -> tuple[Weights, Mapping[str, Weights]]:
        """Return the value with which members continue, after the aggregate ``joined``, and the new shared parts."""
        if self.exact:
            return joined, {}
        if not self._carries_vectors(outer):
            return joined, self.feedback.shared(joined)
        return self.feedback.result(outer, joined)

    def after_member_change(self, outer: StageOuterState) -> StageOuterState:
        """Return the state after a change of members: without estimates, with residuals."""
        return replace(outer, parts={n: part for n, part in outer.parts.items() if self.parts.get(n) != "estimate"})

    def bytes(self, shapes: Shapes) -> int:
        """Return the bytes of a message of tensors of these shapes once estimates are initialised."""
        return self.compressor.bytes(sum(shape.numel() for shape in shapes.values()))


def _measure_message(
    blocking: Tensor,
    exact: Weights,
    kept: Mapping[str, Weights],
    coded: tuple[Weights, Weights] | None = None,
    full: bool = True,
) -> CompressionEffect | None:
    """Return the effect of compression on ``exact``, or None if a norm is not finite.

    :param kept: state that the sender keeps.
    :param coded: the vector to encode and the decoded one, or None if sent uncompressed.
    :param full: nothing was lost.
    """
    lost = 0.0
    if coded is not None and (meant := _norm(coded[0])):
        lost = (_norm(coded[0], coded[1]) / meant) ** 2
    pending = _norm(kept["residual"]) if "residual" in kept else None
    off = _norm(exact, kept["estimate"]) if "estimate" in kept else None
    dense = 4 * sum(tensor.numel() for tensor in exact.values())
    effect = CompressionEffect(blocking.nbytes, dense, _norm(exact), lost, pending, off, full)
    return effect if all(math.isfinite(each or 0.0) for each in (effect.norm, lost, pending, off)) else None


def _scale_weights(weights: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    return weights if scale == 1.0 else {name: tensor * scale for name, tensor in weights.items()}


def _norm(vector: Weights, other: Weights | None = None) -> float:
    """Return ‖v‖, or ‖v − u‖, over tensors with the same names: fp32 tensors, fp64 squares."""
    each = (
        at_least_fp32(vector[name]) if other is None else at_least_fp32(vector[name]) - other[name]
        for name in sorted(vector)
    )
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in each))


def make_compression(setting: str | Mapping[str, Any]) -> Compression:
    """Return the compression that ``exchange.compress`` configures.

    :raises UserError: for an unknown name or incompatible settings.
    """
    options = _parse_short_form(setting) if isinstance(setting, str) else dict(setting)
    kind, name = options.pop("kind", None), options.pop("feedback", "ef14")
    if not isinstance(kind, str) or not isinstance(name, str):
        raise UserError(f"exchange.compress = {setting!r}: set kind to one of {', '.join(COMPRESSORS.names)}")
    declared = {option for chosen in (COMPRESSORS.find(kind), FEEDBACKS.find(name)) for option in chosen.model_fields}
    if unknown := next((option for option in options if option not in declared), None):
        fix = suggestion(unknown, declared) if declared else "there are none; remove it"
        raise UserError(f"exchange.compress.{unknown}: no option of {kind!r} or {name!r}; {fix}")
    compression = Compression(
        COMPRESSORS.make(kind, COMPRESSORS.declared([kind], options)),
        FEEDBACKS.make(name, FEEDBACKS.declared([name], options)),
    )
    if wrong := compression.feedback.why_unsupported(compression.compressor.delta(CHUNK)):
        raise UserError(f"exchange.compress: {wrong}")
    return compression


def _parse_short_form(setting: str) -> dict[str, Any]:
    """Return the table of a short form."""
    match = _SHORT.fullmatch(setting)
    if match is None:
        raise UserError(
            f"exchange.compress = {setting!r}: use FEEDBACK:COMPRESSOR, such as 'econtrol:top1%', 'ef21:rand5%', "
            "'ef14:4bits' or 'sign', or a table with kind"
        )
    feedback = {"feedback": match["feedback"]} if match["feedback"] else {}
    if match["name"]:
        return {"kind": match["name"], **feedback}
    if match["bits"]:
        bits = int(match["bits"])
        return {"kind": "plain" if bits >= 16 else "quantised", "bits": bits, **feedback}
    try:
        keep = float(match["keep"]) / 100
    except ValueError:
        raise UserError(f"exchange.compress = {setting!r}: {match['keep']!r} is not a percentage") from None
    return {"kind": _KINDS[match["kind"]], "keep": keep, **feedback}
