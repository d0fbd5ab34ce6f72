"""Generation: greedy, by temperature and top-k, deterministic, and beyond the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig, ModelConfig
from planaria.data.tokenizer import load_tokenizer
from planaria.models.decode import decode
from planaria.models.generate import generate, texts
from planaria.models.llama_stages import Llama

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


def test_generation_ends_before_the_stop_token() -> None:
    tokens = list(generate(MODEL, [1], 20))
    stop = tokens[5]
    assert list(generate(MODEL, [1], 20, stops=(stop,))) == tokens[: tokens.index(stop)]


def test_the_prompt_and_the_grad_mode_are_unchanged() -> None:
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
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"top_k": 0}, "top_k = 0"),
        ({"max_new": 0}, "tokens = 0; use 1 to 1,000,000"),
        ({"max_new": 999_999_999}, "tokens = 999999999; use 1 to 1,000,000"),
        ({"seed": 2**63}, "seed = 9223372036854775808 has more than 64 bits"),
        ({"seed": -(10**5000)}, "seed = a number of 16610 bits has more"),
    ],
)
def test_invalid_arguments_are_refused_before_the_first_token(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(MODEL, **{"tokens": [1], "max_new": 1, **wrong})


@given(
    st.floats() | st.floats(0, 1e-5) | st.sampled_from([5e-324, 1e-300, 1e-45, 1e-38, 9.9e-7, 1e-6, 1e300]),
    st.integers(-1, 31) | st.integers(),
    st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=150, deadline=None)
def test_any_settings_of_draws_are_refused_or_draw_tokens(temperature: float, top_k: int, seed: int) -> None:
    """One by one and in a batch, with finite log-probabilities."""
    try:
        drawn = list(generate(MODEL, [1, 2], 3, temperature, top_k, seed))
        rows = decode(MODEL, [[1, 2]] * 2, 3, temperature, top_k, torch.Generator().manual_seed(seed))
    except UserError as error:
        assert "\n" not in str(error) and (not 0 <= temperature < float("inf") or top_k < 1)
        return
    assert len(drawn) == 3 and all(0 <= token < 30 for token in drawn)
    assert all(logp <= 0 and logp > float("-inf") for row in rows for logp in row.logps)
    if temperature < 1e-6:
        assert drawn == list(generate(MODEL, [1, 2], 3)) == list(rows[0].ids)


@given(st.lists(st.integers(0, 256), max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_text_and_never_end_within_a_character(ids: list[int]) -> None:
    """Tokens are bytes, mostly invalid UTF-8; 256 ends documents and has no text."""
    tokenizer = load_tokenizer(DataConfig(tokenizer="bytes"), 257, Path())
    pieces = list(texts(ids, tokenizer.decode))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


def test_pieces_are_yielded_as_soon_as_they_are_complete() -> None:
    tokenizer, taken = load_tokenizer(DataConfig(tokenizer="bytes"), 257, Path()), list[int]()

    def ids() -> Iterator[int]:
        for one in tokenizer.encode("aé…b"):
            taken.append(one)
            yield one

    assert [(piece, len(taken)) for piece in texts(ids(), tokenizer.decode)] == [("a", 1), ("é", 3), ("…", 6), ("b", 7)]
