"""Which nodes the microbatches of a step visit, as the run's recipe and log say."""

from __future__ import annotations

from planaria.config.schema import RunConfig
from planaria.control.decisions import RunStep
from planaria.pipeline.routing import ROUTINGS, change, routes, without
from planaria.report.membership import Membership


class Ways:
    """Finds each microbatch's route over nodes; ``members`` tells which nodes there are."""

    def __init__(self, config: RunConfig, members: Membership) -> None:
        self._config, self._members = config, members
        self._shipped = config.routing.kind in ROUTINGS.shipped
        self._fixed = routes(config, 0) if self._shipped and not change(config) else None
        """over stages, where they are the same in every step"""

    def of(self, run: RunStep) -> list[list[int]]:
        """A route for each microbatch of the step, from its first node and back to it.

        A routing from outside planaria is not asked, for a log must not choose what is imported; nor is the recipe
        where an earlier part of the run had another number of stages. Then all different routes that the log names
        stand for those of the step.
        """
        started, config = self._members.started, self._config
        if started is None:
            return []
        column = self._column(run.replica)
        known = self._shipped and config.pipeline.stages == started.stages
        if started.arrangement or not known or run.mode == "evaluate":
            own = started.routes_of(run.replica) if run.mode == "train" or started.arrangement else []
            return own or [column + column[:1]]
        gone = {stage for stage, node in enumerate(column) if node not in self._members.holders} - {0}
        there = gone if len(gone) < len(column) - 1 and self._members.holders else set()
        return [[column[stage] for stage in way] for way in without(self._fixed or routes(config, run.step), there)]

    def _column(self, replica: int) -> list[int]:
        started = self._members.started
        assert started is not None
        return [nodes[0] for nodes in started.nodes(replica)]
