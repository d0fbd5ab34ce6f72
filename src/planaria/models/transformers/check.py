"""The check of a model before a run: a small model of the same architecture, cut, against the library's whole one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.llama_layers import document_mask
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.skeleton import DEPTHS, in_one_line
from planaria.models.transformers.stages import TransformersEnds

log = logging.getLogger(__name__)
MAX_RELATIVE_DIFFERENCE = 1e-5
"""largest relative difference of the loss and of gradients"""
MAX_PARAMETERS = 300_000_000
"""largest size of two layers of full width with embeddings that is checked if the model cannot be shrunk"""
MAX_POSITIONS = 512
"""most positions of a small model for which one more is tried"""
_LENGTH, _SAMPLES = 24, 2
LAYERS = 4
VOCAB = 128
_WIDTHS = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "ffn_hidden_size", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "sliding_window", "window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    "vocab_size": VOCAB,
    "global_head_dim": 32,
}
"""settings by the library's names, and the most that a small model has of them"""
_INNER = {"num_heads": "head_dim", "mamba_n_heads": "mamba_d_head", "mamba_num_heads": "mamba_head_dim"}
"""numbers of heads, and their sizes, whose products are the inner width of a state-space layer"""


class CutDifferences(NamedTuple):
    """Differences between a cut model and the whole one."""

    loss: float
    """relative"""
    gradient: float
    """largest of all parameters, relative to the largest gradient"""
    future: float
    """change of logits before a changed token"""
    leak: float
    """change of a document's logits after earlier ones in the sample were changed, or from it alone"""
    longest: int | None = None
    """positions of a model that fails beyond them, or None if it has no such limit"""
    note: str = ""
    """how the model was made small, if not by all of its settings"""


def require_cuttable(decoder: Decoder, masked: bool) -> CutDifferences:
    """Compare a small model of this architecture, cut into stages, with the whole one.

    ``masked``: whether documents are masked.

    :raises UserError: if they differ, tokens see later ones, or documents see each other.
    """
    errors = _check_small_model(decoder)
    if errors.note:
        log.warning("%s", errors.note)
    kind = f"{PLACE}: model_type = {decoder.values.get('model_type')!r}"
    if not (errors.loss <= MAX_RELATIVE_DIFFERENCE and errors.gradient <= MAX_RELATIVE_DIFFERENCE):  # NaN differs, too
        raise UserError(
            f"{kind}: cut into stages its loss differs by {errors.loss:.1e} and gradients by {errors.gradient:.1e} "
            "(relative) from the whole model's; it cannot be trained here"
        )
    if not errors.future <= MAX_RELATIVE_DIFFERENCE:
        raise UserError(f"{kind}: tokens see later ones; only causal decoders can be trained")
    if masked and not errors.leak <= MAX_RELATIVE_DIFFERENCE:
        raise UserError(f"data.document_mask: {kind}: documents of one sample see each other; remove it")
    return errors


@lru_cache(maxsize=8)
def _check_small_model(decoder: Decoder) -> CutDifferences:
    config, attention = decoder.config, decoder.attention
    try:
        return compare_with_whole(Decoder.of(shrink_config(config), attention))
    except Exception as error:  # the library may raise anything
        why = in_one_line(error)
    few = Decoder.of(shrink_config(config, 2, widths=False), attention)
    try:
        if few.facts.parameters > MAX_PARAMETERS:
            raise ValueError(f"a small one cannot be built to check how it is cut: {why}")
        return compare_with_whole(few)._replace(note=f"compared with two layers of full width: {why}")
    except Exception as error:  # the library may raise anything
        raise UserError(f"{PLACE}: the model cannot be built: {in_one_line(error)}") from None


def compare_with_whole(decoder: Decoder) -> CutDifferences:
    """Return the differences between a model cut into stages and the whole one, in fp32 on the CPU."""
    facts = decoder.facts
    cut = (1,) * facts.layers if facts.layers < LAYERS else (1, facts.layers - 2, 1)
    model = ModelConfig(
        family="transformers", vocab=facts.vocab, dim=facts.width, layers=facts.layers, tied=bool(facts.tied_head),
        context=_LENGTH, block_layers=cut,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _one_thread():
        stages = [decoder.build(model, len(cut), stage) for stage in range(len(cut) + 1)]
        for stage, built in enumerate(stages):
            decoder.initialise(built, model, len(cut), stage, 0)
        named = {
            decoder.global_name(model, len(cut), stage, local): parameter
            for stage, built in enumerate(stages)
            for local, parameter in built.named_parameters()
        }
        reference = decoder.assemble(named)
        torch.default_generator.manual_seed(0)
        tokens = torch.randint(2, facts.vocab, (_SAMPLES, _LENGTH + 1))
        loss, gradient = _loss_and_gradient_errors(stages, reference, named, tokens[:, :-1], tokens[:, 1:])
        inputs = tokens[:, :-1]
        future = _future_dependence(reference, inputs)
        return CutDifferences(loss, gradient, future, _document_leak(stages, inputs), _position_limit(reference))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: several are slower for a small model, and far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _loss_and_gradient_errors(
    stages: list[Any], reference: Any, named: Mapping[str, nn.Parameter], tokens: Tensor, targets: Tensor
) -> tuple[float, float]:
    logits = reference(input_ids=tokens, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    expected.backward()  # type: ignore[no-untyped-call]
    loss = stages[0].loss(_run_stages(stages, tokens), targets)
    loss.backward()
    stages[0].fold_gradients()
    theirs = {name: tensor.grad for name, tensor in reference.named_parameters()}
    pairs = [(_or_zeros(one.grad, one), _or_zeros(theirs.get(name), one)) for name, one in named.items()]
    most = torch.stack([two.abs().max() for _, two in pairs]).max()  # NaN if one is
    difference = torch.stack([(tensor - two).abs().max() for tensor, two in pairs]).max()
    return abs(loss.item() - expected.item()) / abs(expected.item()), float(difference / most)


def _or_zeros(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def _run_stages(stages: list[Any], tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    masks = () if mask is None else (mask,)
    x: Tensor = stages[0].embed(tokens, *masks)
    for block in stages[1:]:
        x = block(x, *masks)
    return x


def _future_dependence(reference: Any, tokens: Tensor) -> float:
    """Return the change of logits before the last token after that was changed."""
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 100
    with torch.no_grad():
        before, after = (reference(input_ids=each, use_cache=False).logits[:, :-1] for each in (tokens, changed))
    return float((before - after).abs().max() / before.abs().max())


def _position_limit(reference: Any) -> int | None:
    """Return the number of positions if the model fails beyond them, as with a table of learned positions."""
    positions = getattr(reference.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions <= MAX_POSITIONS:
        return None
    tokens = torch.full((1, positions + 1), 2)
    try:
        with torch.no_grad():
            reference(input_ids=tokens, use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return positions
    return None


def _document_leak(stages: list[Any], tokens: Tensor) -> float:
    """Return the change of the last document's logits after earlier ones were changed, and from it alone."""
    half = tokens.shape[1] // 2
    tensor = tokens.clone()
    tensor[:, half] = tensor[0, half // 2] = 1  # separators begin the second document, and a third one in one sample
    changed = tensor.clone()
    changed[:, :half] = (changed[:, :half] - 2 + 1) % (100 - 2) + 2
    ends = stages[0]
    assert isinstance(ends, TransformersEnds)
    try:
        with torch.no_grad():
            first, second = (
                ends.logits(_run_stages(stages, each, document_mask(each, 1)))[:, half:] for each in (tensor, changed)
            )
            alone = ends.logits(_run_stages(stages, tensor[:, half:]))
    except Exception:  # the library may raise anything, as where it takes no position ids or no masks
        return float("inf")
    difference = max(float((first - second).abs().max()), float((first - alone).abs().max()))
    return difference / float(alone.abs().max())


def shrink_config(config: Any, layers: int = LAYERS, widths: bool = True) -> dict[str, Any]:
    """Return the config.json of a model with at most ``layers`` layers, which has all kinds of layers if they fit.

    Without ``widths`` only layers are left out.
    """
    values: dict[str, Any] = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    depth = int(config.num_hidden_layers)
    kept = choose_layers(values, depth, layers)
    for key in ("dtype", "torch_dtype", "architectures", "transformers_version"):
        values.pop(key, None)
    for key, value in values.items():
        if key in DEPTHS and value == depth:
            values[key] = len(kept)
        elif isinstance(value, list) and len(value) == depth:
            values[key] = [value[number] for number in kept]
        elif isinstance(value, dict) and value and all(str(number).isdecimal() for number in value):
            values[key] = {index: value[n] for index, number in enumerate(kept) for n in value if int(n) == number}
        elif widths and key in _WIDTHS and isinstance(value, int) and not isinstance(value, bool):
            values[key] = min(value, _WIDTHS[key])
        elif widths and key.endswith("_token_id") and isinstance(value, int | list):
            values[key] = 0 if value == 0 else 1
    if widths and values.get("num_key_value_heads") and config.num_key_value_heads == config.num_attention_heads:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if widths:
        _fit(values)
    return values | {"model_type": config.model_type}


def _fit(values: dict[str, Any]) -> None:
    """Adjust widths that must agree with others."""
    if "qk_rope_head_dim" in values:  # then head_dim is that of rotary positions
        values["head_dim"] = values["qk_rope_head_dim"]
    expand = values.get("mamba_expand", values.get("expand"))
    if isinstance(expand, int | float):
        inner = int(expand * values.get("hidden_size", 64))
        for heads, size in _INNER.items():
            if heads in values and isinstance(values.get(size), int):
                values[heads] = inner // values[size]
        if "mamba_d_ssm" in values:
            values["mamba_d_ssm"] = inner


def choose_layers(values: Mapping[str, Any], depth: int, layers: int) -> Sequence[int]:
    """Return the numbers of at most ``layers`` layers: the first of each kind, then the first others, in order.

    Kinds are distinguished by the lists in a configuration that have an entry for each layer.
    """
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == depth]
    kinds: dict[str, int] = {}
    for number in range(depth):
        kinds.setdefault(repr([entries[number] for entries in lists]), number)
    first = list(kinds.values())[:layers]
    others = [number for number in range(depth) if number not in first]
    return sorted([*first, *others[: max(0, layers - len(first))]])
