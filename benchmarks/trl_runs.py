"""One run of each side of ``benchmarks.trl``: what it is told, the processor time it takes, the models it leaves."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import ROOT, RUNS

if TYPE_CHECKING:
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy

NAME = "trl"
FOUR, ALONE, TRL = "four peers", "one peer alone", "TRL"
SIDES = {FOUR: 4, ALONE: 1, TRL: 0}
"""side → its peers"""
CHECKS = "claims, support, surprisal, duplicates"
"""no judge, who would see false steps that TRL's reward does not"""
LIMIT_S = 1800
ENTRY = (
    "import json, sys; sys.path[:0] = sys.argv[1:3]; "
    "from benchmarks.trl_trainer import main; main(json.loads(sys.argv[3]))"
)


@dataclass(frozen=True)
class Job:
    """One training run; what TRL's process is told."""

    folder: str
    start: str
    problems: list[int]
    """of all updates, in their order"""
    rounds: int
    prompts: int
    group: int
    every: int
    """updates between models that are saved"""
    max_new: int
    top_k: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Ran:
    """What came of it."""

    curve: list[float]
    """held-out accuracy before the first update, and after every so many"""
    seconds: float
    """processor time of all processes"""


def recipe(given: argparse.Namespace, peers: int, rounds: int, lr: float, seed: int, **policy: Any) -> SwarmConfig:
    from planaria.swarm.config import SwarmConfig

    return SwarmConfig.model_validate(
        {
            "name": NAME,
            "size": peers,
            "seed": seed,
            "policy": policy,
            "school": {"steps": given.school},
            "rounds": {
                "count": rounds,
                "prompts": given.prompts,
                "group": given.group,
                "keep": given.every,
                "kept": rounds,
                "timeout_s": 600,
            },
            "optim": {"lr": lr},
            "evaluate": {"every": 0, "problems": 1},
            "defence": {"checks": CHECKS},
        }
    )


def started(given: argparse.Namespace) -> Path:
    """The folder of the model that all sides begin with."""
    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.policy.policies import LlamaPolicy

    config = recipe(given, 1, 1, 1e-3, 0)
    policy = policy_of(config, task_of(config), print)
    assert isinstance(policy, LlamaPolicy)
    shutil.rmtree(folder := RUNS / NAME / "start", ignore_errors=True)
    policy.export(folder)
    return folder


def ran(given: argparse.Namespace, side: str, begun: Path, rounds: int, lr: float, seed: int) -> Ran:
    """One run of one side, and its models' examinations, which are not in its time."""
    shutil.rmtree(folder := RUNS / NAME / f"{side.replace(' ', '-')}-{seed}-{lr:g}", ignore_errors=True)
    folder.mkdir(parents=True)
    peers = SIDES[side]
    config = recipe(given, max(1, peers), rounds, lr, seed, kind="pretrained", options={"path": str(begun)})
    seconds = swarm(config, folder) if peers else trainer(given, config, folder)
    looks = range(given.every, rounds + 1, given.every)
    models = (_of_peer(folder / "run", number) if peers else _of_trl(folder, begun, number) for number in looks)
    curve = [examined(config, _opened(begun)), *(examined(config, model) for model in models)]
    print(f"{side}, seed {seed}, rate {lr:g}: {' '.join(f'{x:.3f}' for x in curve)}; {seconds:.2f} s", flush=True)
    return Ran(curve, seconds)


def swarm(config: SwarmConfig, folder: Path) -> float:
    """Processor seconds of a swarm whose run is ``folder``/run."""
    from planaria.config.recipe import dump

    file = folder / "recipe.toml"
    file.write_text(dump(config.model_copy(update={"name": "run", "out": str(folder)})))
    return metered([sys.executable, "-m", "planaria", "swarm", str(file)], folder / "out.txt")


def trainer(given: argparse.Namespace, config: SwarmConfig, folder: Path) -> float:
    """Processor seconds of TRL's trainer, which is told what the recipe says."""
    from planaria.swarm.assemble import task_of
    from planaria.swarm.draws import shared_problems

    rounds, training = config.rounds, task_of(config).training
    drawn = (shared_problems(config.seed, number, training, rounds.prompts) for number in range(rounds.count))
    job = Job(
        folder=str(folder),
        start=str(config.policy.options["path"]),
        problems=list(itertools.chain.from_iterable(drawn)),
        rounds=rounds.count,
        prompts=rounds.prompts,
        group=rounds.group,
        every=given.every,
        max_new=config.sampling.max_new,
        top_k=config.sampling.support(config.policy.model.vocab),
        lr=config.optim.lr,
        seed=config.seed,
    )
    # Isolated, so that this folder's trl.py does not stand before the library.
    command = [str(given.python), "-I", "-c", ENTRY, str(ROOT / "src"), str(ROOT), json.dumps(asdict(job))]
    return metered(command, folder / "out.txt")


def metered(command: Sequence[str], out: Path) -> float:
    """Processor seconds of a command and of all that it bore, orphans included; what it prints goes to ``out``.

    :raises RunStopped: when it fails, takes too long, or leaves a process behind that does not end.
    """
    from planaria.common.errors import RunStopped
    from planaria.runtime.fleet.process import adopting

    before, others = used(), children()
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with adopting(), out.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **quiet})
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RunStopped(f"{command[0]}: not done after {LIMIT_S} s; what it said is in {out}") from None
        finally:
            process.terminate()  # a swarm then ends its peers too
            buried = bury(others)
    if code or not buried:
        how = f"ended with {code}" if code else "left a process that does not end"
        raise RunStopped(f"{command[0]}: {how}; what it said is in {out}")
    return used() - before


def bury(others: frozenset[int], patience_s: float = 10.0) -> bool:
    """Wait for all children but ``others``, or their time would not be counted; whether none of them is left."""
    until = time.monotonic() + patience_s
    while left := children() - others:
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def children() -> frozenset[int]:
    """Process ids of this process's children, of those that have ended but were not waited for too."""
    lists = Path("/proc/self/task").glob("*/children")
    return frozenset(int(pid) for file in lists for pid in file.read_text().split())


def used() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


# Examining


def examined(config: SwarmConfig, policy: Policy) -> float:
    """Share of all held-out sums that are solved, one draw each; the same draws for all sides of a seed."""
    from planaria.swarm.assemble import task_of
    from planaria.swarm.evaluation import Examiner

    task = task_of(config)
    asked = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"problems": task.held_out})})
    return Examiner(task, asked, "p0").examine(policy).accuracy.rate or 0.0


def _opened(folder: Path) -> Policy:
    from planaria.swarm.policy.policies import open_policy

    return open_policy(str(folder))


def _of_peer(run: Path, number: int) -> Policy:
    from planaria.swarm.learned import learned

    return learned(run, "p0", number).policy


def _of_trl(folder: Path, begun: Path, number: int) -> Policy:
    saved = folder / f"checkpoint-{number}"
    for name in ("tokenizer.json", "generation_config.json"):  # its own are the same, written by another version
        shutil.copyfile(begun / name, saved / name)
    return _opened(saved)
