"""What a machine that joins by address has afterwards: the prepared data, of one source or of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import config_in

from planaria.config import RunConfig
from planaria.data.dataset import open_data
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.engine.provision import provide
from planaria.engine.setup import DATA, Setup
from planaria.fleet.files import FileServer
from planaria.fleet.switchboard import Switchboard
from planaria.transport.secure import new_key


def mixture(home: Path) -> RunConfig:
    entries: dict[str, Any] = {}
    for name in ("books", "web"):
        (home / f"{name}.txt").write_text(f"the text of {name} " * 200)
        entries[name] = {"source": str(home / f"{name}.txt"), "weight": 1}
    return config_in(home, data={"source": "stdlib", "mixture": entries})


@contextmanager
def served(config: RunConfig) -> Iterator[tuple[Setup, str]]:
    """A controller that serves the prepared data of ``config``: the setup for workers, and its address."""
    data, key = prepare(config.data, config.model.vocab), new_key()
    board = Switchboard("127.0.0.1", 0, key, 1000, lambda _, line: line.close())
    board.asked = FileServer({f"{DATA}/{folder.name}": folder for folder in data.folders}).serve
    try:
        yield Setup(config, Path("run"), data.folder, "127.0.0.1", key), board.address
    finally:
        board.close()


@pytest.mark.parametrize(("of", "folders"), [(config_in, 1), (mixture, 3)])
def test_prepared_data_is_fetched_once_and_mended(tmp_path: Path, of: Any, folders: int) -> None:
    home, said = tmp_path / "home", list[str]()
    home.mkdir()
    config = of(home)
    with served(config) as (setup, address):
        found = provide(setup, address, "g1", tmp_path / "cache", said.append)
        theirs, ours = (Stream(open_data(s.dataset), "train", 16, 3) for s in (setup, found))
        assert [ours.sample(n).tolist() for n in range(50)] == [theirs.sample(n).tolist() for n in range(50)]
        assert found.dataset.parent == tmp_path / "cache" and len(open_data(found.dataset).folders) == folders
        said.clear()
        provide(setup, address, "g1", tmp_path / "cache", said.append)
        assert said == []
        (open_data(found.dataset).folders[-1] / "train.bin").write_bytes(b"damaged")
        again = provide(setup, address, "g1", tmp_path / "cache", said.append)
        assert "fetching train.bin" in said and len(open_data(again.dataset).folders) == folders
