"""A prompt, completed by a trained model."""

from __future__ import annotations

from pathlib import Path

from planaria.engine.weights import open_model
from planaria.errors import UserError
from planaria.model.generate import generate


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
