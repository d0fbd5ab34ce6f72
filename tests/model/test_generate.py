"""Drawing tokens: greedy, by temperature and top-k, deterministic, and past the end of the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planaria.config import ModelConfig
from planaria.errors import UserError
from planaria.model.generate import generate
from planaria.model.stages import Llama

MODEL = Llama(ModelConfig(vocab=30, dim=16, layers=2, heads=2, hidden=24, context=8, init_std=0.4), seed=5)


def test_greedy_takes_the_likeliest_token_of_the_newest_window() -> None:
    tokens = [1, 2, 3]
    for _ in range(12):
        tokens.append(int(MODEL(torch.tensor([tokens[-8:]]))[0, -1].argmax()))
    assert list(generate(MODEL, [1, 2, 3], 12)) == tokens[3:]


def test_the_same_seed_draws_the_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        return list(generate(MODEL, [1], 30, temperature=1.0, top_k=20, seed=seed))

    torch.manual_seed(1)
    first = draw(1)
    torch.manual_seed(2)
    assert first == draw(1) and first != draw(2)


def test_top_1_is_greedy_at_any_temperature() -> None:
    assert list(generate(MODEL, [4], 10, temperature=3.0, top_k=1)) == list(generate(MODEL, [4], 10))


def test_it_ends_before_the_stop_token() -> None:
    tokens = list(generate(MODEL, [1], 20))
    stop = tokens[5]
    assert list(generate(MODEL, [1], 20, stop=stop)) == tokens[: tokens.index(stop)]


def test_the_prompt_is_left_alone_and_no_graph_is_kept() -> None:
    prompt = [1, 2]
    assert torch.is_grad_enabled()
    drawn = generate(MODEL, prompt, 3)
    next(drawn)
    assert torch.is_grad_enabled() and prompt == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": []}, "no tokens"),
        ({"tokens": [3, 30]}, "token 30 is outside"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_k": 0}, "top_k = 0"),
    ],
)
def test_mistakes_are_named_at_once(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(MODEL, **{"tokens": [1], "max_new": 1, **wrong})
