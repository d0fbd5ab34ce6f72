"""``experts.json``: the members of an ensemble and their mixture, with checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from planaria.common import atomic, digests, documents
from planaria.common.documents import Record
from planaria.common.errors import UserError, suggestion
from planaria.lab.experts.experts_spec import MixtureSpec

FILE = "experts.json"
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
ADDED = "added"
"""folder within an ensemble for experts that were added after its training"""
MAX_BYTES = 1 << 22
"""largest size of a manifest"""


class Expert(Record):
    """One expert: an exported model."""

    name: str
    domain: str
    model: str
    """its folder, relative to the manifest's"""
    sha256: str
    """SHA-256 of the expert's weights"""
    parameters: int
    parent: str = ""
    """folder of the model that it branched off, relative to the manifest's; empty if unknown"""
    belief: float = Field(default=0.0, allow_inf_nan=False)
    """ln π of the cached prior, up to a constant"""
    routed: float | None = None
    """share of its domain's test texts at whose end it had the largest weight, in the ensemble as trained; None if it
    was added"""

    @property
    def added(self) -> bool:
        """Whether it was added after the ensemble's training."""
        return self.model.startswith(f"{ADDED}/")


class EnsembleManifest(Record):
    """An ensemble of experts with one tokenizer."""

    format: Literal[1] = 1
    tokenizer: str
    """SHA-256 of tokenizer.json"""
    vocab: int
    context: int
    mixture: MixtureSpec
    members: list[Expert]
    removed: list[str] = Field(default_factory=list)
    """experts trained with the ensemble that were removed from it"""
    parent: str = ""
    """folder of the model of middle size that its experts descend from; empty: as its members specify"""
    mixes: dict[str, list[str]] = Field(default_factory=dict)
    """domain without its own text → the domains whose text it mixes"""

    def parts(self, domain: str) -> list[str]:
        """Return the domains whose text this one's experts learn from."""
        return self.mixes.get(domain) or [domain]

    def prior_model(self, folder: Path) -> str:
        """Return the folder of the model for the priors ridge and votes: the parent of middle size.

        :raises UserError: when it is unknown or missing.
        """
        known = sorted((member for member in self.members if member.parent), key=lambda member: member.parameters)
        parent = self.parent or (known[len(known) // 2].parent if known else "")
        prior = f"{folder}: prior = {self.mixture.prior!r}"
        if not parent:
            raise UserError(f"{prior}: the parent of its experts is unknown; use another prior")
        if not (folder / parent / WEIGHTS).is_file():
            raise UserError(f"{prior}: {folder / parent / WEIGHTS} is missing; restore it")
        return parent

    def with_changes_of(self, before: EnsembleManifest) -> EnsembleManifest:
        """Return this new manifest with the manual changes of the one ``before`` it."""
        trained = [member for member in self.members if member.name not in before.removed]
        names = {member.name for member in trained}
        added = [expert for expert in before.members if expert.added and expert.name not in names]
        return self.model_copy(update={"members": [*trained, *added], "removed": before.removed})

    def member(self, name: str) -> Expert:
        """Return the member of that name, or the only one of that domain.

        :raises UserError: when there is none, naming the nearest, or several of that domain.
        """
        named = [member for member in self.members if member.name == name]
        found = named or [member for member in self.members if member.domain == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(f"domain {name!r} has several experts: {', '.join(member.name for member in found)}")
        raise UserError(f"unknown expert {name!r}; {suggestion(name, [member.name for member in self.members])}")


def digest(file: Path) -> str:
    """Return the SHA-256 (hex) of a file.

    :raises UserError: when it is missing.
    """
    try:
        return digests.of_file(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); restore the expert, or remove it") from None


def read(folder: Path) -> EnsembleManifest:
    """Read the manifest of the ensemble in ``folder``.

    :raises UserError: when it is missing, too large, damaged or empty.
    """
    file = folder / FILE
    if not file.is_file():
        raise UserError(f"{folder} holds no ensemble (no {FILE}); make one with `planaria experts train RECIPE`")
    manifest = documents.read_model(file, EnsembleManifest, MAX_BYTES, "restore an older copy")
    if not manifest.members:
        raise UserError(f"{file} has no experts; add one with `planaria experts edit {folder} --add MODEL`")
    return manifest


def write(folder: Path, manifest: EnsembleManifest) -> None:
    """Write the manifest atomically."""
    atomic.write_text(folder / FILE, manifest.model_dump_json(indent=1))


def expert_folder(folder: Path, member: Expert) -> Path:
    """Return the folder of a member's model.

    :raises UserError: when its weights are missing or have changed.
    """
    model = folder / member.model
    if not (model / WEIGHTS).is_file():
        raise UserError(
            f"{folder / FILE}: expert {member.name!r}: {model / WEIGHTS} is missing; restore it, or "
            f"`planaria experts edit {folder} --remove {member.name}`"
        )
    if digest(model / WEIGHTS) != member.sha256:
        raise UserError(
            f"{folder / FILE}: expert {member.name!r}: {model / WEIGHTS} is not the file that was added; restore that "
            "file, or remove the expert and add this one"
        )
    return model
