"""Files of a machine before its workers start: it uses the run's folders where it sees them, and fetches otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.data.dataset import open_data
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.runtime.engine.run_files import JOINED, local_workplace, provide_setup
from planaria.runtime.fleet.base import Workplace
from planaria.runtime.fleet.control_connections import ControlListener
from planaria.runtime.fleet.files import FileServer
from planaria.runtime.fleet.joining import publish_run_address
from planaria.runtime.transport.secure import new_key
from planaria.runtime.worker.setup import DATA, Setup
from support.tiny_engine import config_in


def mixture(home: Path) -> RunConfig:
    entries: dict[str, Any] = {}
    for name in ("books", "web"):
        (home / f"{name}.txt").write_text(f"the text of {name} " * 200)
        entries[name] = {"source": str(home / f"{name}.txt"), "weight": 1}
    return config_in(home, data={"source": "stdlib", "mixture": entries})


@contextmanager
def served(config: RunConfig) -> Iterator[tuple[Setup, str]]:
    """Serve the prepared data of ``config``; yield the setup for workers and the address."""
    data, key = tokenise_corpus(config.data, config.model.vocab), new_key()
    listener = ControlListener("127.0.0.1", 0, key, 1000, lambda _, line: line.close())
    listener.on_file_request = FileServer({f"{DATA}/{folder.name}": folder for folder in data.folders}).serve
    try:
        yield Setup(config, Path("run"), data.folder, "127.0.0.1", key), listener.address
    finally:
        listener.close()


@pytest.mark.parametrize(("of", "folders"), [(config_in, 1), (mixture, 3)])
def test_prepared_data_is_fetched_once_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Any, folders: int
) -> None:
    """A relative cache is relative to the directory in which the machine joined, wherever its workers run."""
    monkeypatch.chdir(tmp_path)
    home, output = tmp_path / "home", list[str]()
    home.mkdir()
    config = of(home)
    with served(config) as (setup, address):
        found = provide_setup(setup, address, "g1", Path("cache"), output.append)
        assert found.folder.parent == tmp_path / "cache" / JOINED
        theirs, ours = (Stream(open_data(s.dataset), "train", 16, 3) for s in (setup, found))
        assert [ours.sample(n).tolist() for n in range(50)] == [theirs.sample(n).tolist() for n in range(50)]
        assert found.dataset.parent == tmp_path / "cache" and len(open_data(found.dataset).folders) == folders
        output.clear()
        provide_setup(setup, address, "g1", tmp_path / "cache", output.append)
        assert output == []
        (open_data(found.dataset).folders[-1] / "train.bin").write_bytes(b"damaged")
        again = provide_setup(setup, address, "g1", tmp_path / "cache", output.append)
        assert "fetching train.bin" in output and len(open_data(again.dataset).folders) == folders


def of(place: Workplace) -> Setup:
    """Return the setup of the place's workers."""
    (setup,) = place.entry.args
    return setup


def test_a_machine_uses_the_runs_folder_if_it_sees_it_and_fetches_otherwise(tmp_path: Path) -> None:
    home, cache = tmp_path / "home", tmp_path / "cache"
    (home / "run").mkdir(parents=True)
    with served(config_in(home)) as (setup, address):

        def workplace_of(one: Setup, cwd: Path = home) -> Workplace:
            return local_workplace(one, cwd, cache, lambda line: None, address, "n1")

        run = replace(setup, folder=home / "run", folder_id="this one")
        publish_run_address(run.folder, address, setup.key, "this one")
        seen = workplace_of(run)
        assert of(seen) == run and (seen.cwd, seen.scratch) == (home, None)
        assert workplace_of(run, home / "gone").cwd == run.folder and not cache.exists()

        def fetches(one: Setup) -> None:
            place = workplace_of(one)
            own = of(place)
            assert own.files == address and own.dataset == cache / setup.dataset.name
            assert own.folder.parent == cache / JOINED and own.folder.name.endswith("-n1")
            assert (place.cwd, place.scratch) == (own.folder, own.scratch)

        fetches(replace(run, folder_id=""))
        fetches(replace(run, dataset=home / "nowhere" / setup.dataset.name))
        publish_run_address(run.folder, address, setup.key, "another run's, of the same name")
        fetches(run)
        (run.folder / "address.json").unlink()
        fetches(run)


def test_a_machine_without_room_for_the_files_reports_why(tmp_path: Path) -> None:
    with served(config_in(tmp_path)) as (setup, address), pytest.raises(UserError) as caught:
        local_workplace(setup, tmp_path, Path("/proc/nowhere"), lambda line: None, address, "n1")
    assert "cannot store the run's files in /proc/nowhere" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("exchange", [{"kind": "strange_kind:Odd"}, {"compress": {"kind": "strange:Odd"}}])
def test_a_machine_imports_modules_only_with_permission(tmp_path: Path, exchange: dict[str, Any], shared: bool) -> None:
    config = config_in(tmp_path, exchange=exchange)
    setup = Setup(config, tmp_path, tmp_path / "data", "127.0.0.1", folder_id="this one" if shared else "")
    with pytest.raises(UserError, match=r"this machine cannot use .*'strange.*:Odd'.*pass --allow-code"):
        local_workplace(setup, tmp_path, tmp_path / "cache", lambda line: None, "127.0.0.1:9", "n1")
    assert not (tmp_path / "cache").exists()
