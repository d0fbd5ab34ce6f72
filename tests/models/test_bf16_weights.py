"""bf16 copies of matrices: the same losses and weights to the last bit, fewer casts, less memory per microbatch."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig, RunConfig
from planaria.models.activations import PassMode, block_bytes
from planaria.models.bf16_weights import COPY_BYTES, copied_bytes
from planaria.models.families import build_stage
from planaria.models.llama_layers import matrix_numbers
from planaria.runtime.preparation.requirements import stage_state_bytes
from planaria.runtime.preparation.unused_settings import require_used
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepInputs
from support.small_decoders import section, small
from support.tiny_engine import config_in, engine_of

MICROBATCHES = 4


def in_bf16(folder: Path, copies: bool, other: ModelConfig | None = None, **sections: dict[str, Any]) -> RunConfig:
    """Return a recipe that computes in bf16 on the CPU, which recipes of users may not."""
    config = config_in(folder, **sections)
    train = config.train.model_copy(update={"precision": "bf16", "bf16_weights": copies})
    return config.model_copy(update={"train": train, "model": other or config.model})


def trained(config: RunConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of four steps and all weights and moments after them."""
    engine = engine_of(config)
    losses = [engine.train_step().loss for _ in range(4)]
    numbers = {}
    for node, runner in engine.runners.items():
        state = runner.state()
        numbers |= {f"{node} {name}": tensor.clone() for name, tensor in state.weights.items()}
        numbers |= {f"{node} {name} {key}": t.clone() for name, by in state.moments.items() for key, t in by.items()}
    return losses, numbers


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"ends_layers": 4, "layers": 8, "tied": True}},
        {"train": {"recompute": True}},
        {"optim": {"kind": "muon"}},
        {"routing": {"kind": "skipping", "skip": 0.25}},
    ],
    ids=lambda sections: ", ".join(sections) or "plain",
)
def test_a_run_is_equal_to_the_last_bit(tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    cast, copied = (trained(in_bf16(tmp_path, copies, **sections)) for copies in (False, True))
    assert copied[0] == cast[0] and copied[1].keys() == cast[1].keys()
    assert all(torch.equal(copied[1][name], tensor) for name, tensor in cast[1].items())
    assert {tensor.dtype for tensor in copied[1].values()} == {torch.float32}, "files and recovery see the masters"


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt_neox", "mixtral", "phi3"])
def test_a_decoder_of_transformers_is_equal_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    model = section(small(kind, vocab_size=300))
    sections = {"pipeline": {"stages": model.layers}, "recovery": {"strategy": "snapshot"}}
    cast, copied = (trained(in_bf16(tmp_path, copies, model, **sections)) for copies in (False, True))
    assert copied[0] == cast[0] and all(torch.equal(copied[1][name], tensor) for name, tensor in cast[1].items())


class _Casts(TorchDispatchMode):
    """Counts casts of matrices to bf16, and what autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def kept_by_a_microbatch(config: RunConfig) -> tuple[int, Counter[tuple[int, ...]]]:
    """Return the bytes that a stage keeps of one microbatch, besides its parameters, and the casts of matrices."""
    runner = StageRunner(config, 1)
    own = {parameter.untyped_storage().data_ptr() for parameter in runner.module.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    runner.begin(StepInputs(microbatches=MICROBATCHES))
    x = torch.randn(2, config.model.context, config.model.dim)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Casts() as casts:
        runner.forward(0, 1, x)
    runner.backward(0, 1, x)
    matrices = {tuple(p.shape) for p in runner.parameters.values() if p.ndim == 2}
    return sum(held.values()), Counter({shape: n for shape, n in casts.shapes.items() if shape in matrices})


def test_a_pass_casts_no_matrix_and_keeps_none(tmp_path: Path) -> None:
    (much, casts), (little, none) = (kept_by_a_microbatch(in_bf16(tmp_path, copies)) for copies in (False, True))
    model = config_in(tmp_path).model
    assert sum(casts.values()) == 7 and not none
    predicted = [block_bytes(model, 1, PassMode(2, 0, True, copies)).kept for copies in (False, True)]
    assert much - little == predicted[0] - predicted[1] == COPY_BYTES * matrix_numbers(model)


def test_copies_follow_an_update_that_is_taken_back_and_loaded_weights(tmp_path: Path) -> None:
    runner, x = StageRunner(in_bf16(tmp_path, True), 1), torch.randn(2, 16, 32)
    first = {name: parameter.detach().clone() for name, parameter in runner.parameters.items()}

    def output() -> Tensor:
        runner.begin(StepInputs(train=False))
        y = runner.forward(0, 1, x)
        assert y is not None
        return y

    before = output()
    runner.begin(StepInputs(microbatches=1))
    runner.forward(0, 1, x)
    runner.backward(0, 1, x)
    runner.finish()
    runner.prepare(0)
    assert any(not torch.equal(first[name], p) for name, p in runner.parameters.items())
    assert torch.equal(output(), before), "beginning another step takes the update back"
    runner.set_weights({name: 2 * tensor for name, tensor in first.items()})
    assert not torch.equal(output(), before)
    runner.set_weights(first)
    assert torch.equal(output(), before)


def test_a_released_stage_keeps_no_weights(tmp_path: Path) -> None:
    runner = StageRunner(in_bf16(tmp_path, True), 1)
    kept = [weakref.ref(parameter) for parameter in [*runner.parameters.values(), *runner.module.parameters()]]
    runner.release()
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_memory_counts_the_copies_and_the_setting_is_refused_where_nothing_uses_it(tmp_path: Path) -> None:
    plain, copies = (in_bf16(tmp_path, copies) for copies in (False, True))
    more = [b - a for a, b in zip(stage_state_bytes(plain), stage_state_bytes(copies), strict=True)]
    assert more == [0, *4 * [COPY_BYTES * matrix_numbers(plain.model)]]
    assert more[1] == copied_bytes(build_stage(plain.model, 4, 1, 0, "meta"))
    require_used(copies)
    for config in (config_in(tmp_path, train={"bf16_weights": True}), in_bf16(tmp_path, True, shared(plain))):
        with pytest.raises(UserError, match=r"train\.bf16_weights"):
            require_used(config)


def shared(config: RunConfig) -> ModelConfig:
    """Return a model whose matrices are cut from one array."""
    return config.model.model_copy(update={"share": 2})
