"""The loops that planaria's engines are held against: one module, no stages, no plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from planaria.config.schema import RunConfig
from planaria.data.stream import Stream
from planaria.models.hf_config import to_config
from planaria.models.optimizers.adamw import adamw
from planaria.models.stages import Llama, global_name
from planaria.runtime.engine.optimizer import learning_rate


class PlainLoop:
    """Trains the whole model as a script would: the same weights, microbatches, clipping and AdamW as the engine.

    Like the engine it clips stage by stage, so that both compute the same numbers.
    """

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self.config, self.step = config, 0
        self._stream = stream
        model = Llama(config.model, config.pipeline.stages, config.seed)
        self._module = self.module_of(model)
        self._groups = self.groups_of(model)
        self._optimizer = adamw([p for group in self._groups for p in group], config.optim)

    def module_of(self, model: Llama) -> Any:
        """What is trained: it has the weights of ``model``."""
        return model

    def groups_of(self, model: Llama) -> list[list[Parameter]]:
        """Its parameters, those of each stage of ``model`` together."""
        return [list(part.parameters()) for part in (model.ends, *model.stages)]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next tokens, in nats."""
        found: Tensor = self._module.loss(tokens, targets)
        return found

    def fold(self) -> None:
        """All gradients of a step are there."""
        self._module.ends.fold_gradients()

    def train_step(self) -> float:
        """One update; the mean loss of its microbatches in nats."""
        pipeline = self.config.pipeline
        losses = []
        for microbatch in range(pipeline.microbatches):
            first = self.step * pipeline.samples + microbatch * pipeline.microbatch_size
            loss = self.loss(*self._stream.batch(first, pipeline.microbatch_size)) / pipeline.microbatches
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        self.fold()
        for parameters in self._groups:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.optim.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, self.step, self.config.train.steps)
        self._optimizer.step()
        self._module.zero_grad()
        self.step += 1
        return torch.stack(losses).sum().item()


class TransformersLoop(PlainLoop):
    """The same with the Llama of ``transformers``, and its own loss."""

    def __init__(self, config: RunConfig, stream: Stream, attention: str) -> None:
        """``attention``: "sdpa" or "eager"."""
        self._attention = attention
        super().__init__(config, stream)

    def module_of(self, model: Llama) -> Any:
        import transformers

        described = transformers.LlamaConfig(**to_config(model.config), use_cache=False)
        module = transformers.AutoModelForCausalLM.from_config(described, attn_implementation=self._attention)
        with torch.no_grad():
            for name, weight in model.global_state().items():
                module.get_parameter(name).copy_(weight)
        return module.train()

    def groups_of(self, model: Llama) -> list[list[Parameter]]:
        stages = len(model.stages)
        names = (
            [global_name(model.config, stages, number, local) for local, _ in part.named_parameters()]
            for number, part in enumerate((model.ends, *model.stages))
        )
        return [[self._module.get_parameter(name) for name in group] for group in names]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self._module(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return found

    def fold(self) -> None:
        """Nothing: it has one gradient for a tied table."""
