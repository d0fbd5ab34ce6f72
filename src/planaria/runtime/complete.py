"""Complete a prompt with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from planaria.common.errors import UserError
from planaria.models.generate import generate, texts
from planaria.runtime.engine.weight_sources import open_model


def complete(
    folder: Path, prompt: str, max_new: int = 60, temperature: float = 0.7, top_k: int = 40, seed: int = 0
) -> str:
    """Return ``prompt`` and its completion by the model in ``folder`` (a run, or an exported model)."""
    return prompt + "".join(stream(folder, prompt, max_new, temperature, top_k, seed))


def stream(
    folder: Path,
    prompt: str,
    max_new: int,
    temperature: float,
    top_k: int,
    seed: int,
    note: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """Yield the completion of ``prompt`` piece by piece; errors are raised before the first piece.

    ``note`` receives a line if the text may exceed the model's context.
    """
    model, tokenizer = open_model(folder)
    tokens = tokenizer.encode_prompt(prompt) or [tokenizer.end]
    if max(tokens) >= model.config.vocab:
        raise UserError(f"{folder}: its tokenizer has ids up to {max(tokens)}, its model only {model.config.vocab}")
    model.eval()
    new = generate(model, tokens, max_new, temperature, top_k, seed, tokenizer.end)
    note_context(len(tokens) + max_new, model.config.context, note)
    return texts(new, tokenizer.decode)


def note_context(length: int, context: int, note: Callable[[str], object] | None) -> None:
    """Report the effect of a text of up to ``length`` tokens on a model with a shorter context."""
    if note is not None and length > context:
        note(f"beyond its context of {context} tokens, the model sees only the newest {context}, and each takes longer")
