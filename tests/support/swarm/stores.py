"""Misbehaving object stores in memory, for tests."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Scratch(MemoryFileSystem):
    """A separate store without folders, like an object store."""

    protocol = "scratch"
    async_impl = True
    calls: ClassVar[list[tuple[str, str]]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.clear()

    @classmethod
    def clear(cls) -> None:
        cls.store, cls.pseudo_dirs, cls.calls = {}, [""], []
        fsspec.register_implementation(cls.protocol, cls, clobber=True)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix(f"{cls.protocol}://"))

    def happens(self, call: str, path: str) -> None:
        self.calls.append((call, path))

    def info(self, path: str, **kwargs: Any) -> Any:
        self.happens("info", path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.happens("ls", path)
        return super().ls(path, detail, **kwargs)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        self.happens("cat", path)
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.happens("pipe", path)
        super().pipe_file(path, value, mode, **kwargs)


Scratch.clear()


class Plain(Scratch):
    """A store without conditional writes: a put replaces the object."""

    protocol = "plain"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, **kwargs)


class Flaky(Scratch):
    """Every tenth call fails on average; half of the failed writes have arrived."""

    protocol = "flaky"
    chance = 0.1
    rng = random.Random(1)

    def happens(self, call: str, path: str) -> None:
        super().happens(call, path)
        if self.rng.random() < self.chance:
            raise self.rng.choice([OSError(5, "out of order"), TimeoutError("too slow"), ConnectionError("gone")])

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode, **kwargs)
        self.happens("pipe", path)


class Late(Scratch):
    """Messages of rounds appear after three reads, then partially; existing ones cannot be replaced."""

    protocol = "late"
    looks: ClassVar[dict[str, int]] = {}

    @classmethod
    def clear(cls) -> None:
        super().clear()
        cls.looks = {}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        data = super().cat_file(path, start, end, **kwargs)
        path = self._strip_protocol(path)
        self.looks[path] = looks = self.looks.get(path, 0) + 1
        if "/rounds/" not in path or looks >= 7:
            return data
        if looks < 4:
            raise FileNotFoundError(path)
        return data[: len(data) // 2]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self._strip_protocol(path) in self.store:
            raise FileExistsError(path)
        super().pipe_file(path, value, mode, **kwargs)
