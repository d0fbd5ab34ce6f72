"""Models, loss and training of a repair. The weights are trained, or a mask over their change."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.common.errors import UserError
from planaria.config.schema import OptimConfig
from planaria.models import masking, task_vectors
from planaria.models.llama_stages import Llama
from planaria.models.masking import Mask, MaskNote, binary_mask, keep_all_logits, straight_through
from planaria.models.task_vectors import Named
from planaria.runtime.worker.learning_rate import learning_rate
from planaria.swarm.learning.weight_versions import copy_weights, trained_parameters
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Padded, pad, token_logps
from planaria.swarm.repair.texts import RepairTexts, Text

STEPS, BATCH = 200, 32
"""updates, and texts of each kind per update"""
RATES = {"mask": 0.05, "tune": 1e-3}
"""peak learning rate of Adam, by what is trained"""
Teachers = Mapping[str, Policy]
"""domain → teacher; "": the model before the repair"""


@dataclass(frozen=True)
class RepairPlan:
    """Length and seed of a repair."""

    seed: int = 0
    steps: int = STEPS
    batch: int = BATCH


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """Return the trainable parameters by name, sharing the policy's memory."""
    return {name: parameter.detach() for name, parameter in trained_parameters(policy.module).items()}


def repair_loss(policy: Policy, trusted: Sequence[Text], benign: Sequence[tuple[Policy, Sequence[Text]]]) -> Tensor:
    """L = mean NLL of trusted tokens + mean KL(teacher ‖ policy) over benign tokens, in nats.

    The second term is 0 without benign texts.
    """
    batch = _pad_texts(policy, trusted)
    loss = -token_logps(policy, batch, 1.0)[batch.mask].mean()
    count = sum(len(text.ids) for _, texts in benign for text in texts)
    for teacher, texts in benign:
        batch = _pad_texts(policy, texts)
        with torch.no_grad():
            wanted = _log_softmax(teacher, batch)
        loss = loss + F.kl_div(_log_softmax(policy, batch), wanted, reduction="sum", log_target=True) / count
    return loss


def fine_tune(policy: Policy, texts: RepairTexts, teachers: Teachers, plan: RepairPlan) -> dict[str, Tensor]:
    """Return the weights of a copy of ``policy`` after fine-tuning."""
    pupil = policy.clone()
    parameters = trained_parameters(pupil.module).values()
    _descend(pupil, texts, teachers, plan, [*parameters], RATES["tune"], lambda: None, lambda: None)
    return weights_of(pupil)


def train_masks(
    policy: Policy,
    contributions: Sequence[Named],
    merge: Callable[[Sequence[Mask]], Named],
    texts: RepairTexts,
    teachers: Teachers,
    plan: RepairPlan,
) -> list[dict[str, Tensor]]:
    """Train one mask per contribution; the weights stay fixed.

    ``merge`` maps masks to weights. ``policy`` is copied for its architecture.
    """
    pupil = policy.clone()
    logits = [keep_all_logits(contribution) for contribution in contributions]
    parameters = trained_parameters(pupil.module)

    def assign_weights() -> None:
        copy_weights(pupil.module, merge([binary_mask(one) for one in logits]))

    def assign_gradients() -> None:
        for one, contribution in zip(logits, contributions, strict=True):
            for name, x in one.items():
                gradient = parameters[name].grad
                assert gradient is not None, name
                x.grad = straight_through(x, gradient, contribution[name])

    every = [x for one in logits for x in one.values()]
    _descend(pupil, texts, teachers, plan, every, RATES["mask"], assign_weights, assign_gradients)
    return [binary_mask(one) for one in logits]


def _descend(
    policy: Policy,
    texts: RepairTexts,
    teachers: Teachers,
    plan: RepairPlan,
    trained: Sequence[Tensor],
    rate: float,
    assign_weights: Callable[[], None],
    assign_gradients: Callable[[], None],
) -> None:
    """Adam on ``trained``; the callbacks set the policy's weights before a pass and the gradients after it."""
    rng = random.Random(derive_seed("repair", plan.seed))
    optimizer, schedule = torch.optim.Adam(trained, lr=rate), OptimConfig(lr=rate, schedule="cosine", warmup=0)
    for step in range(plan.steps):
        assign_weights()
        policy.module.zero_grad()
        trusted = rng.sample(texts.trusted, min(plan.batch, len(texts.trusted)))
        by_teacher: dict[str, list[Text]] = {}
        for benign in rng.sample(texts.benign, min(plan.batch, len(texts.benign))):
            by_teacher.setdefault(benign.teacher if benign.teacher in teachers else "", []).append(benign.text)
        loss = repair_loss(policy, trusted, [(teachers[name], value) for name, value in by_teacher.items()])
        loss.backward()  # type: ignore[no-untyped-call]
        assign_gradients()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step, plan.steps)
        optimizer.step()


@torch.no_grad()
def nats(policy: Policy, texts: Sequence[Text], rows: int = 64) -> list[float]:
    """Return −ln p of each text's continuation."""
    result: list[float] = []
    for start in range(0, len(texts), rows):
        batch = _pad_texts(policy, texts[start : start + rows])
        result += (-token_logps(policy, batch, 1.0) * batch.mask).sum(1).tolist()
    return result


def _pad_texts(policy: Policy, texts: Sequence[Text]) -> Padded:
    return pad([(text.prompt, text.ids) for text in texts], next(policy.module.parameters()).device)


def _log_softmax(policy: Policy, batch: Padded) -> Tensor:
    """Return the log-probabilities at the continuations' tokens [M, V]."""
    return policy.logits(batch.tokens)[:, :-1][batch.mask].float().log_softmax(-1)


@dataclass(frozen=True)
class RepairModels:
    """A model to repair, its parent and, for a fused model, its contributions. Repairs work on copies."""

    safe: Policy
    """the parent, or the model itself if a repair needs none"""
    tuned: Policy
    contributions: Sequence[Named] = ()
    """difference of each fused model to the parent; empty: a single model with one task vector"""
    experts: Mapping[str, Policy] = field(default_factory=dict)
    """domain → fused model that knows it"""

    @property
    def parent(self) -> dict[str, Tensor]:
        return weights_of(self.safe)

    @property
    def whole(self) -> dict[str, Tensor]:
        return weights_of(self.tuned)

    @property
    def exported(self) -> dict[str, str]:
        """Parameter name → name in an exported file; foreign models keep their names."""
        module = self.tuned.module
        return module.exported_names() if isinstance(module, Llama) else {name: name for name in self.whole}

    @property
    def parts(self) -> Sequence[Named]:
        """Task vectors that a mask covers."""
        return self.contributions or [task_vectors.task_vector(self.whole, self.parent)]

    @property
    def teachers(self) -> Teachers:
        """Reference models for benign texts."""
        return {"": self.tuned, **self.experts}

    def require_related(self, model_name: str) -> float:
        """Return :func:`planaria.models.task_vectors.relative_distance` of the model ``model_name`` and its parent.

        :raises UserError: if tokenizers or shapes differ.
        """
        if self.safe.tokenizer_fingerprint != self.tuned.tokenizer_fingerprint:
            raise UserError(
                f"{model_name}: its tokenizer differs from its parent's; use the parent that it was trained from"
            )
        task_vectors.require_alike(self.parent, self.whole, model_name)
        return task_vectors.relative_distance(task_vectors.task_vector(self.whole, self.parent), self.parent)

    def require_whole(self, model_name: str) -> None:
        """:raises UserError: unless all parameters are trained; a mask over adapters does not cover the weights."""
        if any(not parameter.requires_grad for parameter in self.tuned.module.parameters()):
            raise UserError(
                f"{model_name}: only its adapters are trained, and a mask needs all weights; repair it with --by tune, "
                "or export it (`planaria export`) and repair that"
            )

    def merge(self, masks: Sequence[Mask]) -> dict[str, Tensor]:
        """Return the weights selected by masks of the parts; for a single model bit-identical to it or its parent."""
        if self.contributions:
            return masking.merge_masked(self.parent, self.contributions, masks)
        return masking.select_by_mask(self.parent, self.whole, masks[0])

    def note(self, result: Named) -> MaskNote:
        """Return the provenance note of a mask and its weights."""
        experts = [weights_of(expert) for expert in self.experts.values()] or [self.whole]
        tuned = tuple(map(task_vectors.digest, experts))
        return MaskNote(safe=task_vectors.digest(self.parent), tuned=tuned, result=task_vectors.digest(result))

    def policy(self, weights: Named) -> Policy:
        """Return a copy of the model with other weights."""
        result = self.tuned.clone()
        copy_weights(result.module, weights)
        return result
