"""Batched decoding with a cache: logits, draws and log-probabilities equal those of each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models import decode as module
from planaria.models.decode import DecodingBatch, decode
from planaria.models.generate import generate
from planaria.models.llama_stages import Llama
from planaria.models.sampling import pick

PLAIN = ModelConfig(vocab=30, dim=16, layers=2, heads=4, hidden=24, context=24, init_std=0.4)
CONFIGS = {
    "plain": PLAIN,
    "grouped": PLAIN.model_copy(update={"kv_heads": 2}),
    "layers in stage 0": PLAIN.model_copy(update={"layers": 3, "ends_layers": 1, "tied": False}),
}
MODEL = Llama(PLAIN, seed=5)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [4, 4], [1, 2, 3]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def likelihoods(model: Llama, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities of ``ids`` after ``prompt`` from one plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize(("dtype", "std", "within"), [(torch.float32, 0.2, 1e-5), (torch.float64, 0.4, 1e-12)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_with_the_cache_match_those_without(kind: str, dtype: torch.dtype, std: float, within: float) -> None:
    model = Llama(CONFIGS[kind].model_copy(update={"init_std": std}), seed=3).to(dtype)
    reading = DecodingBatch(model, PROMPTS, 10)
    rows = [list(prompt) for prompt in PROMPTS]
    for step in range(10):
        for row, found in zip(rows, reading.logits, strict=True):
            torch.testing.assert_close(found, model(torch.tensor([row]))[0, -1], rtol=0, atol=within)
        new = torch.randint(0, 30, (len(rows),), generator=seeded(step))
        rows = [[*row, token] for row, token in zip(rows, new.tolist(), strict=True)]
        reading.read(new)


def test_dropping_rows_does_not_change_the_others() -> None:
    reading = DecodingBatch(MODEL, PROMPTS, 6)
    rows = [list(prompt) for prompt in PROMPTS]
    for stay in ([True, False, True, True, True], [True, True, True, False], [False, True, True]):
        order = reading.drop(torch.tensor(stay))
        assert sorted(order.tolist()) == [n for n, keep in enumerate(stay) if keep]
        rows = [[*rows[n], n] for n in order.tolist()]
        reading.read(order)
        for row, found in zip(rows, reading.logits, strict=True):
            torch.testing.assert_close(found, MODEL(torch.tensor([row]))[0, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_rows_equal_generate_for_each_prompt(kind: str) -> None:
    model = Llama(CONFIGS[kind], seed=4)
    alone = [tuple(generate(model, prompt, 12)) for prompt in PROMPTS]
    assert [row.ids for row in decode(model, PROMPTS, 12, temperature=0)] == alone


def test_one_row_equals_generate_with_the_same_seed() -> None:
    drawn = decode(MODEL, [[1]], 20, temperature=1.5, top_k=10, generator=seeded(7))
    assert drawn[0].ids == tuple(generate(MODEL, [1], 20, temperature=1.5, top_k=10, seed=7))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_log_probabilities_match_a_plain_forward_over_the_whole_vocabulary(temperature: float) -> None:
    for prompt, row in zip(PROMPTS, decode(MODEL, PROMPTS, 15, temperature, 5, seeded(), end=3), strict=True):
        ids = [*row.ids, *([3] if row.ended else [])]
        found = likelihoods(MODEL, prompt, ids, temperature)
        torch.testing.assert_close(torch.tensor(row.logps), found, rtol=0, atol=1e-4)


def test_a_greedy_token_has_the_log_probability_at_temperature_1() -> None:
    row = decode(MODEL, [[1, 2]], 8, temperature=0)[0]
    torch.testing.assert_close(
        torch.tensor(row.logps), likelihoods(MODEL, [1, 2], list(row.ids), 1.0), rtol=0, atol=1e-5
    )


def test_a_row_stops_at_the_end_token_and_reports_it() -> None:
    whole = decode(MODEL, PROMPTS * 8, 15, 1.0, generator=seeded())
    stopped = decode(MODEL, PROMPTS * 8, 15, 1.0, generator=seeded(), end=3)
    assert {row.ended for row in stopped} == {True, False}
    for free, row in zip(whole, stopped, strict=True):
        assert row.ended == (3 in free.ids)
        assert row.ids == (free.ids[: free.ids.index(3)] if row.ended else free.ids)
        assert len(row.logps) == len(row.ids) + row.ended


def test_draws_do_not_depend_on_later_rows_or_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PROMPTS * 5

    def drawn(rows: int) -> list[tuple[int, ...]]:
        return [row.ids for row in decode(MODEL, prompts[:rows], 12, 1.0, 20, seeded(2), end=3)]

    every = drawn(25)
    assert drawn(9) == every[:9]
    monkeypatch.setattr(module, "KEPT_BYTES", 1)
    assert drawn(25) == every


def test_every_row_ends_at_the_context() -> None:
    prompts = [[1] * length for length in (1, 10, 20, 23)]
    drawn = decode(MODEL, prompts, 100, 1.0, generator=seeded())
    assert [len(row.ids) for row in drawn] == [23, 14, 4, 1]
    for prompt, row in zip(prompts, drawn, strict=True):
        found = likelihoods(MODEL, prompt, list(row.ids), 1.0)
        torch.testing.assert_close(torch.tensor(row.logps), found, rtol=0, atol=1e-4)


def test_zero_tokens_or_prompts_give_empty_results() -> None:
    assert [row.ids for row in decode(MODEL, PROMPTS, 0)] == [()] * 5 and decode(MODEL, [], 5) == []


def test_training_works_after_decoding() -> None:
    model = Llama(PLAIN, seed=1)
    decode(model, PROMPTS, 3)
    model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()
    assert all(p.grad is not None for p in model.parameters())


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=20),
    st.integers(0, 30),
    st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=9),
)
def test_draws_are_among_the_top_k(values: list[float], top_k: int, uniforms: list[float]) -> None:
    logits = torch.tensor([values] * len(uniforms))
    drawn = pick(logits, 1.0, top_k, torch.tensor(uniforms))
    least = logits[0].sort(descending=True).values[min(top_k or len(values), len(values)) - 1]
    assert (logits[0][drawn] >= least).all()


@given(st.floats(0, 1, exclude_max=True, width=32))
def test_tokens_of_zero_probability_are_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    assert int(pick(logits, 1.0, 0, torch.tensor([uniform]))) in (1, 3)


@pytest.mark.parametrize("top_k", [0, 2])
def test_draws_follow_the_softmax(top_k: int) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    drawn = pick(logits.expand(4000, 3), 2.0, top_k, torch.rand(4000, generator=seeded()))
    likely = logits if not top_k else torch.tensor([-torch.inf, 1.0, 2.0])
    shares = torch.bincount(drawn, minlength=3) / 4000
    torch.testing.assert_close(shares, torch.softmax(likely / 2, 0), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": [[1], []]}, "no tokens"),
        ({"prompts": [[3, 30]]}, "token 30 is outside"),
        ({"prompts": [[1] * 24]}, "prompt of 24 tokens; the context has room for 23"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
    ],
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        decode(MODEL, **{"prompts": [[1]], "max_new": 1, **wrong})
