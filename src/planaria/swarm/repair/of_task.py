"""The repair of a peer: texts, judge and exam come from the task that its swarm learned."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.common.errors import UserError
from planaria.swarm.attacks import watched
from planaria.swarm.config import SwarmConfig
from planaria.swarm.repair.exams import TaskExam
from planaria.swarm.repair.judged import Asking, Reviewer, texts_of
from planaria.swarm.repair.models import Models
from planaria.swarm.repair.training import Plan
from planaria.swarm.repair.ways import Case
from planaria.swarm.tasks.base import Task


def case_of(config: SwarmConfig, task: Task, models: Models, watch: Sequence[str], plan: Plan) -> Case:
    """A peer of this configuration, to be repaired of the attacks that ``watch`` names.

    :raises UserError: when nobody watches for anything, nobody can judge, or the judge passes no text.
    """
    if not watch:
        raise UserError("the run watches for no attack (evaluate.watch); say what the repair is for, as --watch text")
    asking = Asking(task, [watched(kind, config.evaluate.phrases) for kind in watch], plan.seed)
    reviewer = Reviewer(config, task, models.tuned)
    texts = texts_of(reviewer, asking, models.tuned, models.safe)
    return Case(models, texts, plan, TaskExam(config, reviewer, asking.choosing, watch))
