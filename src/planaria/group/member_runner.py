"""A member's model in the worker's terms: the stage that its owner's loop computes, and the steps of that loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from planaria.common.errors import UserError
from planaria.common.tensors import all_finite
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts.events import Span
from planaria.group.member_state import MemberState
from planaria.models.group_family import group_family
from planaria.models.state import StageState
from planaria.pipeline.plan.actions import StepPlan
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.plan_execution import combine_gradients
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import Injected, StepData


class MemberRunner(StageRunner):
    """The only stage of a member: its owner computes the gradient, and planaria applies it.

    In a step of a shared gradient a member may compute several blocks; their gradients are added up here.
    """

    def __init__(self, config: RunConfig, owned: MemberState, sums_gradients: bool) -> None:
        """:param sums_gradients: whether members share one gradient per step, of ``exchange.replicas`` blocks."""
        self.config = config
        self.stage = 0
        self.owned = owned
        self.module, self.parameters = owned.model, owned.parameters
        self.reported: float | None = None
        """loss of the current step, if the owner reported it"""
        self.progress = 0
        """updates so far, counted over all members"""
        self.steps = 0
        """committed steps of this process"""
        self.computed = set[int]()
        """blocks of the current step whose gradients the parameters, or the sum, have"""
        self._updates = True
        self._sums_gradients = sums_gradients
        self._sum = dict[str, Tensor]()

    def take_gradient(self, block: int, updates: bool) -> None:
        """Take the gradient of a block from the parameters; without ``updates`` the owner made no step with it."""
        self.computed.add(block)
        self._updates = updates
        for name, parameter in self.parameters.items() if self._sums_gradients and updates else ():
            if parameter.grad is not None:
                total = self._sum.get(name)
                self._sum[name] = parameter.grad.clone() if total is None else total.add_(parameter.grad)

    def scale_gradient(self, blocks: int, members: int) -> None:
        """Set the gradient so that its mean over ``members`` is the mean over the step's ``blocks``."""
        for name, parameter in self.parameters.items() if self._sums_gradients else ():
            total = self._sum.get(name)
            parameter.grad = None if total is None else total * (members / blocks)

    @property
    def loss(self) -> float | None:
        return self.reported

    def clip(self) -> None:
        """Do nothing: the owner clips."""

    def rescale_for_skips(self) -> None:
        """Do nothing: the owner's gradient is that of the whole block."""

    def finish(self) -> float | None:
        """Return None: the norm of the gradient is not computed, since that would wait for a GPU."""
        return None

    def commit(self, step: int) -> None:
        """Let the owner's optimizer apply the gradient."""
        if self._updates or self._sums_gradients:
            self.owned.step()
        self.forget()
        self.reported = None
        self.steps = self.steps + 1
        self.progress = step + 1

    def drop(self) -> None:
        """Keep the gradient: a step that is repeated has the same samples and weights."""

    def forget(self) -> None:
        """Discard the gradients of the current step."""
        self.computed.clear()
        self._sum.clear()

    def state(self) -> StageState:
        return StageState(self.owned.weights())

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.require_fit(weights)
        self.owned.set_weights(weights)
        self.forget()  # a gradient that was computed ahead is of other weights

    def whole_state(self) -> StageState:
        return StageState(self.owned.weights(), extra=self.owned.extra_state())

    def load(self, state: StageState) -> None:
        """Take the state of another member.

        :raises UserError: if it does not fit the model, or is not finite.
        """
        for name, tensor in state.weights.items():
            if not all_finite(tensor):
                raise UserError(f"the state of another member: {name!r} is not finite")
        try:
            self.set_weights(state.weights)
        except ValueError as error:
            raise UserError(f"the state of another member: {error}; use the same model at all members") from None
        self.owned.load_extra_state(state.extra)
        self.forget()

    def release(self) -> None:
        """Do nothing: the model is its owner's."""


class OwnerLoopSteps:
    """Steps that the owner computes: :class:`planaria.runtime.worker.step_work.OwnLoop`."""

    rounds = 1

    def __init__(self, runner: MemberRunner, resolved: ResolvedRun, compute: Callable[[Sequence[int]], None]) -> None:
        """:param compute: lets the owner compute these blocks, and returns when it has computed something or leaves."""
        self._runner = runner
        self._compute = compute
        self._step = 0
        self._in_step = resolved.replicas_per_plan
        self._blocks = group_family(resolved.config.model).blocks

    def make_runner(self, config: RunConfig, stage: int, initialise: bool) -> StageRunner:
        return self._runner

    def plan(self, step: int, number: int) -> StepPlan:
        """Return an empty plan: planaria executes no passes."""
        return StepPlan(routes=(), slots={}, actions={})

    def samples_of(self, order: d.RunStep, stage: int, injected: Injected | None = None) -> StepData:
        """Return no samples: the owner reads them."""
        self._step = order.block
        return StepData(None, None, first_sample=order.block)

    def compute_ahead(self, block: int) -> None:
        self._compute([block])

    def run(
        self,
        messages: PeerMessages,
        runner: StageRunner,
        data: StepData,
        spans: list[Span],
        begun: Callable[[int], None],
    ) -> None:
        """Wait for the owner's gradients, and exchange them if the exchange is of gradients."""
        first = self._step * self._in_step
        blocks = range(first, min(first + self._in_step, self._blocks))
        number = messages.assignment.number
        assigned = [first + index for index in shares(self._in_step, messages.assignment.absent)[number]]
        wanted = [block for block in assigned if block in blocks]
        if not self._runner.computed <= set(wanted):  # of another step
            self._runner.forget()
        while missing := [block for block in wanted if block not in self._runner.computed]:
            messages.handle_pending()  # an order may interrupt this step
            self._compute(missing)
        self._runner.scale_gradient(len(blocks), len(messages.assignment.present.peers(messages.assignment.node)))
        combine_gradients(self._runner.config, messages, runner, spans)


def shares(blocks: int, absent: Collection[int]) -> dict[int, list[int]]:
    """Return the blocks of each member of a step: its own, and in turn those of ``absent`` members.

    Members are numbered from 0; with one block in a step, each member makes its own steps.
    """
    if blocks == 1:
        return defaultdict(lambda: [0])
    blocks_of = {member: [member] for member in range(blocks) if member not in absent}
    order = sorted(blocks_of)
    for index, member in enumerate(sorted(set(range(blocks)) - blocks_of.keys())):
        blocks_of[order[index % len(order)]].append(member)
    return blocks_of
