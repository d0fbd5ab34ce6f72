"""``planaria generate``: complete a prompt with a trained model."""

from __future__ import annotations

from pathlib import Path

from planaria.checkpoint.loading import load_model
from planaria.commands import runs
from planaria.data.tokenizer import Tokenizer
from planaria.errors import UserError
from planaria.model.generate import generate
from planaria.model.huggingface import import_model
from planaria.model.stages import Llama


def complete(
    folder: Path, prompt: str, max_new: int = 60, temperature: float = 0.7, top_k: int = 40, seed: int = 0
) -> str:
    """``prompt`` and what the model in ``folder`` (a run, or an exported model) adds to it."""
    model, tokenizer = open_model(folder)
    tokens = tokenizer.encode(prompt) or [tokenizer.end]
    if max(tokens) >= model.config.vocab:
        raise UserError(f"{folder}: its tokenizer has ids up to {max(tokens)}, its model only {model.config.vocab}")
    model.eval()
    new = list(generate(model, tokens, max_new, temperature, top_k, seed, tokenizer.end))
    return prompt + tokenizer.decode(new)


def open_model(folder: Path) -> tuple[Llama, Tokenizer]:
    """The model of a run, or an exported one, and its tokenizer; UserError when ``folder`` is neither."""
    if (folder / "model.safetensors").exists():
        return import_model(folder), Tokenizer.open(folder / "tokenizer.json")
    runs.config_of(folder, runs.TOKENIZER)
    return load_model(runs.newest_whole(folder)), Tokenizer.open(folder / "tokenizer.json")
