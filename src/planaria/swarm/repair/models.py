"""A model that is to be repaired, the parent that it descends from and, if it is several in one, what each added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from planaria.common.errors import UserError
from planaria.models import fusing, masking
from planaria.models.fusing import Named
from planaria.models.masking import Mask, Note
from planaria.models.stages import Llama
from planaria.swarm.policy.base import Policy
from planaria.swarm.repair.training import Teachers, take, weights_of


@dataclass(frozen=True)
class Models:
    """They stay as they are: repairs are made of copies."""

    safe: Policy
    """the parent; the model itself where a repair needs none"""
    tuned: Policy
    contributions: Sequence[Named] = ()
    """of fused models, what each adds to the parent; none: the model is one, and its task vector is all"""
    experts: Mapping[str, Policy] = field(default_factory=dict)
    """of fused models, domain → the one that knows it"""

    @property
    def parent(self) -> dict[str, Tensor]:
        return weights_of(self.safe)

    @property
    def whole(self) -> dict[str, Tensor]:
        return weights_of(self.tuned)

    @property
    def exported(self) -> dict[str, str]:
        """The name of each parameter in an exported file; other models than ours are saved by their own names."""
        module = self.tuned.module
        return module.exported_names() if isinstance(module, Llama) else {name: name for name in self.whole}

    @property
    def parts(self) -> Sequence[Named]:
        """What a mask is laid over."""
        return self.contributions or [fusing.task_vector(self.whole, self.parent)]

    @property
    def teachers(self) -> Teachers:
        """Who is to be stayed with on benign texts."""
        return {"": self.tuned, **self.experts}

    def require_related(self, what: str) -> float:
        """:func:`planaria.models.fusing.strangeness` of the model ``what`` and its parent.

        :raises UserError: when they have other tokenizers or shapes.
        """
        if self.safe.tokenizer_fingerprint != self.tuned.tokenizer_fingerprint:
            raise UserError(f"{what}: has another tokenizer than its parent; give the parent that it was trained from")
        fusing.require_alike(self.parent, self.whole, what)
        return fusing.strangeness(fusing.task_vector(self.whole, self.parent), self.parent)

    def require_whole(self, what: str) -> None:
        """:raises UserError: when not all parameters are trained: a mask over adapters is none over the weights."""
        if any(not parameter.requires_grad for parameter in self.tuned.module.parameters()):
            raise UserError(
                f"{what}: only its adapters are trained, which no mask is for; repair it with --by tune, or export it "
                "(`planaria export`) and repair that"
            )

    def merged(self, masks: Sequence[Mask]) -> dict[str, Tensor]:
        """The weights that masks of the parts stand for; of one model, bit for bit its own numbers or its parent's."""
        if self.contributions:
            return masking.blended(self.parent, self.contributions, masks)
        return masking.chosen(self.parent, self.whole, masks[0])

    def note(self, result: Named) -> Note:
        """What a mask of these models, and the weights that it gives, has to say."""
        experts = [weights_of(one) for one in self.experts.values()] or [self.whole]
        tuned = tuple(map(fusing.digest, experts))
        return Note(safe=fusing.digest(self.parent), tuned=tuned, result=fusing.digest(result))

    def policy(self, weights: Named) -> Policy:
        """The model with other weights."""
        found = self.tuned.clone()
        take(found, weights)
        return found
