"""``planaria experts fuse``: the experts of an ensemble as one model, from the parent that they branched off."""

from __future__ import annotations

from pathlib import Path

from planaria.commands.realign import write
from planaria.errors import UserError
from planaria.experts import fused, manifest
from planaria.experts.fused import FILE, SCALES, Fused, How, Part
from planaria.experts.manifest import Manifest
from planaria.model import fusing
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.repair.training import take, weights_of


def fuse(run: Path, to: Path, by: How, scale: float | None, safe: str | None, seed: int) -> int:
    """Put the experts of the ensemble in ``run`` together as one model; the exit code, 0.

    :raises UserError: when they are of unequal size, or nobody knows their parent.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: exists and is not an empty folder; remove it, or write elsewhere")
    known = manifest.read(run)
    if len({member.parameters for member in known.members}) > 1:
        sizes = ", ".join(f"{member.name} {member.parameters:,}" for member in known.members)
        raise UserError(f"{run}: experts of unequal size ({sizes} parameters) are no one model; train them equal")
    place = safe or str(_parent(run, known))
    parent = open_policy(place)
    experts = [open_policy(str(manifest.place(run, member))) for member in known.members]
    for member, expert in zip(known.members, experts, strict=True):
        fusing.require_alike(weights_of(parent), weights_of(expert), f"expert {member.name!r}")
    record = Fused(
        by=by,
        scale=SCALES[by] if scale is None else scale,
        seed=seed,
        parent=_part("parent", "", Path(place), parent),
        parts=[_part(m.name, m.domain, run / m.model, e) for m, e in zip(known.members, experts, strict=True)],
    )
    added = fused.contributions(record, weights_of(parent), [weights_of(one) for one in experts])
    whole = parent.clone()
    take(whole, fusing.fused(weights_of(parent), added))
    write(to, whole, {FILE: record.model_dump_json(indent=1).encode()})
    print(f"{to}: {len(experts)} experts in one model of {known.members[0].parameters:,} parameters, by {by}, λ = "
          f"{record.scale:g}; `planaria eval {to}` says what that cost")  # fmt: skip
    return 0


def _parent(run: Path, known: Manifest) -> Path:
    """Where all of an ensemble's experts branched off."""
    parents = {member.parent for member in known.members}
    if "" in parents or len(parents) > 1:
        raise UserError(f"{run}: its experts do not say which one model they branched off; give it with --safe MODEL")
    return run / parents.pop()


def _part(name: str, domain: str, place: Path, policy: Policy) -> Part:
    return Part(name=name, domain=domain, place=str(place.absolute()), sha256=fusing.digest(weights_of(policy)))
