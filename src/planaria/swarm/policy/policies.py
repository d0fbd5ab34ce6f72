"""Policies at hand: our own LLaMA, and whatever a folder holds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planaria import documents
from planaria.checkpoint.loading import load_model
from planaria.checkpoint.store import CheckpointStore
from planaria.data.tokenizer import Tokenizer
from planaria.engine.weights import located
from planaria.errors import UserError
from planaria.model.decode import decode
from planaria.model.huggingface import WEIGHTS, export_model, import_model, is_exported, is_ours
from planaria.model.stages import Llama
from planaria.swarm.policy.base import Drawn, Policy
from planaria.swarm.policy.huggingface import HuggingFacePolicy, open_model
from planaria.swarm.policy.wording import Wording


class LlamaPolicy(Wording):
    """Our own LLaMA as a policy (:class:`planaria.swarm.policy.base.Policy`); all of its parameters are trained.

    Gradients of :meth:`logits` are whole after one backward: nothing is left to fold.
    """

    splits = True

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        """:raises UserError: when the tokenizer has ids that the model has no rows for."""
        super().__init__(tokenizer, model.config.vocab)
        self._model = model
        self.module: nn.Module = model
        self.context = model.config.context

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]; rows may be padded on the right."""
        return self.head(self.states(tokens))

    def states(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → [B, T, D], before the last norm."""
        with self.passing(self.module):
            return self._model.hidden(tokens)

    def head(self, states: Tensor) -> Tensor:
        """States [..., D] → logits [..., V]."""
        with self.passing(self.module):
            return self._model.ends.logits(states, apart=False)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        max_new: int,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
    ) -> list[list[Drawn]]:
        """``count`` completions of every prompt: at most ``max_new`` draws each, the end's among them.

        Draws and log-probabilities are those of :func:`planaria.model.decode.decode`: a completion does not depend on
        what else is sampled beside it.
        """
        rows = [prompt for prompt in prompts for _ in range(count)]
        with self.passing(self.module):
            found = decode(self._model, rows, max_new, temperature, top_k, generator, self.end)
        drawn = [Drawn(row.ids, row.ended, row.logps) for row in found]
        return [drawn[start : start + count] for start in range(0, len(rows), count)]

    def export(self, folder: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder; :func:`planaria.model.huggingface.export_model`."""
        with tempfile.TemporaryDirectory() as temporary:
            self.tokenizer.save(file := Path(temporary) / "tokenizer.json")
            export_model(self._model, folder, file, self.end)


def open_policy(path: str, lora_rank: int = 0, lora_alpha: int | None = None, seed: int = 0) -> Policy:
    """The policy in a run's folder (its newest whole checkpoint), an exported or Hugging Face folder, or "hf:NAME".

    A Llama that is like ours becomes our own, unless LoRA is asked for; anything else is read by ``transformers``.
    Only "hf:NAME" asks the network; nothing is ever unpickled, and no code of a model's is run. LoRA's ``lora_rank``,
    ``lora_alpha`` and ``seed`` as in :class:`planaria.swarm.policy.huggingface.HuggingFacePolicy`.

    :raises UserError: when something is missing, damaged or does not fit.
    """
    folder = located(path)
    foreign = is_exported(folder)
    if foreign and (lora_rank or not is_ours(folder)):
        return HuggingFacePolicy(open_model(folder), _tokenizer(folder), lora_rank, lora_alpha, seed)
    if foreign:
        return LlamaPolicy(import_model(folder), _tokenizer(folder))
    saved = CheckpointStore(folder / "checkpoints").newest(whole_only=True)
    if saved is None:
        raise UserError(f"{folder}: neither {WEIGHTS} nor a run's whole checkpoint is there; is the path right?")
    if lora_rank:
        raise UserError(f"{folder}: LoRA needs a Hugging Face folder; make one with `planaria export {folder}`")
    return LlamaPolicy(load_model(saved), Tokenizer.open(folder / "tokenizer.json"))


def _tokenizer(folder: Path) -> Tokenizer:
    """A Hugging Face folder's tokenizer; a completion ends where its settings say, of several ends with the first."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder}: no tokenizer.json; save its tokenizer there (the fast kind)")
    for name in ("generation_config.json", "config.json"):
        found = _settings(folder / name).get("eos_token_id")
        end = found[0] if isinstance(found, list) and found else found
        if isinstance(end, int):
            return Tokenizer.open(file, end)
    return Tokenizer.open(file)


def _settings(file: Path) -> dict[str, Any]:
    mend = "download it again"
    found = documents.parse_json(documents.data(file, mend=mend), file, mend) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
