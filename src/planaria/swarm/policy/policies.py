"""Policies from planaria's Llama, and from files and folders."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planaria.common.atomic import new_folder
from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models.chat import Template, template_of
from planaria.models.decode import decode
from planaria.models.gguf_file import is_gguf, read_metadata
from planaria.models.huggingface import WEIGHTS, export_model, import_model, is_exported, is_ours
from planaria.models.llama_stages import Llama
from planaria.models.model_metadata import (
    GENERATION,
    ModelMetadata,
    config_file,
    json_table,
    metadata_of_folder,
    metadata_of_gguf,
)
from planaria.models.transformers.adapters import (
    ADAPTER,
    ADAPTERS,
    LINEAR,
    Lora,
    adapter_generator,
    inject,
    merge,
    write_adapters,
)
from planaria.models.transformers.decoder import assemble_merged
from planaria.models.transformers.recipe_section import decoder_of
from planaria.models.transformers.skeleton import materialise
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.weight_sources import local_weights, open_weights
from planaria.swarm.policy.base import Policy, SampledCompletion
from planaria.swarm.policy.huggingface import HuggingFacePolicy, open_model
from planaria.swarm.policy.prompts import PromptFormat


class LlamaPolicy(PromptFormat):
    """planaria's Llama as a policy (:class:`planaria.swarm.policy.base.Policy`).

    With ``lora_rank``, adapters of all matrices of its layers are trained instead of the weights (arXiv 2106.09685).
    They are scaled by 2 and initialized from ``seed``.

    Gradients of :meth:`logits` are complete after one backward pass; nothing is left to fold.
    """

    splits = True

    def __init__(self, model: Llama, tokenizer: Tokenizer, lora_rank: int = 0, seed: int = 0) -> None:
        """:raises UserError: if the tokenizer has more ids than the model, or LoRA's package is missing."""
        super().__init__(tokenizer, model.config.vocab)
        self._lora = _adapt(model, lora_rank, seed) if lora_rank else None
        self._model = model
        self.module: nn.Module = model
        self.context = model.config.context

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.states(tokens))

    def states(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → [B, T, D], before the last norm."""
        with self.precision_context(self.module):
            return self._model.hidden(tokens)

    def head(self, states: Tensor) -> Tensor:
        with self.precision_context(self.module):
            return self._model.ends.logits(states, separate_gradient=False)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        max_new: int,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
    ) -> list[list[SampledCompletion]]:
        """Sample ``count`` completions of every prompt: at most ``max_new`` tokens each, including the end token.

        It uses :func:`planaria.models.decode.decode`, so a completion does not depend on others in the batch.
        """
        rows = [prompt for prompt in prompts for _ in range(count)]
        with self.precision_context(self.module):
            result = decode(self._model, rows, max_new, temperature, top_k, generator, self.end)
        drawn = [SampledCompletion(row.ids, row.ended, row.logps) for row in result]
        return [drawn[start : start + count] for start in range(0, len(rows), count)]

    def export(self, folder: Path) -> None:
        """Write model, with adapters merged, and tokenizer as a Hugging Face folder;
        :func:`planaria.models.huggingface.export_model`."""
        with tempfile.TemporaryDirectory() as temporary:
            self.tokenizer.save(file := Path(temporary) / "tokenizer.json")
            export_model(
                _merge_adapters(self._model) if self.adapted else self._model, folder, file, self.end, self.usage
            )

    @property
    def adapted(self) -> bool:
        return self._lora is not None

    def save_adapters(self, folder: Path, base: str) -> None:
        """Write the adapters in ``peft``'s format, atomically. OSError if the folder is not empty or writable."""
        assert self._lora is not None
        adapters_by_name = {
            name: tensor.cpu() for name, tensor in self._model.global_state().items() if ADAPTER in name
        }
        with new_folder(folder) as unfinished:
            write_adapters(
                replace(self._lora, base=base), nn.ModuleList(self._model.layers), adapters_by_name, unfinished
            )


def _adapt(model: Llama, rank: int, seed: int) -> Lora:
    """Add adapters to the matrices of a model's layers, drawn from N(0, 1/in), and freeze the weights."""
    model.requires_grad_(False)
    layers, lora = nn.ModuleList(model.layers), Lora(rank, 2.0 * rank, (LINEAR,), "", "")
    inject(layers, lora)
    materialise(layers, "cpu")
    for name, tensor in model.global_state().items():
        matrix, adapter, kind = name.partition(f".{ADAPTER}")
        if kind.startswith("A"):
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=adapter_generator(f"lora {seed} {matrix}"))
        elif adapter:
            tensor.zero_()
    return lora


def _merge_adapters(model: Llama) -> Llama:
    merge(result := copy.deepcopy(model))
    return result


def open_policy(path: str, lora_rank: int = 0, seed: int = 0, chat: bool = True) -> Policy:
    """Open a run's folder (its newest whole checkpoint), a Hugging Face folder, a GGUF file, or "hf:NAME".

    Compatible Llamas become :class:`LlamaPolicy`; ``transformers`` reads other models. Adapters in a folder are merged
    into their base model. Only "hf:NAME" uses the network.
    Nothing is unpickled and no code of a model runs. ``lora_rank`` trains adapters instead of the weights (0: none),
    scaled by 2 and initialized from ``seed``. With ``chat``, a completion ends where the model's chat template ends a
    turn.

    :raises UserError: if something is missing, damaged or incompatible.
    """
    folder = local_weights(path)
    if not folder.exists():
        raise UserError(f"policy.options.path = {path!r}: there is no such folder or file; check the path")
    foreign, adapters = folder.is_file() or is_exported(folder), (folder / ADAPTERS).is_file()
    template = template_of(folder) if foreign and chat and (folder.is_dir() or is_gguf(folder)) else None
    if folder.is_dir() and foreign and (adapters or not is_ours(folder)):
        tokenizer = _set_end_token(folder_tokenizer(folder), template)
        library = _open_with_base(folder) if adapters else open_model(folder)
        policy: LlamaPolicy | HuggingFacePolicy = HuggingFacePolicy(library, tokenizer, lora_rank, seed)
    else:
        model, tokenizer = _open_file(folder) if foreign else _open_run(folder)
        tokenizer = _set_end_token(tokenizer, template)
        policy = LlamaPolicy(model, tokenizer, lora_rank, seed)
    policy.template, policy.usage = template, usage_of(folder, policy.context)
    return policy


def _open_with_base(folder: Path) -> Any:
    """Return the model of the adapters that a run exported into ``folder``, merged."""
    weights = open_weights(folder, "transformers")
    return assemble_merged(decoder_of(weights.config), weights.tensor)


def usage_of(path: Path, context: int) -> ModelMetadata | None:
    """Return the usage data that came with the weights at ``path``."""
    if path.is_dir():
        folder = is_exported(path)
        if folder:
            return metadata_of_folder(path, json_table(config_file(path)), context)
        return run_folders.model_metadata_of(path)
    return metadata_of_gguf(read_metadata(path).values, context) if is_gguf(path) else None


def _open_file(path: Path) -> tuple[Llama, Tokenizer]:
    if path.is_dir():
        return import_model(path), folder_tokenizer(path)
    weights = open_weights(path)
    if weights.tokenizer is None:
        raise UserError(f"{path} has no tokenizer; use a GGUF file, or a folder with a tokenizer.json")
    end = read_metadata(path).values.get("tokenizer.ggml.eos_token_id")
    return weights.model(), Tokenizer.open(path, end if isinstance(end, int) else None)


def _open_run(folder: Path) -> tuple[Llama, Tokenizer]:
    saved = CheckpointStore(folder / "checkpoints").newest(whole_only=True)
    if saved is None:
        raise UserError(f"{folder}: neither {WEIGHTS} nor a run's whole checkpoint is there; check the path")
    has_config = (folder / run_folders.CONFIG).is_file()
    bare = has_config and run_folders.config_of(folder, run_folders.TOKENIZER).data.tokenization == "legacy"
    return load_model(saved), Tokenizer.open(folder / run_folders.TOKENIZER, bare=bare)


def _set_end_token(tokenizer: Tokenizer, template: Template | None) -> Tokenizer:
    """Let completions end where the template ends a turn, whatever the model's settings declare."""
    if template is not None and (end := template.end(tokenizer)) is not None:
        tokenizer.end = end
    return tokenizer


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Return a Hugging Face folder's tokenizer; its end token is the first in the model's settings."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder}: no tokenizer.json; save its tokenizer there (the fast kind)")
    for source in (folder / GENERATION, config_file(folder)):
        result = json_table(source).get("eos_token_id")
        end = result[0] if isinstance(result, list) and result else result
        if type(end) is int:
            return Tokenizer.open(file, end)
    return Tokenizer.open(file)
