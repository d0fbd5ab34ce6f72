"""``planaria experts edit --merge``: turn the experts of an ensemble into one model.

:func:`fuse` sums or averages what each learned since their common parent; :func:`merge` keeps their blocks as a mixture
of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from planaria.common.errors import UserError, suggestion
from planaria.config.names import require_name
from planaria.lab.experts import manifest
from planaria.lab.experts import merge as merging
from planaria.lab.experts.domains import TRAINED, domains_with_text
from planaria.lab.experts.log_probabilities import domain_samples, read_sums, text_samples
from planaria.lab.experts.manifest import EnsembleManifest
from planaria.models import fused, task_vectors
from planaria.models.fused import FILE, SCALES, Fused, How, Routers, SourceModel
from planaria.models.llama_stages import Llama
from planaria.runtime.preparation.weight_sources import open_model
from planaria.swarm.commands.realign import require_free, write_model
from planaria.swarm.learning.weight_versions import copy_weights
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import LlamaPolicy, open_policy, usage_of
from planaria.swarm.repair.repair_training import weights_of

MAX_RELATIVE_CHANGE = 1.0
"""mean change over mean weight at which a model no longer counts as a child of a parent"""


@dataclass(frozen=True)
class MergeSources:
    """Experts of equal shape and their parent."""

    run: Path
    known: EnsembleManifest
    parent: LlamaPolicy
    experts: Sequence[LlamaPolicy]
    origin: SourceModel
    """the parent"""
    parts: list[SourceModel]


def gather(run: Path, to: Path, safe: str | None) -> MergeSources:
    """Load the experts of the ensemble in ``run``, to become one model in ``to``.

    :raises UserError: when they differ in size, their parent is unknown, or one is not its child.
    """
    require_free(to)
    known = manifest.read(run)
    if len({member.parameters for member in known.members}) > 1:
        sizes = ", ".join(f"{member.name} {member.parameters:,}" for member in known.members)
        raise UserError(
            f"{run}: experts of unequal size ({sizes} parameters) cannot become one model; train experts of equal size"
        )
    location = safe or str(_parent(run, known))
    parent = open_llama(location)
    experts = [open_llama(str(manifest.expert_folder(run, member))) for member in known.members]
    for member, expert in zip(known.members, experts, strict=True):
        require_child(parent, expert, f"expert {member.name!r}", location)
    origin = describe_source("parent", "", Path(location), parent)
    parts = [describe_source(m.name, m.domain, run / m.model, e) for m, e in zip(known.members, experts, strict=True)]
    return MergeSources(run, known, parent, experts, origin, parts)


def fuse(
    run: Path, to: Path, by: How | Literal["average"], scale: float | None, safe: str | None, seed: int = 0
) -> int:
    """Write the parent of an ensemble plus each expert's contribution as one model; return the exit code.

    :raises UserError: as :func:`gather`.
    """
    sources = gather(run, to, safe)
    mean = 1 / len(sources.parts)
    weight = mean if by == "average" else SCALES[by] if scale is None else scale
    record = Fused(by=by, scale=weight, seed=seed, parent=sources.origin, parts=sources.parts, run=str(run.absolute()))
    parent = weights_of(sources.parent)
    added = fused.contributions(record, parent, [weights_of(expert) for expert in sources.experts])
    whole = sources.parent.clone()
    copy_weights(whole.module, task_vectors.add_contributions(parent, added))
    write_model(to, whole, {FILE: record.model_dump_json(indent=1).encode()})
    print(f"{to}: {len(sources.experts)} experts in one model of {sources.known.members[0].parameters:,} parameters, "
          f"by {record.by}, λ = {record.scale:g}; `planaria eval {to}` measures its loss")  # fmt: skip
    return 0


def open_llama(path: str) -> LlamaPolicy:
    """Open the LLaMA at ``path``: an expert, or the experts' parent.

    :raises UserError: when it is another model, or unreadable.
    """
    policy = open_policy(path)
    if not isinstance(policy, LlamaPolicy):
        raise UserError(f"{path} is not a LLaMA of planaria; only experts of a LLaMA can become one model")
    return policy


def require_child(parent: Policy, expert: Policy, label: str, location: str) -> None:
    """:raises UserError: when the model ``label`` has a shape or weights unrelated to the parent at ``location``."""
    ours, theirs = weights_of(parent), weights_of(expert)
    task_vectors.require_alike(ours, theirs, label)
    if (change := task_vectors.relative_distance(task_vectors.task_vector(theirs, ours), ours)) >= MAX_RELATIVE_CHANGE:
        raise UserError(
            f"{label}: its weights are {change:.0%} of their size away from those of {location}; that is not its "
            "parent, and only experts of one parent can become one model"
        )


def describe_source(name: str, domain: str, path: Path, policy: Policy) -> SourceModel:
    """Describe a source model."""
    return SourceModel(
        name=name, domain=domain, path=str(path.absolute()), sha256=task_vectors.digest(weights_of(policy))
    )


def _parent(run: Path, known: EnsembleManifest) -> Path:
    parents = {member.parent for member in known.members}
    if len(parents) > 1 and "" not in parents:
        parents = {known.parent}
    if "" in parents:
        raise UserError(f"{run}: the parent of its experts is unknown; pass --safe MODEL")
    return run / parents.pop()


SUMS = "routers.safetensors"
"""expert's name → sums of its domain [layers, D + 1, D + 1], from which routers are computed"""


def merge(run: Path, to: Path, routers: Routers, bias: bool, safe: str | None) -> int:
    """Merge the experts of the ensemble in ``run`` into a mixture of experts; return the exit code.

    :param bias: whether routers have biases
    :raises UserError: before anything is computed, when they cannot be merged, or an expert's domain has no text.
    """
    torch.set_num_threads(1)
    sources = gather(run, to, safe)
    texts = _router_texts(sources, routers.samples)
    experts = [_llama(policy) for policy in sources.experts]
    model = merging.merge_experts(experts, routers.of(len(experts)), bias)
    sums = {part.name: merging.domain_sums(model, n, texts[part.domain]) for n, part in enumerate(sources.parts)}
    record = Fused(by="dume", parent=sources.origin, parts=sources.parts, run=str(run.absolute()), routers=routers)
    _write_merged(to, model, sources.experts[0], record, sums)
    return 0


def add_expert(folder: Path, to: Path, expert: str, name: str, domain: str, text: str) -> int:
    """Write the merged model in ``folder`` with one more expert into ``to``, without reading other texts again.

    Only the new blocks and the routers change; the shared weights stay the mean of the first experts.

    :raises UserError: when the expert is not a child of their parent, or its text is too short.
    """
    torch.set_num_threads(1)
    require_free(to)
    require_name(name, "--as")
    merged = _MergedModel.of(folder)
    if any(part.name == name for part in merged.record.parts):
        raise UserError(f"{folder} already has an expert {name!r}; choose another name with --as")
    policy, origin = open_llama(expert), merged.record.parent.path
    if not Path(origin).exists():
        raise UserError(f"{folder / FILE}: the parent is missing at {origin}; restore it")
    if policy.tokenizer_fingerprint != merged.policy.tokenizer_fingerprint:
        raise UserError(f"{expert}: its tokenizer differs from that of {folder}; use an expert of the same parent")
    require_child(open_llama(origin), policy, f"expert {name!r}", origin)
    model, routers, config = merged.model, merged.routers, merged.model.config
    samples = text_samples(folder, {"source": text}, config.vocab, config.context, routers.samples)[:, :-1]
    number = len(merged.record.parts)
    wider = merging.with_block(model, _llama(policy), routers.of(number + 1))
    sums = {**merged.sums, name: merging.domain_sums(wider, number, samples)}
    parts = [*merged.record.parts, describe_source(name, domain, Path(expert), policy)]
    _write_merged(to, wider, merged.policy, merged.record.model_copy(update={"parts": parts}), sums)
    return 0


def remove_expert(folder: Path, to: Path, name: str) -> int:
    """Write the merged model in ``folder`` without an expert into ``to``, without reading any text.

    :raises UserError: when there is none of that name, or it is the last.
    """
    torch.set_num_threads(1)
    require_free(to)
    merged = _MergedModel.of(folder)
    names = [part.name for part in merged.record.parts]
    if name not in names:
        raise UserError(f"{folder} has no expert {name!r}; {suggestion(name, names)}")
    if len(names) == 1:
        raise UserError(f"{folder}: {name!r} is its only expert; a model needs one")
    parts = [part for part in merged.record.parts if part.name != name]
    fewer = merging.without_block(merged.model, names.index(name), merged.routers.of(len(parts)))
    sums = {part.name: merged.sums[part.name] for part in parts}
    _write_merged(to, fewer, merged.policy, merged.record.model_copy(update={"parts": parts}), sums)
    return 0


@dataclass(frozen=True)
class _MergedModel:
    """A merged model with its record."""

    model: Llama
    policy: LlamaPolicy
    record: Fused
    routers: Routers
    sums: Mapping[str, Tensor]

    @classmethod
    def of(cls, folder: Path) -> _MergedModel:
        """:raises UserError: when there is none, or it is damaged."""
        record = fused.read(folder)
        if record is None or record.routers is None:
            raise UserError(f"{folder} is not a model of `planaria experts edit --merge dume`; make one first")
        model, tokenizer = open_model(folder)
        names, size = [part.name for part in record.parts], model.config.dim + 1
        if model.routing is None or model.routing.experts != len(names):
            raise UserError(f"{folder / FILE}: lists {len(names)} experts, which are not the model's; merge again")
        policy = LlamaPolicy(model, tokenizer)
        policy.usage = usage_of(folder, model.config.context)
        return cls(
            model, policy, record, record.routers,
            _sums(folder / SUMS, names, (model.config.layers, size, size)),
        )  # fmt: skip


def _sums(file: Path, names: Sequence[str], shape: tuple[int, ...]) -> dict[str, Tensor]:
    fix = "restore it, or merge again"
    sums, _ = read_sums(file, shape, fix)
    for name in names:
        if name not in sums:
            raise UserError(f"{file} has no sums of expert {name!r}; {fix}")
    return sums


def _router_texts(sources: MergeSources, samples: int) -> dict[str, Tensor]:
    """Return domain → samples [n, T] from which its router is computed."""
    known, domains = sources.known, domains_with_text(sources.run)
    for member in known.members:
        if lacking := [domain for domain in known.parts(member.domain) if domain not in domains]:
            raise UserError(
                f"{sources.run}: expert {member.name!r}: its domain {lacking[0]!r} has no text, which routers are "
                f"made from; put some into {sources.run / TRAINED / f'{lacking[0] or member.name}.jsonl'}"
                + ("" if member.domain else f", and its domain into {sources.run / 'experts.json'}")
            )
    return {
        name: domain_samples(sources.run, known.parts(name), TRAINED, known.vocab, known.context, samples)[:, :-1]
        for name in dict.fromkeys(member.domain for member in known.members)
    }


def _write_merged(to: Path, model: Llama, like: LlamaPolicy, record: Fused, sums: Mapping[str, Tensor]) -> None:
    """Set the model's routers, and write it with everything needed to change it.

    Tokenizer and usage are those of ``like``.
    """
    assert record.routers is not None and model.routing is not None
    ordered = [sums[part.name] for part in record.parts]
    merging.route(model, ordered, record.routers.ridge, record.routers.temperature)
    packed = save({name: tensor.contiguous() for name, tensor in sums.items()})
    extra = {FILE: record.model_dump_json(indent=1).encode(), SUMS: packed}
    policy = LlamaPolicy(model, like.tokenizer)
    policy.usage = like.usage
    write_model(to, policy, extra)
    count = sum(tensor.numel() for tensor in model.global_state().values())
    tokens = sum(float(own[0, -1, -1]) for own in ordered)
    print(f"{to}: {len(record.parts)} experts in one model of {count:,} parameters, {model.routing.top_k} of "
          f"{len(record.parts)} blocks for a token; routers from {tokens:,.0f} tokens, λ = {record.routers.ridge:g}; "
          f"`planaria eval {to}` measures its loss")  # fmt: skip


def _llama(policy: LlamaPolicy) -> Llama:
    module = policy.module
    assert isinstance(module, Llama), "experts of an ensemble are LLaMAs"
    return module
