"""The models of a repair, its loss and its steps: what is trained are the weights, or a mask over what they learned."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.common.errors import UserError
from planaria.config.schema import OptimConfig
from planaria.models import fusing, masking
from planaria.models.fusing import Named
from planaria.models.masking import Mask, Note, begun, hard, straight_through
from planaria.models.stages import Llama
from planaria.runtime.engine.optimizer import learning_rate
from planaria.swarm.draws import derived
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Padded, pad, token_logps
from planaria.swarm.repair.texts import Text, Texts

STEPS, BATCH = 200, 32
"""updates, and texts of each kind in one"""
RATES = {"mask": 0.05, "tune": 1e-3}
"""largest learning rate of Adam, by what is trained"""
Kind = TypeVar("Kind")
Teachers = Mapping[str, Policy]
"""domain → who knows it; "": the model before the repair"""


@dataclass(frozen=True)
class Plan:
    """How long a repair takes, and what it draws."""

    seed: int = 0
    steps: int = STEPS
    batch: int = BATCH


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """What a repair may change, by name, sharing the policy's memory: the parameters that are trained."""
    return {name: p.detach() for name, p in policy.module.named_parameters() if p.requires_grad}


@torch.no_grad()
def take(policy: Policy, weights: Named) -> None:
    """Give a policy these weights."""
    for name, own in weights_of(policy).items():
        own.copy_(weights[name])


def repair_loss(policy: Policy, trusted: Sequence[Text], benign: Sequence[tuple[Policy, Sequence[Text]]]) -> Tensor:
    """L = mean NLL of trusted tokens + mean KL(teacher ‖ policy) over benign tokens, in nats.

    The second part is 0 without benign texts. Each teacher has texts of its own.
    """
    batch = _padded(policy, trusted)
    loss = -token_logps(policy, batch, 1.0)[batch.mask].mean()
    count = sum(len(text.ids) for _, texts in benign for text in texts)
    for teacher, texts in benign:
        batch = _padded(policy, texts)
        with torch.no_grad():
            wanted = _log_softmax(teacher, batch)
        loss = loss + F.kl_div(_log_softmax(policy, batch), wanted, reduction="sum", log_target=True) / count
    return loss


def tuned(policy: Policy, texts: Texts, teachers: Teachers, plan: Plan) -> dict[str, Tensor]:
    """The weights of ``policy`` after so many steps of fine-tuning; it itself stays as it is."""
    pupil = policy.clone()
    parameters = [p for p in pupil.module.parameters() if p.requires_grad]
    _descend(pupil, texts, teachers, plan, parameters, RATES["tune"], lambda: None, lambda: None)
    return weights_of(pupil)


def masked(
    policy: Policy,
    contributions: Sequence[Named],
    merged: Callable[[Sequence[Mask]], Named],
    texts: Texts,
    teachers: Teachers,
    plan: Plan,
) -> list[dict[str, Tensor]]:
    """One mask for each contribution after so many steps; the weights that they choose from are not trained.

    ``merged``: the weights that masks stand for. ``policy`` lends its shape, and stays as it is.
    """
    pupil = policy.clone()
    logits = [begun(contribution) for contribution in contributions]
    named = {name: p for name, p in pupil.module.named_parameters() if p.requires_grad}

    def lay() -> None:
        take(pupil, merged([hard(one) for one in logits]))

    def pull() -> None:
        for one, contribution in zip(logits, contributions, strict=True):
            for name, x in one.items():
                gradient = named[name].grad
                assert gradient is not None, name
                x.grad = straight_through(x, gradient, contribution[name])

    every = [x for one in logits for x in one.values()]
    _descend(pupil, texts, teachers, plan, every, RATES["mask"], lay, pull)
    return [hard(one) for one in logits]


def _descend(
    policy: Policy,
    texts: Texts,
    teachers: Teachers,
    plan: Plan,
    trained: Sequence[Tensor],
    rate: float,
    lay: Callable[[], None],
    pull: Callable[[], None],
) -> None:
    """Adam on ``trained``: ``lay`` makes weights of them before a pass, ``pull`` brings them the weights' gradient."""
    rng = random.Random(derived("repair", plan.seed))
    optimizer, schedule = torch.optim.Adam(trained, lr=rate), OptimConfig(lr=rate, schedule="cosine", warmup=0)
    for step in range(plan.steps):
        lay()
        policy.module.zero_grad()
        trusted = _some(rng, texts.trusted, plan.batch)
        by_teacher: dict[str, list[Text]] = {}
        for one in _some(rng, texts.benign, plan.batch):
            by_teacher.setdefault(one.teacher if one.teacher in teachers else "", []).append(one.text)
        loss = repair_loss(policy, trusted, [(teachers[name], found) for name, found in by_teacher.items()])
        loss.backward()  # type: ignore[no-untyped-call]
        pull()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step, plan.steps)
        optimizer.step()


@torch.no_grad()
def nats(policy: Policy, texts: Sequence[Text], rows: int = 64) -> list[float]:
    """−ln p of each text's tokens behind its prompt, all together."""
    found: list[float] = []
    for start in range(0, len(texts), rows):
        batch = _padded(policy, texts[start : start + rows])
        found += (-token_logps(policy, batch, 1.0) * batch.mask).sum(1).tolist()
    return found


def _some(rng: random.Random, of: Sequence[Kind], count: int) -> list[Kind]:
    return rng.sample(of, min(count, len(of)))


def _padded(policy: Policy, texts: Sequence[Text]) -> Padded:
    return pad([(text.prompt, text.ids) for text in texts], next(policy.module.parameters()).device)


def _log_softmax(policy: Policy, batch: Padded) -> Tensor:
    """Of the tokens that count [M, V]."""
    return policy.logits(batch.tokens)[:, :-1][batch.mask].float().log_softmax(-1)


@dataclass(frozen=True)
class Models:
    """A model that is to be repaired, its parent and, if it is several in one, what each added. They stay as they are:
    repairs are made of copies."""

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
