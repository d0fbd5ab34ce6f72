"""Computation of one stage in a step: forward pass, backward pass and update, and access to its state.

Both engines call it with the same actions, so their losses agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from planaria.config.schema import RunConfig
from planaria.models.bf16_weights import Bf16Weights
from planaria.models.chunked_loss import compile_pass
from planaria.models.families import activation_shape, build_stage, make_family
from planaria.models.optimizers import make_optimizer
from planaria.models.state import StageState
from planaria.pipeline.codecs import make_model_codec
from planaria.pipeline.codecs.base import Leg, Visit
from planaria.pipeline.codecs.subspace import SubspaceCodec
from planaria.runtime.worker.clipping import clip_gradients, total_norms
from planaria.runtime.worker.gradient_sums import add_new_gradients, detach_gradients
from planaria.runtime.worker.learning_rate import learning_rate
from planaria.runtime.worker.step_samples import StepInputs, to_device


class NonFinite(Exception):
    """The loss or a gradient is not finite; the step must not be committed."""


@dataclass
class PendingStep:
    """The results of a step or validation until it is committed or dropped, by microbatch, or microbatch and hop."""

    passes: float = 0.0
    """backward passes so far, times :attr:`StepInputs.weights`"""
    targets_seen: float = 0.0
    """targets of these passes"""
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """activations that need a gradient"""
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    group_norms: Tensor | None = None
    """L2 norms before clipping, once the gradient is clipped"""
    norms: tuple[float, float] | None = None
    """L2 norm of the finished gradient before and after clipping"""
    before: StageState | None = None
    """state before :meth:`StageRunner.prepare`"""


class StageRunner:
    """One stage's module, optimizer and pending step."""

    def __init__(self, config: RunConfig, stage: int, initialise: bool = True) -> None:
        """Build ``stage`` (0 is the ends). Without ``initialise``, load its weights before use."""
        self.config, self.stage = config, stage
        self.module: Any = build_stage(
            config.model, config.pipeline.stages, stage, config.seed, config.train.device, initialise
        )
        if config.train.recompute is True:
            self.module.recompute = True  # type: ignore[assignment]
        self.parameters = dict(self.module.named_parameters())
        self._copies = Bf16Weights(self.module, wanted=config.train.bf16_weights)
        if config.train.compile:
            compile_pass(self.module, stage)
        self.optimizer_kind = make_optimizer(config.optim)
        self.optimizer = self.optimizer_kind.build(self.parameters, stage, config.optim)
        self.lr_scale = 1.0
        self.scales: dict[str, float] = {}
        self.grad_norm: float | None = None
        self.clipped_norm: float | None = None
        self.codec = make_model_codec(config.model, config.pipeline)
        self.shape = activation_shape(config.model, config.pipeline)
        """shape of an activation"""
        # Each length would be compiled. A subspace's codec sends zeros of padding as large numbers.
        fixed = config.train.compile or isinstance(self.codec, SubspaceCodec)
        self._shortens = not fixed and make_family(config.model).accepts_shorter_samples()
        self._step = StepInputs()
        self._pending = PendingStep()

    def begin(self, step: StepInputs) -> None:
        """Start a step or a validation."""
        self.drop()
        self._step = step

    def forward(self, microbatch: int, hop: int, x: Tensor | None) -> Tensor | None:
        """Run one forward pass on the message ``x``, and return the message with the activation.

        At the ends, hop 0 embeds the data, and any other hop computes the loss and returns None.

        :raises NonFinite: if the codec of the message rejects the activation.
        """
        ids: Tensor | None = None
        if x is not None:
            message = x.to(self.config.train.device)
            ids = self.codec.ids(message, self.shape, "forward")
            x = self.codec.decode(message, self.shape, "forward")[:, : self._length(microbatch)]
            x = x.contiguous().float().detach().requires_grad_(self._step.train)
        with torch.set_grad_enabled(self._step.train), self._precision():
            if self.stage:
                assert x is not None
                y = self.module(x, *self._mask(microbatch))
            elif hop == 0:
                assert self._step.batch is not None
                tokens, targets = self._step.batch(microbatch)
                length = self._length(microbatch)
                self._pending.targets[microbatch] = to_device(targets[:, :length], self.config.train.device)
                ids = to_device(tokens, self.config.train.device)
                y = self.module.embed(ids[:, :length], *self._mask(microbatch))
            else:
                assert x is not None
                y = self._step.weigh(self.module.loss(x, self._pending.targets.pop(microbatch)), microbatch)
                self._pending.losses[microbatch] = y.detach()
        if self._step.train:
            self._pending.outputs[microbatch, hop] = y
            if x is not None:
                self._pending.inputs[microbatch, hop] = x
        return None if y.ndim == 0 else self._message(y.detach(), "forward", microbatch, hop, ids)

    def _message(self, x: Tensor, leg: Leg, microbatch: int, hop: int, ids: Tensor | None = None) -> Tensor:
        """Return the message that carries ``x``, an activation of tokens ``ids`` or a gradient."""
        sample = self._step.first_sample + microbatch * self.config.pipeline.microbatch_size
        if x.shape[1] < self.shape[1]:
            x = pad(x, (0, 0, 0, self.shape[1] - x.shape[1]))
        message = self.codec.encode(x, leg, Visit(self.config.seed, sample, hop), ids)
        if not message.is_cuda and (damage := self.codec.invalid_reason(message, self.shape, leg)):
            label = "activation" if leg == "forward" else "gradient"
            raise NonFinite(
                f"the {label} of stage {self.stage} is not finite ({damage}); lower optim.lr or check the data"
            )
        return message

    def _mask(self, microbatch: int) -> tuple[Tensor, ...]:
        """Return the stage's additional arguments: the document mask, if any."""
        if self._step.masks is None:
            return ()
        length = self._length(microbatch)
        return (to_device(self._step.masks(microbatch)[..., :length, :length], self.config.train.device),)

    def _length(self, microbatch: int) -> int:
        """Return the number of tokens that are computed."""
        lengths = self._step.lengths
        return self.shape[1] if lengths is None or not self._shortens else lengths(microbatch)

    def backward(self, microbatch: int, hop: int, grad: Tensor | None) -> Tensor | None:
        """Run one backward pass on the message ``grad``; return the message with the gradient of the input, if any."""
        y = self._pending.outputs.pop((microbatch, hop))
        if not y.requires_grad:  # of frozen ends
            return None
        weight = 1.0 if self._step.weights is None else self._step.weights[microbatch]
        self._pending.passes += weight
        if self._step.target_counts is not None:
            self._pending.targets_seen += weight * self._step.target_counts.counts[microbatch]
        sums = detach_gradients(self.parameters.values()) if y.is_cuda else []
        if grad is not None:
            grad = self.codec.decode(grad.to(y.device), self.shape, "backward")[:, : y.shape[1]].to(y.dtype)
        torch.autograd.backward(y, grad)
        add_new_gradients(sums)
        self._copies.collect_gradients()
        x = self._pending.inputs.pop((microbatch, hop), None)
        return None if x is None or x.grad is None else self._message(x.grad, "backward", microbatch, hop)

    def clip(self) -> None:
        """Scale, fold and clip the gradient after the last microbatch. On a GPU, only :meth:`finish` waits for the
        result.
        """
        if self._step.train and self._pending.group_norms is None:
            self.rescale_for_skips()
            self._pending.group_norms = clip_gradients(self.parameters, self.config.optim)

    def finish(self) -> float | None:
        """Clip the gradient and make it ready to commit; return its L2 norm before clipping, None in a validation.

        :raises NonFinite: if the loss or the gradient is not finite.
        """
        self.clip()
        if self.loss is not None and not math.isfinite(self.loss):
            raise NonFinite(f"the loss is {self.loss}; lower optim.lr or check the data")
        if self._pending.group_norms is None:
            return None
        norm, bounded = total_norms(self._pending.group_norms, self.config.optim)
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient norm of stage {self.stage} is {norm}; lower optim.lr")
        self._pending.norms = norm, bounded
        return norm

    def rescale_for_skips(self) -> None:
        """Scale the gradient to the mean over the microbatches (of dialogues: the targets) that this stage has seen, if
        routes skipped it.

        Otherwise a stage that processed half of them would make half the update. Idempotent; no effect at the ends.
        """
        if self.stage == 0:
            self._fold()
        elif 0 < self._pending.passes != self._step.microbatches:
            scale = self._step.microbatches / self._pending.passes
            if self._step.target_counts is not None:
                scale = self._step.target_counts.replica_total / self._pending.targets_seen
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            self._pending.passes = float(self._step.microbatches)

    def _fold(self) -> None:
        """Combine gradients that the ends accumulate separately, if their family does that."""
        if fold := getattr(self.module, "fold_gradients", None):
            fold()

    @property
    def grads(self) -> dict[str, Tensor]:
        """The current gradient, zero where missing; may share memory."""
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}

    def set_gradients(self, grads: Mapping[str, Tensor]) -> None:
        """Replace the gradient by ``grads``, which may be changed later."""
        for name, parameter in self.parameters.items():
            parameter.grad = grads[name].to(parameter.device, parameter.dtype)

    def gradient_sums(self) -> Tensor:
        """Return this node's share of the step's sums: flat gradients, passes and targets seen, loss. [n + 3], fp32,
        CPU."""
        self._fold()
        counted = torch.tensor([self._pending.passes, self._pending.targets_seen, self.loss or 0.0])
        return torch.cat([*(grad.reshape(-1).float().cpu() for grad in self.grads.values()), counted])

    def load_gradient_sums(self, total: Tensor) -> None:
        """Replace this node's share by the sum over all nodes."""
        *pieces, counted = torch.split(total, [*(p.numel() for p in self.parameters.values()), 3])
        named = zip(self.parameters.items(), pieces, strict=True)
        # Copy, because others absorb the same total, and clipping changes gradients in place.
        self.set_gradients({name: piece.view_as(parameter).clone() for (name, parameter), piece in named})
        if not self.config.model.one_array:  # there, every stage sees all microbatches
            self._pending.passes, self._pending.targets_seen = counted[:2].round().tolist()  # whole numbers
        if self.stage == 0:
            self._pending.losses = {0: counted[2].clone()}

    def gradients(self) -> StageState:
        """Return the finished, clipped gradient and its norms; shares memory."""
        assert self._pending.norms is not None, "there is no finished step"
        return StageState(self.grads, grad_norm=self._pending.norms[0], clipped_norm=self._pending.norms[1])

    def prepare(self, step: int) -> None:
        """Apply the gradient of ``step`` revocably: :meth:`drop` undoes it until :meth:`commit`. Copies the whole
        state.
        """
        before = self.state()
        before.weights = {name: tensor.clone() for name, tensor in before.weights.items()}
        before.moments = {
            name: {key: tensor.clone() for key, tensor in moments.items()} for name, moments in before.moments.items()
        }
        self._update(step)
        self._pending.before = before

    def commit(self, step: int) -> None:
        """Apply the gradient of ``step`` permanently."""
        if self._pending.before is None:
            self._update(step)
        self._pending.before = None
        self.drop()

    def apply(self, step: int, gradients: StageState) -> None:
        """Commit ``step`` with gradients from another worker's :meth:`gradients`."""
        self.set_gradients(gradients.weights)
        assert gradients.grad_norm is not None and gradients.clipped_norm is not None
        self._pending.norms = (gradients.grad_norm, gradients.clipped_norm)
        self.commit(step)

    def _update(self, step: int) -> None:
        assert self._pending.norms is not None, "an update without a finished step"
        rate = learning_rate(self.config.optim, step, self.config.train.schedule_steps or self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (self.lr_scale if group["scale"] is None else group["scale"])
        self.optimizer.step()
        self._copies.refresh()
        self.grad_norm, self.clipped_norm = self._pending.norms

    def drop(self) -> None:
        """Discard the current step; undo :meth:`prepare`."""
        dropped, self._pending = self._pending, PendingStep()
        self.module.zero_grad()
        for parameter in self.parameters.values():  # those with copies are no longer the module's
            parameter.grad = None
        if dropped.before is not None:
            self.load(dropped.before)

    @property
    def loss(self) -> float | None:
        """Mean loss (nats) of the microbatches of this step so far, or None at block stages.

        Summed in the order of microbatches, since they may return to the ends in another order.
        """
        losses = [loss for _, loss in sorted(self._pending.losses.items())]
        return torch.stack(losses).sum().item() if losses else None

    def state(self) -> StageState:
        """Return the stage's state, which shares memory: copy or send it before the next commit."""
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        updated = {name: self.optimizer.state[p] for name, p in self.parameters.items() if p in self.optimizer.state}
        moments = {name: {key: state[key] for key in self.optimizer_kind.keys} for name, state in updated.items()}
        steps = torch.stack([state["step"] for state in updated.values()]).tolist() if updated else []
        clocks = {name: int(step) for name, step in zip(updated, steps, strict=True)}
        generators = {kind: generator.get_rng_state() for kind, generator in self._generators.items()}
        norms = self.grad_norm, self.clipped_norm
        return StageState(weights, moments, clocks, self.lr_scale, *norms, generators, scales=dict(self.scales))

    def whole_state(self) -> StageState:
        """Return the state for another worker; shares memory."""
        return self.state()

    def load(self, state: StageState) -> None:
        """Load ``state``: weights, moments, clocks, learning-rate scale, norms, and generators of this device.

        :raises ValueError: if a parameter is missing or has another shape, or the optimizer differs.
        """
        self.drop()
        self.set_weights(state.weights)
        self.lr_scale, self.scales = state.lr_scale, dict(state.scales)
        scales = {self.parameters[name]: scale for name, scale in self.scales.items()}
        self.optimizer = self.optimizer_kind.build(self.parameters, self.stage, self.config.optim, scales)
        for name, moments in state.moments.items():
            if moments.keys() != set(self.optimizer_kind.keys):
                raise ValueError(f"stage {self.stage}: {name} has {sorted(moments)}, not {self.optimizer_kind.keys}")
            parameter = self.parameters[name]
            step = torch.tensor(float(state.clocks[name]), device=parameter.device)
            tensors = {key: tensor.to(parameter.device, copy=True) for key, tensor in moments.items()}
            self.optimizer.state[parameter] = {"step": step, **tensors}
        self.grad_norm, self.clipped_norm = state.grad_norm, state.clipped_norm
        for kind in self._generators.keys() & state.generators.keys():
            # Copy, because torch requires an aligned tensor of eight-byte numbers.
            self._generators[kind].set_rng_state(state.generators[kind].clone())

    def forward_copy(self, microbatch: int, x: Tensor) -> None:
        """Compute the forward pass of another node's stage, and keep what its backward pass needs."""
        self.forward(microbatch, 0, x)

    def release(self) -> None:
        """Free the stage's memory before another runner is built; this one cannot be used afterwards."""
        self._copies = Bf16Weights(self.module, wanted=False)
        self.module = self.optimizer = None  # type: ignore[assignment]
        self.parameters = {}
        self._pending = PendingStep()

    @property
    def nbytes(self) -> int:
        """Bytes of weights and moments."""
        return self.state().nbytes

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights; moments and counts stay.

        :raises ValueError: if a parameter is missing or has another shape.
        """
        self.require_fit(weights)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        self._copies.refresh()

    def require_fit(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a parameter is missing or has another shape."""
        if weights.keys() != self.parameters.keys():
            differing = sorted(weights.keys() ^ self.parameters.keys())
            raise ValueError(f"stage {self.stage}: parameters differ: {differing}")
        for name, parameter in self.parameters.items():
            if (shape := weights[name].shape) != parameter.shape:
                raise ValueError(f"stage {self.stage}: {name} is {list(shape)}, not {list(parameter.shape)}")

    @property
    def _generators(self) -> dict[str, Any]:
        return {"cpu": torch.random} | ({"cuda": torch.cuda} if self.config.train.device == "cuda" else {})

    def _precision(self) -> AbstractContextManager[object]:
        if self.config.train.precision == "bf16":
            return torch.autocast(self.config.train.device, dtype=torch.bfloat16)
        return nullcontext()
