"""The repairs of a drill: a poisoned peer of every attacked arm, repaired in every way; kept, and not made twice."""

from __future__ import annotations

from pathlib import Path

import torch

from planaria.lab.trials.identity import identity
from planaria.lab.trials.kept import Kept
from planaria.swarm.assemble import own_classes
from planaria.swarm.config import SwarmConfig
from planaria.swarm.learned import learned_by, trusted
from planaria.swarm.repair import ways
from planaria.swarm.repair.models import Models
from planaria.swarm.repair.of_task import case_of
from planaria.swarm.repair.results import Repaired
from planaria.swarm.repair.training import Plan
from planaria.swarm.setting import names, of_peer

FILE = "repaired.json"
LIMIT = 0.02
"""the largest success of a model that counts as mended"""


def repaired(config: SwarmConfig, folder: Path, arm: str) -> Repaired | None:
    """The first honest peer of the run in ``folder``, which ran with ``config``, in all ways; None if nobody attacked.

    It is repaired of what its attackers teach: a drill knows. Every peer that is honest learned the same.
    """
    own = {name: of_peer(config, name) for name in names(config)}
    kinds = sorted({one.attack.kind for one in own.values() if one.attack.kind != "none" and one.attack.dose})
    honest = next((name for name, one in own.items() if one.attack.kind == "none"), None)
    watch = [kind for kind in kinds if kind in config.evaluate.watch]
    if not watch or honest is None:
        return None
    peer = own[honest]
    asked = {"repair": 1, "config": config.model_dump(mode="json", exclude={"out"}), "limit": LIMIT}
    kept = Kept(folder / FILE, Repaired, identity(asked, own_classes(peer)))
    found, _ = kept.read()
    if found is None:
        found = _repaired(peer, folder, honest, arm, watch)
        kept.write(found)
    return found


def _repaired(config: SwarmConfig, folder: Path, name: str, arm: str, watch: list[str]) -> Repaired:
    torch.set_num_threads(config.policy.threads)
    poisoned, before = learned_by(config, folder, name), trusted(config, folder, name)
    models = Models(before.policy, poisoned.policy)
    case = case_of(config, poisoned.task, models, watch, Plan(seed=config.seed))
    return Repaired(
        arm=arm,
        seed=config.seed,
        peer=name,
        limit=LIMIT,
        trusted=len(case.texts.trusted),
        own=case.texts.own,
        benign=len(case.texts.benign),
        before=case.exam.measure(models.tuned),
        ways=ways.compared(case),
    )
