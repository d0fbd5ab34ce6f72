"""A model as it leaves the house: a folder or file as it is, or what a run or a swarm's peer would be exported as."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from planaria.api.export import export_run
from planaria.common.errors import UserError
from planaria.models.huggingface import is_exported
from planaria.runtime.engine.weights import located
from planaria.swarm.export_peer import export_peer
from planaria.swarm.learned import learned
from planaria.swarm.policy.chat import Template
from planaria.swarm.records.lines import PEERS

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Named:
    """What the user named."""

    model: str
    """a run, or a model: a folder, a GGUF file, or hf:NAME"""
    peer: str | None = None
    round: int | None = None

    @property
    def is_swarm(self) -> bool:
        return (Path(self.model) / PEERS).is_dir()


@dataclass(frozen=True)
class Released:
    """Where it lies."""

    place: Path
    told: list[str] = field(default_factory=list)
    """what its export said of a certificate"""
    template: Template | None = None
    """by which the peer was asked, which is not exported with it"""


@contextmanager
def released(named: Named) -> Iterator[Released]:
    """The model's own place, or an export that is there for as long as this lasts.

    :raises UserError: when there is no such model, run or peer.
    """
    folder = Path(named.model)
    if named.is_swarm and named.peer is None:
        raise UserError(f"{named.model}: which peer's model? give --peer, such as --peer p0")
    if not named.is_swarm and (named.peer, named.round) != (None, None):
        raise UserError(f"{named.model}: is no run of a swarm; leave out --peer and --round")
    trained = folder.is_dir() and not is_exported(folder) and (folder / CHECKPOINTS).is_dir()
    if not named.is_swarm and not trained:
        place = located(named.model)
        if not place.exists():
            raise UserError(f"{named.model}: there is no such run, folder or file; is the path right?")
        yield Released(place)
        return
    with tempfile.TemporaryDirectory(prefix="planaria-") as temporary:
        place, told = Path(temporary) / "model", list[str]()
        if named.peer is None:
            yield Released(export_run(folder, place))
            return
        template = getattr(learned(folder, named.peer, named.round).policy, "template", None)
        yield Released(export_peer(folder, named.peer, place, named.round, told.append), told, template)
