"""A run's checkpoints in a store besides its folder (``checkpoint.store``), for the loss of the machine.

    URL/NAME/run.id, config.json, …                 the run's files
    URL/NAME/checkpoints/step-00000100/…            as in the run's folder; the manifest is written last, removed first

The run works with its folder; a thread copies each new checkpoint during training. Files from the store are checked by
the same digests as those in a folder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from planaria.common import documents
from planaria.common.atomic import new_folder
from planaria.common.errors import RunStopped, UserError
from planaria.common.filesystems import fetch, filesystem, require_reachable, without_password, wrap_errors
from planaria.common.stdio import Notify
from planaria.control.log.reader import ID, write_identity
from planaria.models.llama_stages import parameter_count
from planaria.models.packing import HEADROOM
from planaria.runtime.checkpoint.store import (
    MANIFEST,
    CheckpointManifest,
    CheckpointStore,
    SealedCheckpoint,
    read_manifest,
    step_of,
)

_CHECKPOINTS = "checkpoints"
_LOOK_S = 1.0
_LONGEST_PAUSE_S = 30.0
MAX_BYTES = 1 << 24
"""maximum size of a run's identity or a manifest, bytes"""
MAX_PART_BYTES = 1 << 42
"""maximum size of a stage's file if a user's class determines its size, bytes"""
_PARAMETER_BYTES = 64
"""bytes of one parameter in a stage's file: three fp32 numbers, and fewer for each part of the outer state"""
_LAST_S = 600.0
"""seconds to copy the last checkpoint at the end of a run"""


class Mirror:
    """One run's location in a store."""

    def __init__(self, url: str, name: str) -> None:
        """Open the store; UserError if the URL is unsupported or unreachable."""
        self.url = f"{url.rstrip('/')}/{name}"
        with require_reachable("checkpoint.store"):
            self._system, root = filesystem(self.url, "checkpoint.store")
        self._root = root.rstrip("/")
        self.closed = False
        """whether writing is no longer allowed"""
        self._sent: dict[str, tuple[int, int]] = {}
        """uploaded files of the run: size and modification time"""

    def claim(self, folder: Path, again: bool = False) -> None:
        """Claim the location for this run; ``again``: it may have been claimed by a run that ended before its first
        checkpoint.

        :raises UserError: if another run's is there, or the store cannot be written to.
        """
        mark = folder / ID
        with self._access("read there"):
            stored = self._read(ID)
        if not mark.exists():
            write_identity(folder, stored if again else None)
        if stored is None:
            with self._access("write there"):
                self._system.makedirs(self._root, exist_ok=True)
                self._system.pipe_file(f"{self._root}/{ID}", documents.read_bytes(mark))
        elif stored != documents.read_bytes(mark):
            raise UserError(f"checkpoint.store: {without_password(self.url)} holds another run; choose another --name")

    def release(self, folder: Path) -> None:
        """Release the claim of the run in ``folder``, whose start failed; stored checkpoints stay."""
        with suppress(OSError, UserError):
            mark = folder / ID
            if mark.is_file() and self._read(ID) == mark.read_bytes() and not self.names():
                self._system.rm_file(f"{self._root}/{ID}")

    def names(self) -> list[str]:
        """Return the complete checkpoints in the store, oldest first; OSError if the store cannot be reached."""
        with wrap_errors(self.url, "list its checkpoints"):
            complete = [name for name in self._folders() if self._system.exists(self._at(name, MANIFEST))]
        return sorted(complete)

    def newest(self) -> str:
        """Return the newest whole checkpoint in the store, or an empty string if there is none.

        :raises UserError: if the store cannot be reached.
        """
        with require_reachable("checkpoint.store"):
            return next((name for name in reversed(self.names()) if "." not in name), "")

    def is_ahead(self, folder: Path) -> bool:
        """Return whether the store has a newer checkpoint of the run than ``folder``.

        :raises UserError: if the store cannot be reached.
        """
        mark = folder / ID
        if step_of(self.newest()) <= CheckpointStore(folder / _CHECKPOINTS).newest_step_by_name() or not mark.is_file():
            return False
        with self._access("read there"):
            return self._read(ID) == documents.read_bytes(mark)

    def update(self, folder: Path, own: Iterable[str]) -> None:
        """Upload all checkpoints of ``folder`` and the run's ``own`` files; remove checkpoints that the folder lacks.

        :raises OSError: if the store cannot be reached, or is full.
        """
        here = CheckpointStore(folder / _CHECKPOINTS).list()
        for saved in here:
            name = saved.folder.name
            with wrap_errors(self.url, f"read {name}"):
                stored = self._read(f"{_CHECKPOINTS}/{name}/{MANIFEST}")
            if stored == documents.read_bytes(saved.folder / MANIFEST):
                continue
            if stored is not None:  # of a history that was left when the run was resumed from an earlier state
                with wrap_errors(self.url, f"replace {name}"):
                    self._remove(name)
            self._put_own(folder, own)
            self._put(saved)
        if here:  # an empty folder may be damaged
            kept = {saved.folder.name for saved in here}
            with wrap_errors(self.url, "remove old checkpoints"):
                for name in self._folders():
                    if name not in kept and not self.closed:
                        self._remove(name)

    def fetch(self, out: Path, own: Mapping[str, int], notify: Notify) -> Path:
        """Download the run with its newest whole checkpoint into a new folder in ``out``.

        ``own``: the run's files, and the limit of each in bytes.

        :raises UserError: if there is none, the folder exists, the download fails, or a file exceeds its limit or
            differs from the size in the store.
        """
        folder = out / self._root.rpartition("/")[2]
        if folder.exists():
            raise UserError(f"{folder} exists already; resume it, or fetch the run into another --out")
        if not (newest := self.newest()):
            raise UserError(f"{without_password(self.url)} has no complete checkpoint; use the URL of a run in a store")
        notify(f"fetching {newest} from {without_password(self.url)}")
        with (
            require_reachable("checkpoint.store"),
            new_folder(folder) as partial,
            wrap_errors(self.url, "fetch the run"),
        ):
            stored = {entry["name"].rpartition("/")[2] for entry in self._system.ls(self._root, detail=True)}
            for name in [name for name in own if name in stored]:
                fetch(self._system, f"{self._root}/{name}", partial / name, own[name])
            self._fetch(newest, partial / _CHECKPOINTS / newest)
        return folder

    def fetch_checkpoint(self, name: str, folder: Path) -> None:
        """Download one checkpoint into the run's ``folder``.

        :raises OSError: if the store lacks it or cannot be reached.
        :raises UserError: if a file is damaged.
        """
        with wrap_errors(self.url, f"fetch {name}"), new_folder(folder / _CHECKPOINTS / name) as partial:
            self._fetch(name, partial)

    @contextmanager
    def _access(self, label: str) -> Iterator[None]:
        """Convert errors of the store to a UserError that names the setting, the location and the operation."""
        with require_reachable("checkpoint.store"), wrap_errors(self.url, label):
            yield

    def _fetch(self, name: str, to: Path) -> None:
        fetch(self._system, self._at(name, MANIFEST), to / MANIFEST, MAX_BYTES)
        manifest = read_manifest(to)
        for file in manifest.digests:
            fetch(self._system, self._at(name, file), to / file, largest_part(manifest))

    def _put(self, saved: SealedCheckpoint) -> None:
        files = [*saved.manifest.digests] or [f.name for f in saved.folder.iterdir() if f.name != MANIFEST]
        for file in (*files, MANIFEST):
            with wrap_errors(self.url, f"write {saved.folder.name}"):
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
                with wrap_errors(self.url, f"write {name}"):
                    self._system.put_file(str(file), f"{self._root}/{name}")
                self._sent[name] = about.st_size, about.st_mtime_ns

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, starting with its manifest."""
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
            return bytes(self._system.cat_file(f"{self._root}/{name}", start=0, end=MAX_BYTES))
        except FileNotFoundError:
            return None

    def _at(self, name: str, file: str) -> str:
        return f"{self._root}/{_CHECKPOINTS}/{name}/{file}"


def largest_part(manifest: CheckpointManifest) -> int:
    """Return the largest possible size of a stage's file: the whole model, with its moments and outer state."""
    custom = ":" in manifest.model.family or (manifest.exchange is not None and ":" in manifest.exchange.kind)
    if custom:  # do not import a class because a store names it
        return MAX_PART_BYTES
    return HEADROOM + _PARAMETER_BYTES * parameter_count(manifest.model)


@contextmanager
def mirror_folder(mirror: Mirror | None, folder: Path, own: Iterable[str], notify: Notify) -> Iterator[None]:
    """Copy each new checkpoint of ``folder`` to the store in a thread; at the end, wait for the last one.

    ``own``: the run's files to copy with them. Failures are reported and retried.
    """
    if mirror is None:
        yield
        return
    over, deposed = threading.Event(), False
    thread = threading.Thread(target=_follow, args=(mirror, folder, own, notify, over), name="mirror", daemon=True)
    thread.start()
    try:
        yield
    except RunStopped:  # another controller may write there now; this one must not remove its checkpoints
        deposed = True
        raise
    finally:
        if deposed:
            mirror.closed = True
        over.set()
        thread.join(_LAST_S)
        if thread.is_alive():
            notify(f"checkpoint.store: {without_password(mirror.url)} lacks the last checkpoint after {_LAST_S:g} s")


def _follow(mirror: Mirror, folder: Path, own: Iterable[str], notify: Notify, over: threading.Event) -> None:
    pause, seen = _LOOK_S, set[tuple[str, int]]()
    while True:
        last = over.wait(pause)
        if mirror.closed:
            return
        sealed = _sealed_checkpoints(folder)
        if sealed != seen:
            try:
                mirror.update(folder, own)
                seen, pause = sealed, _LOOK_S
            except (OSError, UserError) as error:  # a checkpoint that was dropped meanwhile is among them
                if pause == _LOOK_S or last:
                    notify(f"checkpoint.store: {error}" + ("" if last else "; will be tried again"))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        if last:
            return


def _sealed_checkpoints(folder: Path) -> set[tuple[str, int]]:
    """Return the checkpoints of a run's folder by name and time of their manifests, since a name may be reused."""
    sealed = set[tuple[str, int]]()
    for manifest in (folder / _CHECKPOINTS).glob(f"step-*/{MANIFEST}"):
        with suppress(FileNotFoundError):  # already removed
            sealed.add((manifest.parent.name, manifest.stat().st_mtime_ns))
    return sealed
