"""Problems of a cluster are reported in one line that names the fix, before any worker starts."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import planaria
from planaria.common.errors import UserError
from planaria.common.signals import handle_stop_signals
from planaria.config import recipe
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet import cluster_errors
from planaria.runtime.fleet.devices import Device, DeviceNeeds, Inventory
from planaria.runtime.fleet.process_pool import NodeFacts
from support.live.harness import STORE, folder_of, tiny, train


def refused(tmp_path: Path, address: str, **environment: str) -> str:
    """Return the one line with which ``planaria train`` refuses."""
    config = tiny(tmp_path, fleet={"kind": "ray", "address": address})
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.dump(config))
    command = [sys.executable, "-m", "planaria", "train", str(file), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not (folder_of(config) / "workers").exists()
    return done.stderr


@pytest.mark.slow
def test_without_ray_the_package_to_install_is_named(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no Ray here')")
    output = refused(tmp_path, "auto", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert "pip install 'planaria[ray]'" in output and "no Ray here" in output


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    yield port


@pytest.mark.slow
def test_an_address_without_a_cluster_is_refused(tmp_path: Path, closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    assert f"fleet.address = '{address}': no Ray cluster answers there" in refused(tmp_path, address)


def test_rays_signal_handlers_do_not_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's exit the process at once: a run would be stopped without its last step saved."""
    rays = pytest.importorskip("ray")
    from planaria.runtime.fleet import ray as fleet

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    monkeypatch.setattr(fleet, "reach", lambda _: None)
    monkeypatch.setattr(rays, "init", init)
    for address in ("10.0.0.1:6379", "embedded"):
        with handle_stop_signals(ours := lambda *_: None):
            fleet.Cluster(FleetConfig(kind="ray", address=address, host="10.0.0.2"), 2)
            assert signal.getsignal(signal.SIGTERM) is ours


def test_a_client_address_and_rays_own_variable_are_checked_too(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no Ray cluster answers there"):
        cluster_errors.reach(f"ray://127.0.0.1:{closed_port}")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    with pytest.raises(UserError, match=rf"'auto' \(RAY_ADDRESS = '127.0.0.1:{closed_port}'\): no Ray cluster answers"):
        cluster_errors.reach("auto")


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:port", "host:70000", "http://host:80"])
def test_an_invalid_address_is_refused_with_the_valid_forms(address: str) -> None:
    with pytest.raises(UserError, match="use 'auto', 'embedded', HOST:PORT") as reported:
        cluster_errors.reach(address)
    assert repr(address) in str(reported.value)


@pytest.mark.slow
def test_no_cluster_on_this_machine_is_refused(tmp_path: Path) -> None:
    running = subprocess.run(["pgrep", "-f", "gcs_server"], capture_output=True, text=True).stdout
    if running:
        pytest.skip("there is a cluster on this machine")
    assert "no Ray cluster runs on this machine; start one (`ray start --head`)" in refused(tmp_path, "auto")


def test_a_cluster_of_another_version_is_refused_in_one_line() -> None:
    utils = pytest.importorskip("ray._private.utils")
    theirs = {"ray_version": "2.9.0", "python_version": "3.9.1"}
    with pytest.raises(RuntimeError) as mismatch:
        utils.check_version_info(theirs, "this process", raise_on_mismatch=True)
    reported = str(cluster_errors.explain(mismatch.value, "auto"))
    assert (
        "the cluster runs another version of Ray or Python" in reported and "2.9.0" in reported and "\n" not in reported
    )


def test_a_cluster_that_needs_a_token_is_recognised() -> None:
    refusal = ConnectionError("Failed to connect to Ray cluster at 10.0.0.5:6379")
    assert "set RAY_AUTH_MODE=token here too" in str(cluster_errors.explain(refusal, "10.0.0.5:6379"))


def test_an_invalid_node_is_named() -> None:
    with pytest.raises(UserError, match=r"10\.0\.0\.7.* has planaria 0\.0\.1, this process"):
        cluster_errors.require_suitable("10.0.0.7 (abc)", NodeFacts("0.0.1"))
    cluster_errors.require_suitable("10.0.0.7 (abc)", NodeFacts(planaria.__version__))


def test_a_node_whose_devices_are_too_small_is_named() -> None:
    mine = NodeFacts(planaria.__version__, Inventory((Device("GPU-0", 80 * 10**9), Device("GPU-1", 8 * 10**9))))
    cluster_errors.require_suitable("10.0.0.7 (abc)", mine, DeviceNeeds((8 * 10**9, 10**9)))
    with pytest.raises(
        UserError, match=r"Ray node 10\.0\.0\.7.* has 8\.0 GB on device GPU-1, and a worker may need 9\.0"
    ):
        cluster_errors.require_suitable("10.0.0.7 (abc)", mine, DeviceNeeds((9 * 10**9, 10**9)))


def test_missing_resources_are_counted() -> None:
    reported = cluster_errors.no_room(6, {"CPU": 2, "GPU": 0.5}, {"CPU": 16.0}, {"CPU": 3.0})
    assert "has 16 CPUs, 3 of them free, 0 GPUs, 0 of them free; this run needs 12 CPUs and 3 GPUs" in reported
    assert "fleet.gpu_share" in reported and "fleet.gpu_share" not in cluster_errors.no_room(6, {"CPU": 1}, {}, {})


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_node")
def test_a_cluster_whose_gpus_cannot_be_used_is_refused(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch might use them")
    with pytest.raises(UserError, match=r"^train.device = 'cuda': Ray node .* has no CUDA device \(its torch is built"):
        train(tiny(tmp_path, stages=1, fleet={"spares": 0}, train={"device": "cuda"}))


@pytest.mark.slow
@pytest.mark.usefixtures("on_ray")
def test_a_cluster_without_room_for_all_workers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.runtime.fleet.ray._ROOM_S", 1)
    with pytest.raises(
        UserError, match=r"has \d+ CPUs, \d+ of them free; this run needs 35 CPUs, the same for each stage and"
    ):
        train(tiny(tmp_path, fleet={"spares": 30}))


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["absent", "old"])
def test_a_node_without_this_planaria_is_named_before_a_worker_starts(tmp_path: Path, on_ray: Any, broken: str) -> None:
    """Its Python finds another package of this name first."""
    other = tmp_path / "other" / "planaria"
    if broken == "absent":
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'planaria'\")")
    else:
        shutil.copytree(Path(planaria.__file__).parent, other)
        (other / "__init__.py").write_text('__version__ = "0.0.1"')
    node = on_ray.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(other.parent)}, **STORE)
    says = {"absent": "cannot import planaria", "old": "has planaria 0.0.1, this process"}[broken]
    try:
        with pytest.raises(UserError, match=rf"Ray node .*{node.node_id[:8]}.* {says}") as reported:
            train(tiny(tmp_path))
        assert "\n" not in str(reported.value)
    finally:
        on_ray.remove_node(node, allow_graceful=False)
    assert not (folder_of(tiny(tmp_path)) / "workers").exists()
