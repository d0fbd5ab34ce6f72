"""The check of a model before a run: a small model of the same architecture, cut, against the library's whole one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
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
from planaria.models.transformers.shrinking import LAYERS, shrink_config
from planaria.models.transformers.skeleton import in_one_line
from planaria.models.transformers.stages import TransformersEnds

log = logging.getLogger(__name__)
MAX_RELATIVE_DIFFERENCE = 1e-5
"""largest relative difference of the loss and of gradients"""
MAX_PARAMETERS = 300_000_000
"""largest size of two layers of full width with embeddings that is checked if the model cannot be shrunk"""
MAX_POSITIONS = 512
"""most positions of a small model for which one more is tried"""
_LENGTH, _SAMPLES = 24, 2


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
    pairs = [(_grad(named[name]), _or_zeros(theirs.get(name), named[name])) for name in named]
    most = torch.stack([two.abs().max() for _, two in pairs]).max()  # NaN if one is
    difference = torch.stack([(tensor - two).abs().max() for tensor, two in pairs]).max()
    return abs(loss.item() - expected.item()) / abs(expected.item()), float(difference / most)


def _grad(parameter: nn.Parameter) -> Tensor:
    return _or_zeros(parameter.grad, parameter)


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
