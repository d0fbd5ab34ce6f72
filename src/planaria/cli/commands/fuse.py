"""``planaria experts fuse``: the experts of an ensemble as one model, from the parent that they branched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import UserError
from planaria.lab.experts import fused, manifest
from planaria.lab.experts.fused import FILE, SCALES, Fused, How, Part
from planaria.lab.experts.manifest import Manifest
from planaria.models import fusing
from planaria.swarm.commands.realign import write
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from planaria.swarm.repair.training import take, weights_of

UNRELATED = 1.0
"""mean change over mean weight from which on a model is taken for no child of a parent"""


@dataclass(frozen=True)
class Gathered:
    """Experts of one shape, and the parent that they branched off."""

    run: Path
    known: Manifest
    parent: LlamaPolicy
    experts: Sequence[LlamaPolicy]
    origin: Part
    """the parent"""
    parts: list[Part]


def gather(run: Path, to: Path, safe: str | None) -> Gathered:
    """The experts of the ensemble in ``run``, which are to become one model in ``to``.

    :raises UserError: when they are of unequal size, nobody knows their parent, or one is none of its children.
    """
    require_free(to)
    known = manifest.read(run)
    if len({member.parameters for member in known.members}) > 1:
        sizes = ", ".join(f"{member.name} {member.parameters:,}" for member in known.members)
        raise UserError(f"{run}: experts of unequal size ({sizes} parameters) are no one model; train them equal")
    place = safe or str(_parent(run, known))
    parent = open_llama(place)
    experts = [open_llama(str(manifest.place(run, member))) for member in known.members]
    for member, expert in zip(known.members, experts, strict=True):
        require_child(parent, expert, f"expert {member.name!r}", place)
    origin = part_of("parent", "", Path(place), parent)
    parts = [part_of(m.name, m.domain, run / m.model, e) for m, e in zip(known.members, experts, strict=True)]
    return Gathered(run, known, parent, experts, origin, parts)


def fuse(run: Path, to: Path, by: How, scale: float | None, safe: str | None, seed: int) -> int:
    """Put the experts of the ensemble in ``run`` together as one model; the exit code, 0.

    :raises UserError: as :func:`gather`.
    """
    found = gather(run, to, safe)
    weight = SCALES[by] if scale is None else scale
    add_up(found, to, Fused(by=by, scale=weight, seed=seed, parent=found.origin, parts=found.parts))
    return 0


def add_up(found: Gathered, to: Path, record: Fused) -> None:
    """Write the parent and what each expert adds to it, as one model."""
    parent = weights_of(found.parent)
    added = fused.contributions(record, parent, [weights_of(one) for one in found.experts])
    whole = found.parent.clone()
    take(whole, fusing.fused(parent, added))
    write(to, whole, {FILE: record.model_dump_json(indent=1).encode()})
    print(f"{to}: {len(found.experts)} experts in one model of {found.known.members[0].parameters:,} parameters, by "
          f"{record.by}, λ = {record.scale:g}; `planaria eval {to}` says what that cost")  # fmt: skip


def require_free(to: Path) -> None:
    """:raises UserError: when a model cannot be written there."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: exists and is not an empty folder; remove it, or write elsewhere")


def open_llama(path: str) -> LlamaPolicy:
    """The LLaMA at ``path``: an expert, or what experts branched off.

    :raises UserError: when it is none, or cannot be read.
    """
    found = open_policy(path)
    if not isinstance(found, LlamaPolicy):
        raise UserError(f"{path}: is no LLaMA like planaria's; only experts of one can become one model")
    return found


def require_child(parent: Policy, expert: Policy, what: str, place: str) -> None:
    """:raises UserError: when the model ``what`` has another shape than the parent at ``place``, or other weights."""
    ours, theirs = weights_of(parent), weights_of(expert)
    fusing.require_alike(ours, theirs, what)
    if (moved := fusing.strangeness(fusing.task_vector(theirs, ours), ours)) >= UNRELATED:
        raise UserError(
            f"{what}: its weights are {moved:.0%} of their size away from those of {place}; that is not its parent, "
            "and only experts of one parent can become one model"
        )


def part_of(name: str, domain: str, place: Path, policy: Policy) -> Part:
    """A model that goes in."""
    return Part(name=name, domain=domain, place=str(place.absolute()), sha256=fusing.digest(weights_of(policy)))


def _parent(run: Path, known: Manifest) -> Path:
    """Where all of an ensemble's experts branched off, maybe after others."""
    parents = {member.parent for member in known.members}
    if len(parents) > 1 and "" not in parents:
        parents = {known.parent}
    if "" in parents:
        raise UserError(f"{run}: its experts do not say which one model they branched off; give it with --safe MODEL")
    return run / parents.pop()
