"""The files in deploy/ have the fields that clusters know, and refer only to what exists. No cluster is started."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import Any

import pytest

from support.clusters import DEPLOY, ROOT, kubernetes, pod, read, skypilot

POD: dict[str, Any] = {
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "automountServiceAccountToken": bool,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "runAsGroup": int, "fsGroup": int},
    "nodeSelector": dict,
    "tolerations": [{"key": str, "operator": str, "effect": str}],
    "topologySpreadConstraints": [
        {"maxSkew": int, "topologyKey": str, "whenUnsatisfiable": str, "labelSelector": {"matchLabels": dict}}
    ],
    "containers": [{
        "name": str, "image": str, "command": [str], "args": [str],
        "ports": [{"name": str, "containerPort": int}],
        "readinessProbe": {
            "httpGet": {"path": str, "port": str, "httpHeaders": [{"name": str, "value": str}]},
            "periodSeconds": int, "timeoutSeconds": int,
        },
        "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
        "resources": {"requests": dict, "limits": dict},
        "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
    }],
    "volumes": [{
        "name": str, "secret": {"secretName": str, "defaultMode": int},
        "persistentVolumeClaim": {"claimName": str}, "emptyDir": dict,
    }],
}  # fmt: skip
"""fields of Kubernetes 1.31 that are used here, and their types"""
SPECS: dict[str, Any] = {
    "Service": {
        "clusterIP": str, "publishNotReadyAddresses": bool, "selector": dict, "ports": [{"name": str, "port": int}],
    },
    "PersistentVolumeClaim": {"accessModes": [str], "resources": {"requests": dict}},
    "Job": {
        "parallelism": int, "backoffLimit": int,
        "podFailurePolicy": {"rules": [{"action": str, "onPodConditions": [{"type": str}]}]},
        "template": {"metadata": {"labels": dict}, "spec": POD},
    },
}  # fmt: skip
VERSIONS = {"Service": "v1", "PersistentVolumeClaim": "v1", "Job": "batch/v1"}
TASK: dict[str, Any] = {
    "name": str, "num_nodes": int, "workdir": str, "setup": str, "run": str, "envs": dict, "secrets": dict,
    "resources": {"cpus": str, "use_spot": bool, "job_recovery": {"max_restarts_on_errors": int}},
}  # fmt: skip
"""fields of a task of SkyPilot that are used here, and their types"""


def unknown(found: Any, known: Any, place: str = "") -> list[str]:
    """Return the places that do not have the known shape."""
    if isinstance(known, dict) and isinstance(found, dict):
        places = {name: f"{place}.{name}" for name in found}
        return [p for n in found for p in (unknown(found[n], known[n], places[n]) if n in known else [places[n]])]
    if isinstance(known, list) and isinstance(found, list):
        return [p for i, item in enumerate(found) for p in unknown(item, known[0], f"{place}[{i}]")]
    right = isinstance(known, type) and isinstance(found, known) and isinstance(found, bool) == (known is bool)
    return [] if right else [place]


def test_an_invalid_field_is_found() -> None:
    assert unknown({"restartpolicy": "Never", "volumes": [{"name": 3}]}, POD) == [".restartpolicy", ".volumes[0].name"]
    assert unknown({"terminationGracePeriodSeconds": True}, POD) == [".terminationGracePeriodSeconds"]


def test_kubernetes_knows_the_fields() -> None:
    for found in kubernetes():
        assert found.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert found["apiVersion"] == VERSIONS[found["kind"]]
        assert found["metadata"].keys() == {"name"} and re.fullmatch("[a-z][a-z-]*", found["metadata"]["name"])
        assert unknown(found["spec"], SPECS[found["kind"]]) == []


@pytest.mark.parametrize("part", ["controller", "machine"])
def test_a_pod_may_do_no_more_than_it_needs(part: str) -> None:
    spec = pod(part)
    (container,) = spec["containers"]
    user = re.search(r"^USER (\d+)$", read("Dockerfile"), re.MULTILINE)
    assert user is not None and spec["securityContext"]["runAsUser"] == int(user[1]) > 0
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    (key,) = (volume["secret"] for volume in spec["volumes"] if "secret" in volume)
    assert key["defaultMode"] & 0o007 == 0
    assert spec["restartPolicy"] == "Never", "a podFailurePolicy asks for it"
    assert spec["terminationGracePeriodSeconds"] >= 120


def test_the_objects_of_kubernetes_refer_to_each_other() -> None:
    service, claim, *jobs = kubernetes()
    controller, machines = (job["spec"]["template"] for job in jobs)
    selected = service["spec"]["selector"].items()
    leads, joins = (found["metadata"]["labels"].items() for found in (controller, machines))
    assert selected <= leads and not selected <= joins
    volumes = {volume["name"]: volume for volume in controller["spec"]["volumes"]}
    assert volumes["work"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (port, live), (container,) = service["spec"]["ports"], controller["spec"]["containers"]
    assert container["ports"] == [{"name": p["name"], "containerPort": p["port"]} for p in (port, live)]
    assert f"--fleet.port {port['port']} " in container["args"][0]
    assert f"--fleet.advertise {service['metadata']['name']} " in container["args"][0]
    page = f"{service['metadata']['name']}:{live['port']}"
    assert f"--live-at 0.0.0.0:{live['port']} --live-name {page} " in container["args"][0]
    probe = container["readinessProbe"]["httpGet"]
    assert probe["port"] == live["name"] and probe["httpHeaders"] == [{"name": "Host", "value": page}]
    assert service["spec"]["publishNotReadyAddresses"], "machines call before the run has begun"
    (joining,) = machines["spec"]["containers"][0]["args"]
    assert f"planaria join {service['metadata']['name']}:{port['port']} " in joining


def test_only_machines_run_on_spot_nodes() -> None:
    controller, machine = pod("controller"), pod("machine")
    assert "tolerations" not in controller and "nodeSelector" not in controller
    assert machine["tolerations"] and machine["nodeSelector"]
    _, _, lead, join = kubernetes()
    assert "parallelism" not in lead["spec"] and join["spec"]["parallelism"] > 1
    assert "completions" not in join["spec"], "after one success no other may be replaced"


def test_skypilot_knows_the_fields() -> None:
    task = skypilot()
    assert unknown(task, TASK) == []
    assert task["resources"]["use_spot"] is True and task["num_nodes"] > 1
    assert all(value is None or isinstance(value, str) for value in {**task["envs"], **task["secrets"]}.values())
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]*)", task["run"])) - {"HOME", "PATH"}
    assert used == {*task["envs"], *task["secrets"], "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"}
    extras = re.findall(r"'\.\[(\w+)\]'", task["setup"])
    assert extras and set(extras) <= extras_known()


def scripts() -> dict[str, str]:
    task = skypilot()
    pods = {part: pod(part)["containers"][0]["args"][0] for part in ("controller", "machine")}
    (inner,) = re.findall(r"^join='([^']*)'$", read("slurm.sh"), re.MULTILINE)
    return {"setup": task["setup"], "run": task["run"], "slurm": read("slurm.sh"), "slurm join": inner, **pods}


@pytest.mark.parametrize("name", sorted(scripts()))
def test_bash_parses_every_script(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=scripts()[name], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_requests_its_resources() -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", read("slurm.sh"), re.MULTILINE))
    assert options.keys() == {
        "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "requeue", "no-kill", "open-mode", "signal",
    }  # fmt: skip
    assert options["ntasks-per-node"] == "1" and options["signal"].startswith("B:USR1@")
    assert (DEPLOY / "slurm.sh").stat().st_mode & 0o111


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def extras_known() -> set[str]:
    return set(project()["project"]["optional-dependencies"])


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their words."""
    return [tuple(line.split(" ", 1)) for line in read("Dockerfile").splitlines() if line and line[0] not in "# "]


def test_the_image_copies_only_files_in_its_build_context() -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line.removeprefix("!") for line in sent if line.startswith("!")}
    copied = [words.split()[:-1] for name, words in instructions() if name == "COPY" and not words.startswith("--from")]
    assert "*" in sent and {file for files in copied for file in files} == let_through
    assert all((ROOT / file).exists() for file in let_through)
    packages = project()["tool"]["setuptools"]["packages"]["find"]["where"]
    assert {project()["project"]["readme"], *packages} <= let_through


def test_the_image_installs_the_tested_versions_and_runs_as_a_plain_user() -> None:
    found = instructions()
    installs = [words for name, words in found if name == "RUN" and "pip install" in words]
    assert len(installs) == 2 and all("-c constraints.txt" in words and "--no-cache-dir" in words for words in installs)
    arguments = dict(words.split("=") for name, words in found if name == "ARG")
    assert arguments["TORCH_INDEX"] == "" and set(arguments["EXTRAS"].split(",")) <= extras_known()
    names = [name for name, _ in found]
    assert names[-4:] == ["USER", "WORKDIR", "ENTRYPOINT", "CMD"] and names.count("FROM") == 2
    last = dict(found)
    assert last["ENTRYPOINT"] == '["planaria"]' and "planaria" in project()["project"]["scripts"]
    assert f"useradd --uid {last['USER']} " in read("Dockerfile")
