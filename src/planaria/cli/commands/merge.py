"""``planaria experts merge``: the experts of an ensemble as one model, averaged or as a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from planaria.cli.commands.fuse import Gathered, add_up, gather, open_llama, part_of, require_child, require_free
from planaria.common.errors import UserError, nearest
from planaria.config.names import require_name
from planaria.config.schema import DataConfig
from planaria.data.shards import prepare
from planaria.lab.experts import fused
from planaria.lab.experts import merge as merging
from planaria.lab.experts.domains import TRAINED, with_text
from planaria.lab.experts.fused import FILE, Fused, Routers
from planaria.lab.experts.manifest import TOKENIZER
from planaria.lab.experts.reading import domain_samples, kept_sums, windows
from planaria.models.stages import Llama
from planaria.runtime.engine.weights import open_model
from planaria.swarm.commands.realign import write
from planaria.swarm.policy.policies import LlamaPolicy, usage_of

SUMS = "routers.safetensors"
"""expert's name → sums of its domain [layers, D + 1, D + 1], from which routers are made anew"""


@dataclass(frozen=True)
class Wanted:
    """What the one model is to be."""

    by: Literal["average", "dume"]
    routers: Routers
    bias: bool
    """dume: do routers add a number of each block's own?"""


def merge(run: Path, to: Path, wanted: Wanted, safe: str | None) -> int:
    """Make one model of the experts of the ensemble in ``run``; the exit code, 0.

    :raises UserError: when they cannot be one, or an expert's domain has no text; before anything is computed.
    """
    torch.set_num_threads(1)
    found = gather(run, to, safe)
    if wanted.by == "average":
        scale = 1 / len(found.parts)
        add_up(found, to, Fused(by="average", scale=scale, parent=found.origin, parts=found.parts, run=_place(run)))
        return 0
    texts = _texts(found, wanted.routers.samples)
    experts = [_llama(policy) for policy in found.experts]
    model = merging.merged(experts, wanted.routers.of(len(experts)), wanted.bias)
    sums = {part.name: merging.domain_sums(model, n, texts[part.domain]) for n, part in enumerate(found.parts)}
    record = Fused(by="dume", parent=found.origin, parts=found.parts, run=_place(run), routers=wanted.routers)
    _finish(to, model, found.experts[0], record, sums)
    return 0


def add_expert(folder: Path, to: Path, expert: str, name: str, domain: str, text: str) -> int:
    """Write the merged model in ``folder`` with one expert more into ``to``: no other text is read again.

    Everything but the new blocks and the routers stays as it is: it is the mean of the first experts.

    :raises UserError: when the expert is no child of their parent, or its text too short.
    """
    torch.set_num_threads(1)
    require_free(to)
    require_name(name, "--as")
    opened = _Opened.of(folder)
    if any(part.name == name for part in opened.record.parts):
        raise UserError(f"{folder}: has an expert {name!r} already; choose another name with --as")
    policy, origin = open_llama(expert), opened.record.parent.place
    if not Path(origin).exists():
        raise UserError(f"{folder / FILE}: the parent is not at {origin} any more; bring it back")
    if policy.tokenizer_fingerprint != opened.policy.tokenizer_fingerprint:
        raise UserError(f"{expert}: its tokenizer is not that of {folder}; give an expert of the same parent")
    require_child(open_llama(origin), policy, f"expert {name!r}", origin)
    data = DataConfig(source=text, tokenizer=str(folder / TOKENIZER), validation=0.0)
    model, routers, config = opened.model, opened.routers, opened.model.config
    samples = windows(prepare(data, config.vocab), "train", config.context, routers.samples)[:, :-1]
    number = len(opened.record.parts)
    wider = merging.with_block(model, _llama(policy), routers.of(number + 1))
    sums = {**opened.sums, name: merging.domain_sums(wider, number, samples)}
    parts = [*opened.record.parts, part_of(name, domain, Path(expert), policy)]
    _finish(to, wider, opened.policy, opened.record.model_copy(update={"parts": parts}), sums)
    return 0


def remove_expert(folder: Path, to: Path, name: str) -> int:
    """Write the merged model in ``folder`` without an expert into ``to``: no text is read.

    :raises UserError: when there is none of that name, or it is the last.
    """
    torch.set_num_threads(1)
    require_free(to)
    opened = _Opened.of(folder)
    names = [part.name for part in opened.record.parts]
    if name not in names:
        raise UserError(f"{folder}: has no expert {name!r}; {nearest(name, names)}")
    if len(names) == 1:
        raise UserError(f"{folder}: {name!r} is its only expert; a model needs one")
    parts = [part for part in opened.record.parts if part.name != name]
    fewer = merging.without_block(opened.model, names.index(name), opened.routers.of(len(parts)))
    sums = {part.name: opened.sums[part.name] for part in parts}
    _finish(to, fewer, opened.policy, opened.record.model_copy(update={"parts": parts}), sums)
    return 0


@dataclass(frozen=True)
class _Opened:
    """A merged model."""

    model: Llama
    policy: LlamaPolicy
    record: Fused
    routers: Routers
    sums: Mapping[str, Tensor]

    @classmethod
    def of(cls, folder: Path) -> _Opened:
        """:raises UserError: when there is none, or it is damaged."""
        record = fused.read(folder)
        if record is None or record.routers is None:
            raise UserError(f"{folder}: is no model of `planaria experts merge --by dume`; make one first")
        model, tokenizer = open_model(folder)
        names, size = [part.name for part in record.parts], model.config.dim + 1
        if model.routing is None or model.routing.experts != len(names):
            raise UserError(f"{folder / FILE}: names {len(names)} experts, the model has others; merge again")
        policy = LlamaPolicy(model, tokenizer)
        policy.usage = usage_of(folder, model.config.context)
        return cls(
            model, policy, record, record.routers,
            _sums(folder / SUMS, names, (model.config.layers, size, size)),
        )  # fmt: skip


def _sums(file: Path, names: Sequence[str], shape: tuple[int, ...]) -> dict[str, Tensor]:
    mend = "bring it back, or merge again"
    found, _ = kept_sums(file, shape, mend)
    for name in names:
        if name not in found:
            raise UserError(f"{file}: has no sums of expert {name!r}; {mend}")
    return found


def _texts(found: Gathered, samples: int) -> dict[str, Tensor]:
    """Domain → what its router learns from, samples [n, T]."""
    known, there = found.known, with_text(found.run)
    for member in known.members:
        if lacking := [part for part in known.parts(member.domain) if part not in there]:
            raise UserError(
                f"{found.run}: expert {member.name!r}: its domain {lacking[0]!r} has no text, which routers are "
                f"made from; put some into {found.run / TRAINED / f'{lacking[0] or member.name}.jsonl'}"
                + ("" if member.domain else f", and its domain into {found.run / 'experts.json'}")
            )
    return {
        name: domain_samples(found.run, known.parts(name), TRAINED, known.vocab, known.context, samples)[:, :-1]
        for name in dict.fromkeys(member.domain for member in known.members)
    }


def _finish(to: Path, model: Llama, like: LlamaPolicy, record: Fused, sums: Mapping[str, Tensor]) -> None:
    """Give the model its routers and write it, with all that is needed to change it; tokenizer and usage are those of
    ``like``."""
    assert record.routers is not None and model.routing is not None
    ordered = [sums[part.name] for part in record.parts]
    merging.route(model, ordered, record.routers.ridge, record.routers.temperature)
    packed = save({name: tensor.contiguous() for name, tensor in sums.items()})
    extra = {FILE: record.model_dump_json(indent=1).encode(), SUMS: packed}
    policy = LlamaPolicy(model, like.tokenizer)
    policy.usage = like.usage
    write(to, policy, extra)
    count = sum(tensor.numel() for tensor in model.global_state().values())
    tokens = sum(float(own[0, -1, -1]) for own in ordered)
    print(f"{to}: {len(record.parts)} experts in one model of {count:,} parameters, {model.routing.top_k} of "
          f"{len(record.parts)} blocks for a token; routers from {tokens:,.0f} tokens, λ = {record.routers.ridge:g}; "
          f"`planaria eval {to}` says what that cost")  # fmt: skip


def _llama(policy: LlamaPolicy) -> Llama:
    module = policy.module
    assert isinstance(module, Llama), "experts of an ensemble are"
    return module


def _place(run: Path) -> str:
    return str(run.absolute())
