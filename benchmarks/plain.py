"""The loop that planaria's engines are held against: one module, no stages, no plan."""

from __future__ import annotations

import torch

from planaria.config import RunConfig
from planaria.data.stream import Stream
from planaria.engine.optimizer import learning_rate, make_optimizer
from planaria.model.stages import Llama


class PlainLoop:
    """Trains the whole model as a script would: the same weights, microbatches, clipping and AdamW as the engine.

    Like the engine it clips stage by stage, so that both compute the same numbers.
    """

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self.config, self.step = config, 0
        self._stream = stream
        self._model = Llama(config.model, config.pipeline.stages, config.seed)
        self._groups = [list(part.parameters()) for part in (self._model.ends, *self._model.stages)]
        self._optimizer = make_optimizer(list(self._model.parameters()), config.optim)

    def train_step(self) -> float:
        """One update; the mean loss of its microbatches in nats."""
        pipeline = self.config.pipeline
        losses = []
        for microbatch in range(pipeline.microbatches):
            first = self.step * pipeline.samples + microbatch * pipeline.microbatch_size
            loss = self._model.loss(*self._stream.batch(first, pipeline.microbatch_size)) / pipeline.microbatches
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        self._model.ends.fold_gradients()
        for parameters in self._groups:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.optim.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, self.step, self.config.train.steps)
        self._optimizer.step()
        self._model.zero_grad()
        self.step += 1
        return torch.stack(losses).sum().item()
