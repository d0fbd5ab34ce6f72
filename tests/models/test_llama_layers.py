"""The layers: causality, rotary positions, and the attention kernel."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from planaria.config.schema import ModelConfig
from planaria.models.llama_layers import (
    Attention,
    OwnParameters,
    RMSNorm,
    fused_projection,
    rotary_tables,
    rotate,
    rotate_halves,
    to_rotate_half,
)
from planaria.models.llama_stages import Llama

CONFIG = ModelConfig(vocab=50, dim=24, layers=2, heads=4, kv_heads=2, hidden=40, context=16, init_std=0.3)


def test_attention_is_causal() -> None:
    model = Llama(CONFIG)
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 49
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=1e-6)
    assert (before[:, 6:] - after[:, 6:]).abs().amax(-1).min() > 1e-3


def test_rotary_scores_depend_on_distance_only() -> None:
    cos, sin = rotary_tables(CONFIG)
    q, k = torch.randn(1, 1, 1, 6).expand(1, 16, 1, 6), torch.randn(1, 1, 1, 6).expand(1, 16, 1, 6)
    scores = torch.einsum("bthd,bshd->ts", rotate(q, cos, sin), rotate(k, cos, sin))
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores[0].std() > 1e-3


def test_rotate_rotates_each_pair_by_position_times_frequency() -> None:
    cos, sin = rotary_tables(CONFIG)
    x = torch.randn(2, 16, 3, 6)
    frequencies = 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    turn = torch.polar(torch.ones(16, 3), torch.arange(16)[:, None] * frequencies)[:, None]
    turned = torch.complex(x[..., :3], x[..., 3:]) * turn
    for rotation in (rotate, rotate_halves):
        torch.testing.assert_close(rotation(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


@pytest.mark.parametrize("channels", [1, 2])
def test_one_product_equals_all_projections_and_their_gradients(channels: int) -> None:
    matrices = [torch.randn(rows, 6, requires_grad=True) for rows in (6, 2, 4)]
    x = torch.randn(2, 5, 6)
    for found, matrix in zip(fused_projection(x, matrices, channels), matrices, strict=True):
        expected = x @ matrix.T if channels == 1 else (x @ matrix.T).view(2, 5, -1, channels)
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found.square().sum(), matrix, retain_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad((x @ matrix.T).square().sum(), matrix)[0])


def test_reordered_interleaved_projections_give_the_same_scores() -> None:
    """The reference uses neighbouring channels as real and imaginary part."""
    heads, x = 3, torch.randn(16, 18)
    cos, sin = rotary_tables(CONFIG)
    frequencies = 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    turn = torch.polar(torch.ones(16, 3), torch.arange(16)[:, None] * frequencies)[:, None]

    def interleaved(weight: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex((x @ weight.T).view(16, heads, 3, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)

    def halves(weight: torch.Tensor) -> torch.Tensor:
        return rotate((x @ to_rotate_half(weight, heads).T).view(1, 16, heads, 6), cos, sin)[0]

    q, k = torch.randn(18, 18), torch.randn(18, 18)
    theirs = torch.einsum("thd,shd->hts", interleaved(q), interleaved(k))
    ours = torch.einsum("thd,shd->hts", halves(q), halves(k))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_grouped_queries_equal_repeated_keys_and_values() -> None:
    model = Llama(CONFIG)
    wide = Llama(CONFIG.model_copy(update={"kv_heads": 4}))
    state = model.global_state()
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = weight.view(2, 6, 24).repeat_interleave(2, 0).reshape(24, 24)
    wide.load_global_state(state)
    tokens = torch.randint(0, 50, (2, 16))
    torch.testing.assert_close(model(tokens), wide(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_uses_the_fused_kernel(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = []
    plain = F.scaled_dot_product_attention

    def spy(*args: torch.Tensor, **options: bool) -> torch.Tensor:
        out = plain(*args, **options)  # type: ignore[arg-type]
        fused.append(type(out.grad_fn).__name__)
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    config = CONFIG.model_copy(update={"kv_heads": kv_heads})
    attention = Attention(config, OwnParameters())
    attention(torch.randn(1, 16, 24), *rotary_tables(config))
    assert "Flash" in fused[0]


def test_rms_norm_follows_its_formula() -> None:
    norm = RMSNorm(8, 1e-3)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    x = torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
