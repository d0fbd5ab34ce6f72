"""The recipes for Ray clusters parse, and refer only to what exists. No cluster is started."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.runtime.resolved_run import ResolvedRun

yaml = pytest.importorskip("yaml")
ray_constants = pytest.importorskip("ray._private.ray_constants")

ROOT = Path(__file__).parents[2]
FILES = {name: (ROOT / "deploy" / name).read_text() for name in ("kuberay.yaml", "spot.yaml")}
KUBERAY: Any = yaml.safe_load(FILES["kuberay.yaml"])
SPOT: Any = yaml.safe_load(FILES["spot.yaml"])


def trained(file: str) -> RunConfig:
    """Return the run that a file's ``planaria train`` command starts, from a shipped recipe."""
    text = re.sub(r"\n\s*#?\s*", " ", FILES[file])
    found = re.search(r"planaria train (\w+)((?: --[\w.]+(?: [^-\s'][^\s']*)?)*)", text)
    words = shlex.split(re.sub(r"--quiet|--resume auto", "", found[2]))
    flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    return recipe.load(shipped.find(found[1]), flags)


def own_workers(config: RunConfig) -> int:
    return len(ResolvedRun(config).arrangement.stage) + config.fleet.spares


@pytest.mark.parametrize("file", sorted(FILES))
def test_planaria_accepts_the_command(file: str) -> None:
    config = trained(file)
    assert (config.fleet.kind, config.fleet.address) == ("ray", "auto")
    assert config.out.startswith("/shared/") and config.data.cache.startswith("/shared/")


def test_a_second_attempt_resumes_the_run() -> None:
    assert "--resume auto" in KUBERAY["spec"]["entrypoint"]


def test_the_initial_nodes_have_room_for_the_workers() -> None:
    (group,) = KUBERAY["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["minReplicas"] * int(container["resources"]["requests"]["cpu"]) >= own_workers(trained("kuberay.yaml"))
    spot = SPOT["available_node_types"]["spot"]
    assert spot["min_workers"] * spot["resources"]["CPU"] >= own_workers(trained("spot.yaml"))
    assert spot["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}


def test_the_head_has_no_worker_and_listens_at_rays_ports() -> None:
    head = KUBERAY["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    (container,) = head["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["gcs"] == ray_constants.DEFAULT_PORT
    assert ports["dashboard"] == ray_constants.DEFAULT_DASHBOARD_PORT
    assert SPOT["available_node_types"][SPOT["head_node_type"]]["resources"] == {"CPU": 0}


def test_the_version_of_ray_is_the_tested_one() -> None:
    (tried,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert KUBERAY["spec"]["rayClusterSpec"]["rayVersion"] == tried
    assert any(f"=={tried}'" in command for command in SPOT["setup_commands"])


@pytest.mark.parametrize("file", sorted(FILES))
def test_settings_of_ray_equal_those_of_the_embedded_ray(file: str) -> None:
    ours = pytest.importorskip("planaria.runtime.fleet.ray").SETTINGS
    named = dict(re.findall(r"RAY_([a-z_]+)(?:, value: \"|=)(\d+)", FILES[file]))
    assert named == {key: str(value) for key, value in ours.items()}


def test_the_file_of_the_cluster_launcher_passes_its_schema() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    util.validate_config(util.prepare_config(dict(SPOT)))


def test_every_flag_of_ray_start_exists() -> None:
    start = pytest.importorskip("ray.scripts.scripts").start
    known = {name for parameter in start.params for name in parameter.opts}
    commands = " ".join(SPOT["head_start_ray_commands"] + SPOT["worker_start_ray_commands"])
    given = set(re.findall(r"(--[a-z-]+)", commands))
    given |= {f"--{name}" for name in KUBERAY["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]}
    assert given and given <= known
