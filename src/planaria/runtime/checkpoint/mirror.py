"""A run's checkpoints in a store beside its folder (``checkpoint.store``): what is left when the machine is lost.

    URL/NAME/run.id, config.json, …                 what the run is
    URL/NAME/checkpoints/step-00000100/…            as in the run's folder; the manifest comes last and goes first

The folder stays what the run works with: a thread copies each checkpoint that appears in it, while training goes on.
What the store holds is checked when it is used, by the same digests as in a folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from planaria.common import documents
from planaria.common.atomic import new_folder
from planaria.common.errors import UserError
from planaria.common.filesystems import fetch, filesystem, reached, required, shown
from planaria.control.logs import ID, draw
from planaria.models.packing import HEADROOM
from planaria.models.stages import parameter_count
from planaria.runtime.checkpoint.store import MANIFEST, CheckpointStore, Manifest, Saved, read_manifest, step_of

_CHECKPOINTS = "checkpoints"
_LOOK_S = 1.0
_LONGEST_PAUSE_S = 30.0
MOST_BYTES = 1 << 24
"""of a mark or a manifest"""
MOST_PART_BYTES = 1 << 42
"""of a stage's file, where a class of the user's own decides"""
_PARAMETER_BYTES = 64
"""of one parameter in a stage's file: three numbers of fp32, and less than as many again for each thing that replicas
keep from round to round"""
_LAST_S = 600.0
"""how long the end of a run waits for its last checkpoint to be copied"""

Say = Callable[[str], None]


class Mirror:
    """One run's place in a store."""

    def __init__(self, url: str, name: str) -> None:
        """:raises UserError: when the URL is of no kind that can be used here, or out of reach."""
        self.url = f"{url.rstrip('/')}/{name}"
        with required("checkpoint.store"):
            self._system, root = filesystem(self.url, "checkpoint.store")
        self._root = root.rstrip("/")
        self._sent: dict[str, tuple[int, int]] = {}
        """the run's own files that are there as they were sent: size and time of change"""

    def claim(self, folder: Path, again: bool = False) -> None:
        """Make the place this run's; ``again``: it may be that of a run that ended before its first checkpoint.

        :raises UserError: when another run's is there, or the store cannot be written to.
        """
        mark = folder / ID
        with required("checkpoint.store"), reached(self.url, "read there"):
            there = self._read(ID)
        if not mark.exists():
            draw(folder, there if again else None)
        if there is None:
            with required("checkpoint.store"), reached(self.url, "write there"):
                self._system.makedirs(self._root, exist_ok=True)
                self._system.pipe_file(f"{self._root}/{ID}", documents.data(mark))
        elif there != documents.data(mark):
            raise UserError(f"checkpoint.store: {shown(self.url)} holds another run; give this one another --name")

    def release(self, folder: Path) -> None:
        """Give up the claim of the run in ``folder``, whose start failed; the place stays if it has checkpoints."""
        with suppress(OSError, UserError):
            mark = folder / ID
            if mark.is_file() and self._read(ID) == mark.read_bytes() and not self.names():
                self._system.rm_file(f"{self._root}/{ID}")

    def names(self) -> list[str]:
        """The checkpoints that are there whole, oldest first.

        :raises OSError: when the store cannot be reached.
        """
        with reached(self.url, "list its checkpoints"):
            found = [name for name in self._folders() if self._system.exists(self._at(name, MANIFEST))]
        return sorted(found)

    def newest(self) -> str:
        """The newest checkpoint that is there with all its stages; empty if there is none.

        :raises UserError: when the store cannot be reached.
        """
        with required("checkpoint.store"):
            return next((name for name in reversed(self.names()) if "." not in name), "")

    def ahead(self, folder: Path) -> bool:
        """Is there a newer checkpoint of the run in ``folder`` than it has itself?

        :raises UserError: when the store cannot be reached.
        """
        mark = folder / ID
        if step_of(self.newest()) <= CheckpointStore(folder / _CHECKPOINTS).reached() or not mark.is_file():
            return False
        with required("checkpoint.store"), reached(self.url, "read there"):
            return self._read(ID) == documents.data(mark)

    def update(self, folder: Path, own: Iterable[str]) -> None:
        """Have all checkpoints of ``folder`` there, and the run's ``own`` files; what the folder has no more goes.

        :raises OSError: when the store cannot be reached, or is full.
        """
        here = CheckpointStore(folder / _CHECKPOINTS).list()
        for saved in here:
            name = saved.folder.name
            with reached(self.url, f"read {name}"):
                there = self._read(f"{_CHECKPOINTS}/{name}/{MANIFEST}")
            if there == documents.data(saved.folder / MANIFEST):
                continue
            if there is not None:  # of a history that was left when the run was resumed from an earlier state
                with reached(self.url, f"replace {name}"):
                    self._remove(name)
            self._put_own(folder, own)
            self._put(saved)
        if here:  # in a folder without checkpoints, something is amiss
            kept = {saved.folder.name for saved in here}
            with reached(self.url, "remove old checkpoints"):
                for name in self._folders():
                    if name not in kept:
                        self._remove(name)

    def fetch(self, out: Path, own: Mapping[str, int], say: Say) -> Path:
        """The run with its newest whole checkpoint, as a new folder in ``out``.

        ``own``: the run's files that go with it, and how many bytes each may have at most.

        :raises UserError: when there is none, it is here already, it cannot be fetched, or a file is larger than it can
            be or is not as large as the store says.
        """
        folder = out / self._root.rpartition("/")[2]
        if folder.exists():
            raise UserError(f"{folder}: is here already; resume that, or fetch the run into another --out")
        if not (newest := self.newest()):
            raise UserError(f"{shown(self.url)}: has no whole checkpoint; is that a run in a checkpoint.store?")
        say(f"fetching {newest} from {shown(self.url)}")
        with required("checkpoint.store"), new_folder(folder) as made, reached(self.url, "fetch the run"):
            there = {entry["name"].rpartition("/")[2] for entry in self._system.ls(self._root, detail=True)}
            for name in [name for name in own if name in there]:
                fetch(self._system, f"{self._root}/{name}", made / name, own[name])
            self._fetch(newest, made / _CHECKPOINTS / newest)
        return folder

    def _fetch(self, name: str, to: Path) -> None:
        fetch(self._system, self._at(name, MANIFEST), to / MANIFEST, MOST_BYTES)
        manifest = read_manifest(to)
        for file in manifest.digests:
            fetch(self._system, self._at(name, file), to / file, largest_part(manifest))

    def _put(self, saved: Saved) -> None:
        files = [*saved.manifest.digests] or [f.name for f in saved.folder.iterdir() if f.name != MANIFEST]
        for file in (*files, MANIFEST):
            with reached(self.url, f"write {saved.folder.name}"):
                target = self._at(saved.folder.name, file)
                self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(saved.folder / file), target)

    def _put_own(self, folder: Path, own: Iterable[str]) -> None:
        for name in own:
            file = folder / name
            if not file.is_file():
                continue
            about = file.stat()
            if self._sent.get(name) != (about.st_size, about.st_mtime_ns):
                with reached(self.url, f"write {name}"):
                    self._system.put_file(str(file), f"{self._root}/{name}")
                self._sent[name] = about.st_size, about.st_mtime_ns

    def _remove(self, name: str) -> None:
        """The manifest first: from then on it is no checkpoint."""
        if self._system.exists(self._at(name, MANIFEST)):
            self._system.rm_file(self._at(name, MANIFEST))
        self._system.rm(f"{self._root}/{_CHECKPOINTS}/{name}", recursive=True)

    def _folders(self) -> list[str]:
        try:
            entries = self._system.ls(f"{self._root}/{_CHECKPOINTS}", detail=True)
        except FileNotFoundError:
            return []
        return [e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self._system.cat_file(f"{self._root}/{name}", start=0, end=MOST_BYTES))
        except FileNotFoundError:
            return None

    def _at(self, name: str, file: str) -> str:
        return f"{self._root}/{_CHECKPOINTS}/{name}/{file}"


def largest_part(manifest: Manifest) -> int:
    """Bytes of which no stage's file has more: those of the whole model, with all that is kept beside it."""
    own_classes = ":" in manifest.model.family or (manifest.exchange is not None and ":" in manifest.exchange.kind)
    if own_classes:  # that a store names one is no reason to import it
        return MOST_PART_BYTES
    return HEADROOM + _PARAMETER_BYTES * parameter_count(manifest.model)


@contextmanager
def mirrored(mirror: Mirror | None, folder: Path, own: Iterable[str], say: Say) -> Iterator[None]:
    """While this lasts, a thread copies each checkpoint of ``folder`` as it appears; at the end, the last ones.

    ``own``: the run's files that go with them. A store that fails is tried again; that it lags is said.
    """
    if mirror is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(mirror, folder, own, say, over), name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_S)
        if thread.is_alive():
            say(f"checkpoint.store: {shown(mirror.url)} lacks the last checkpoint after {_LAST_S:g} s")


def _follow(mirror: Mirror, folder: Path, own: Iterable[str], say: Say, over: threading.Event) -> None:
    pause, seen = _LOOK_S, set[tuple[str, int]]()
    while True:
        last = over.wait(pause)
        found = _sealed(folder)
        if found != seen:
            try:
                mirror.update(folder, own)
                seen, pause = found, _LOOK_S
            except (OSError, UserError) as error:  # a checkpoint that was dropped meanwhile is among them
                if pause == _LOOK_S or last:
                    say(f"checkpoint.store: {error}" + ("" if last else "; will be tried again"))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        if last:
            return


def _sealed(folder: Path) -> set[tuple[str, int]]:
    """The checkpoints of a run's folder, by name and the time of their manifests: a name may come again."""
    found = set[tuple[str, int]]()
    for manifest in (folder / _CHECKPOINTS).glob(f"step-*/{MANIFEST}"):
        with suppress(FileNotFoundError):  # dropped meanwhile
            found.add((manifest.parent.name, manifest.stat().st_mtime_ns))
    return found
