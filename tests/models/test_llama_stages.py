"""Stages: names, initial weights, tied heads, and independence of the cut."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.families import build_stage
from planaria.models.llama_stages import BlockStage, Llama, LlamaEnds, flops_per_token, global_name, parameter_count

TIED = ModelConfig(vocab=40, dim=16, layers=4, heads=4, kv_heads=2, hidden=24, context=8)
UNTIED = TIED.model_copy(update={"tied": False})


def ends(config: ModelConfig = TIED, seed: int = 0) -> LlamaEnds:
    built = build_stage(config, 4, 0, seed)
    assert isinstance(built, LlamaEnds)
    return built


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_logits_loss_and_gradients_are_bitwise_independent_of_the_cut(config: ModelConfig) -> None:
    tokens, targets = sample()
    models = [Llama(config, stages, seed=7) for stages in (1, 2, 4)]
    grads = []
    for model in models:
        model.loss(tokens, targets).backward()
        model.ends.fold_gradients()
        parameters = dict(model._parameters_by_name())
        grads.append({name: parameter.grad for name, parameter in parameters.items()})
    for model, grad in zip(models[1:], grads[1:], strict=True):
        assert torch.equal(model(tokens), models[0](tokens))
        assert torch.equal(model.loss(tokens, targets), models[0].loss(tokens, targets))
        assert grad.keys() == grads[0].keys()
        assert all(torch.equal(grad[name], grads[0][name]) for name in grad)


def test_names_are_hugging_faces_and_cover_every_layer_once() -> None:
    names = set()
    for stage in range(3):
        built = build_stage(UNTIED, 2, stage, 0, "meta")
        names |= {global_name(UNTIED, 2, stage, local) for local, _ in built.named_parameters()}
    layer = ["self_attn." + p for p in ("q_proj", "k_proj", "v_proj", "o_proj")]
    layer += ["mlp." + p for p in ("gate_proj", "up_proj", "down_proj")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"model.layers.{i}.{part}.weight" for i in range(4) for part in layer}
    assert names == expected | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert global_name(UNTIED, 2, 2, "layers.1.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"


def test_local_names_are_the_same_in_every_block_stage() -> None:
    first, last = build_stage(TIED, 2, 1, 0), build_stage(TIED, 2, 2, 0)
    assert isinstance(first, BlockStage)
    assert list(first.state_dict()) == list(last.state_dict())
    assert "layers.0.self_attn.q_proj.weight" in first.state_dict()


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    before = torch.get_rng_state()
    whole, cut, other = Llama(UNTIED, 1, seed=3), Llama(UNTIED, 4, seed=3), Llama(UNTIED, 1, seed=4)
    assert torch.equal(torch.get_rng_state(), before), "building drew from the global generator"
    one, two, three = whole.global_state(), cut.global_state(), other.global_state()
    assert one.keys() == two.keys()
    drawn = [name for name in one if one[name].dim() > 1]
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], three[name]) for name in drawn)
    assert len({float(one[name].flatten()[0]) for name in drawn}) == len(drawn), "two parameters drew the same numbers"


def test_initial_weights_have_the_recipes_spread() -> None:
    config = ModelConfig(vocab=500, dim=64, init_std=0.05)
    for name, weight in Llama(config).global_state().items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert abs(weight.std().item() - 0.05) < 0.003 and abs(weight.mean().item()) < 0.003, name


def test_an_embedding_may_have_its_own_spread() -> None:
    plain = ModelConfig(vocab=500, dim=64, tied=False)
    usual = Llama(plain, 2, seed=3).global_state()
    wide = Llama(plain.model_copy(update={"embedding_std": 1.0}), 2, seed=3).global_state()
    table = "model.embed_tokens.weight"
    torch.testing.assert_close(wide[table], usual[table] / plain.init_std)
    assert all(torch.equal(wide[name], usual[name]) for name in usual if name != table)


def test_a_family_with_its_own_weights_refuses_a_spread() -> None:
    with pytest.raises(
        ValueError, match=r"model.embedding_std: .*'transformers' has its own initial weights; remove it"
    ):
        ModelConfig(family="transformers", embedding_std=1.0)


def test_a_stage_built_without_initial_values_computes_the_same_once_loaded() -> None:
    built = build_stage(TIED, 2, 1, 0)
    bare = build_stage(TIED, 2, 1, 0, initialise=False)
    bare.load_state_dict(built.state_dict())
    x = torch.randn(2, 8, 16)
    assert torch.equal(built(x), bare(x))


def test_an_invalid_stage_is_refused() -> None:
    for stages, stage in ((4, 5), (4, -1), (3, 1)):
        with pytest.raises(ValueError, match=f"no stage {stage} of {stages}"):
            build_stage(TIED, stages, stage, 0)


def test_a_tied_head_has_the_whole_gradient_after_folding() -> None:
    tokens, targets = sample()
    model = Llama(TIED)
    model.loss(tokens, targets).backward()
    head = model.ends.head_alias
    assert head is not None and head.grad is not None
    looked_up = model.ends.embed_tokens.weight.grad
    assert looked_up is not None
    apart = looked_up.clone() + head.grad
    model.ends.fold_gradients()
    model.ends.fold_gradients()
    assert torch.equal(model.ends.embed_tokens.weight.grad, apart) and head.grad is None

    untied = Llama(UNTIED)
    untied.load_global_state({**model.global_state(), "lm_head.weight": model.ends.embed_tokens.weight.detach()})
    untied.loss(tokens, targets).backward()
    assert untied.ends.lm_head is not None
    split = untied.ends.embed_tokens.weight.grad + untied.ends.lm_head.weight.grad
    assert torch.equal(model.ends.embed_tokens.weight.grad, split)


@settings(max_examples=20, deadline=None)
@given(st.permutations([0, 0, 1, 1, 2, 2]))
def test_the_folded_gradient_does_not_depend_on_interleaving(turns: list[int]) -> None:
    """Embedding and head backwards each follow the order of microbatches, but interleave in every way."""

    def gradient(order: list[int], interleaved: bool) -> torch.Tensor:
        stage = ends()
        embedded = [stage.embed(sample(i)[0]) for i in range(3)]
        hidden = [x.detach().requires_grad_() for x in embedded]
        heads = iter([lambda i=i: stage.loss(hidden[i], sample(i)[1]).backward() for i in range(3)])
        lookups = iter([lambda i=i: embedded[i].backward(torch.full_like(embedded[i], 0.1 + i)) for i in range(3)])
        seen: set[int] = set()
        for turn in order:
            next(lookups if interleaved and turn in seen else heads)()
            seen.add(turn)
        for rest in (*heads, *lookups):
            rest()
        stage.fold_gradients()
        grad = stage.embed_tokens.weight.grad
        assert grad is not None
        return grad

    assert torch.equal(gradient(turns, True), gradient([0, 1, 2], False))


def test_the_alias_is_not_a_parameter_and_follows_in_place_updates() -> None:
    stage = ends()
    assert list(stage.state_dict()) == ["embed_tokens.weight", "norm.weight"]
    x = torch.randn(1, 2, 16)
    before = stage.logits(x)
    with torch.no_grad():
        stage.embed_tokens.weight.mul_(2)
    torch.testing.assert_close(stage.logits(x), 2 * before)


def test_autograd_notices_a_table_changed_between_forward_and_backward() -> None:
    stage = ends()
    loss = stage.loss(torch.randn(3, 8, 16, requires_grad=True), sample()[1])
    with torch.no_grad():
        stage.embed_tokens.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("move", ["load", "assign", "nested", "double", "empty", "meta", "deepcopy"])
def test_the_alias_always_shares_the_tables_memory(move: str) -> None:
    stage, other = ends(seed=1), ends(seed=2).state_dict()
    if move in ("load", "assign"):
        stage.load_state_dict(other, assign=move == "assign")
        assert torch.equal(stage.embed_tokens.weight, other["embed_tokens.weight"])
    elif move == "nested":
        model = Llama(TIED)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        stage = model.ends
    elif move == "double":
        stage.to(torch.float64)
    elif move == "deepcopy":
        stage = copy.deepcopy(stage)
    else:
        stage.to_empty(device="meta" if move == "meta" else "cpu")
    table, alias = stage.embed_tokens.weight, stage.head_alias
    assert alias is not None and alias.requires_grad and alias.is_leaf
    assert (alias.device, alias.dtype, alias.shape) == (table.device, table.dtype, table.shape)
    assert alias.untyped_storage()._cdata == table.untyped_storage()._cdata


@pytest.mark.parametrize("whole", [True, False])
def test_zero_grad_drops_gradients_not_yet_folded(whole: bool) -> None:
    model = Llama(TIED)
    model.loss(*sample()).backward()
    (model if whole else model.ends).zero_grad()
    model.ends.fold_gradients()
    assert model.ends.embed_tokens.weight.grad is None


def test_global_state_moves_between_cuts() -> None:
    one, four = Llama(UNTIED, 1, seed=1), Llama(UNTIED, 4, seed=2)
    four.load_global_state(one.global_state())
    tokens, _ = sample()
    assert torch.equal(one(tokens), four(tokens))


def test_an_invalid_state_is_refused_and_leaves_the_model_unchanged() -> None:
    model = Llama(TIED, seed=1)
    good = Llama(TIED, seed=2).global_state()
    name = "model.layers.2.mlp.up_proj.weight"
    wrong = [
        ({k: v for k, v in good.items() if k != name}, f"{name} is missing"),
        ({**good, name: torch.zeros(3, 16)}, rf"{name} has shape \[3, 16\], not \[24, 16\]"),
        ({**good, "lm_head.weight": torch.zeros(40, 16)}, "lm_head.weight is not a parameter"),
    ]
    before = {k: v.clone() for k, v in model.global_state().items()}
    for state, message in wrong:
        with pytest.raises(UserError, match=message):
            model.load_global_state(state)
    assert all(torch.equal(before[k], v) for k, v in model.global_state().items())


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 6]),
    groups=st.sampled_from([1, 2]),
    layers=st.integers(1, 3),
    vocab=st.integers(1, 300),
    hidden=st.integers(1, 200),
    tied=st.booleans(),
)
def test_parameter_count_is_exact(heads: int, groups: int, layers: int, vocab: int, hidden: int, tied: bool) -> None:
    config = ModelConfig(
        vocab=vocab,
        dim=4 * heads * groups,
        heads=heads * groups,
        kv_heads=heads,
        layers=layers,
        hidden=hidden,
        tied=tied,
    )
    assert parameter_count(config) == sum(p.numel() for p in Llama(config, device="meta").parameters())


def test_flops_count_every_matrix_product_of_a_training_step() -> None:
    """PyTorch's counter has forward products, twice that for backward, and full (not causal) attention."""
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(vocab=64, dim=32, layers=2, heads=4, hidden=48, context=16, tied=False)
    model = Llama(config, device="meta")
    tokens = torch.zeros(1, 16, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    gains = config.dim * (2 * config.layers + 1)
    forward = (flops_per_token(config) - 6 * gains) / 3 * 16
    assert counter.get_total_flops() == pytest.approx(forward, rel=1e-9)
