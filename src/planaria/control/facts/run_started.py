"""The first event of a run: every setting that the controller's decisions depend on."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from planaria.config.fleet_config import Diagnosis
from planaria.config.schema import ExchangeConfig, RecoveryConfig

if TYPE_CHECKING:
    from planaria.recovery.chain import Chain


class Fact(BaseModel):
    """Base of events and decisions: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    interrupts: ClassVar[bool] = False
    """whether this is an order that cancels the current step"""


class ReplicaPosition(Fact):
    """Position of a replica."""

    step: int
    """committed steps"""
    rounds: int = 0
    """settled rounds of its exchange"""
    inner: int = 0
    """steps since the last round"""
    settled_at: list[int] = []
    """its steps when it received the weights of its last rounds, oldest first; empty if they do not matter"""

    @property
    def settled_rounds(self) -> dict[int, int]:
        """Round → the step in ``settled_at``."""
        return dict(enumerate(self.settled_at, self.rounds - len(self.settled_at)))


class RunShape(Fact):
    """Layout of a part of a run."""

    stages: int
    ends_layers: int
    block_layers: list[int] = []
    """layers of each block stage; empty: equal numbers"""
    vocab: int
    replicas: int
    exchange: str
    """kind of the exchange; empty in logs of older versions"""

    @property
    def cut(self) -> str:
        """Return the stages and their layers as text."""
        ends = f", ends_layers = {self.ends_layers}" if self.ends_layers else ""
        layers = f" of {self.block_layers} layers" if self.block_layers else ""
        return f"{self.stages} stage{'s' * (self.stages > 1)}{layers}{ends}"

    def __str__(self) -> str:
        several = f", {self.replicas} replicas ({self.exchange or 'exchange not known'})" if self.replicas > 1 else ""
        return f"{self.cut}{several}"


class Recut(Fact):
    """A part of a run starts from a checkpoint of another shape."""

    checkpoint: str
    was: RunShape
    now: RunShape
    notes: list[str]
    """messages to the user: averaged parts, and parts that restart"""

    def __str__(self) -> str:
        rows = f"; {self.was.vocab} tokens, now {self.now.vocab}" if self.was.vocab != self.now.vocab else ""
        return f"{self.checkpoint}: {self.was}, now {self.now}{rows}"


class Provenance(Fact):
    """Origin of a run, shown in its report; no effect on decisions."""

    version: str
    """versions of planaria, Python and PyTorch"""
    machine: str
    """name, architecture and number of processors of the controller's machine"""
    command: str
    """the command line, without secrets in addresses"""


class SnapshotLabel(Fact):
    """Identity of a snapshot in memory, common to all stages' files."""

    part: str
    """part of the run: ``RunStarted.part``"""
    generation: int
    """generation whose commit completed the snapshot"""
    step: int
    """step at whose start the snapshot was taken"""


class RunStarted(Fact):
    """The controller is up: the settings that its decisions depend on."""

    kind: Literal["run_started"] = "run_started"
    name: str
    part: str = ""
    """random name of this part of the run; empty in logs of older versions"""
    seed: int
    stages: int
    steps: int
    first_step: int
    """steps already committed; positive in a resumed run"""
    first_generation: int = 0
    """last generation of the run that is resumed"""
    samples_per_step: int
    first_sample: int | None = None
    """samples used before ``first_step``, if another number of replicas took part"""
    first_block: int | None = None
    """all blocks of samples before this one are used (a block: one replica's samples of a step); as ``first_sample``"""
    blocks_ahead: list[int] = []
    """used blocks beyond it, of replicas that were ahead"""
    replicas: int = 1
    """replicas at the start that train separately and meet as ``exchange`` configures"""
    nodes_by_replica: list[list[int]] = []
    """nodes of each replica, including ones that may join, in order of stage; empty if node n is stage n"""
    positions: dict[int, ReplicaPosition] = {}
    """replica → position at which it resumes, unless all resume at ``first_step``"""
    exchange: ExchangeConfig = ExchangeConfig()
    wall_time: float
    """seconds since 1970, UTC"""
    provenance: Provenance | None = None
    """None in logs of versions before 0.2"""
    checkpoint_of_stage: dict[int, str] = {}
    """stage → checkpoint folder it starts from; other stages start from the seed's initial weights"""
    snapshot_step: int = -1
    """step of the snapshot in memory from which the nodes in ``snapshot_nodes`` start; -1: none"""
    recalled_from: SnapshotLabel | None = None
    """label of that snapshot"""
    snapshot_nodes: list[int] = []
    """nodes that hold it; the others are rebuilt from these"""
    durable_step: int | None = None
    """step of the checkpoints in ``checkpoint_of_stage``, if it is older than ``first_step``"""
    recut: Recut | None = None
    """reason for a shape different from the previous part's"""
    eval_every: int = 0
    save_every: int = 0
    """initial number of steps between checkpoints"""
    saves: bool = True
    """whether the run writes checkpoints; members of a group save their own models"""
    start_from_first_worker: bool = False
    """whether all start from the weights of the first worker of a stage, since theirs are not drawn from the seed; the
    first step waits for them"""
    reserve_blocks: bool = False
    """whether a commit names the block of the next step, so that its worker begins before that step is ordered"""
    save_in_background: bool = False
    """whether training waits only for copies of the stages, not for their files"""
    spares: int = 0
    local_workers: int | None = None
    """number of workers that local machines can hold, if it differs from the number needed; the others must join"""
    replace: bool = True
    """whether dead workers are replaced"""
    routes: list[list[int]] = []
    """all distinct routes of microbatches in training, over stages; with an arrangement, each microbatch's route over
    its nodes"""
    extra_edges: list[tuple[int, int]] = []
    """stages (low, high) that need an edge besides those on routes: one keeps a copy of the other"""
    arrangement: list[list[int]] = []
    """a schedule's nodes of each stage; empty if node n is stage n"""
    recovery: RecoveryConfig = RecoveryConfig()
    diagnose: Diagnosis = "off"
    """reaction to slow workers and links (``fleet.diagnose``)"""
    stage_work: list[float] = []
    """work of a pass of stages 0..S, in passes of a decoder layer; empty if all block stages have as many layers"""
    relays: dict[str, float] = {}
    """relay → bytes per second; empty: ends connect to each other directly"""
    memory_needs: list[int] = []
    """minimum bytes of a CUDA device for stages 0..S; empty if all have as many layers, and on CPUs"""
    predicted_bytes: list[int] = []
    """predicted peaks of stages 0..S, for reports: of processes on CPUs, of tensors on CUDA devices; empty: unknown"""

    @cached_property
    def chain(self) -> Chain:
        """Recovery strategies in the order in which they are tried."""
        from planaria.recovery import make_chain  # imports torch, which readers of logs do not need

        return make_chain(self.recovery, self.stages)

    def samples_before(self, step: int) -> int:
        """Return the number of samples used before ``step``, which is the number of its first one."""
        first = self.first_step * self.samples_per_step if self.first_sample is None else self.first_sample
        return first + (step - self.first_step) * self.samples_per_step

    @cached_property
    def lockstep_replicas(self) -> int:
        """Number of replicas that train in lockstep with different weights; each is saved separately. 0 otherwise."""
        from planaria.exchange.registry import make_exchange  # imports torch, which readers of logs do not need

        several = self.replicas == 1 and self.exchange.replicas > 1
        return self.exchange.replicas if several and not make_exchange(self.exchange).exchanges_gradients else 0

    @property
    def saved_replicas(self) -> int:
        """Number of replicas that a checkpoint saves separately."""
        return self.lockstep_replicas or self.replicas

    @property
    def coded(self) -> bool:
        """Whether replicas use gradient coding."""
        return bool(self.exchange.coded)

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas at any time."""
        return max(self.replicas, len(self.nodes_by_replica))

    @cached_property
    def own_workers(self) -> int:
        """Workers that the run's own machines have room for: ``local_workers``, or all."""
        return self.all_workers if self.local_workers is None else self.local_workers

    @cached_property
    def all_workers(self) -> int:
        """Workers of the initial replicas, and spares."""
        return sum(len(nodes) for r in range(self.replicas) for nodes in self.nodes(r)) + self.spares

    @property
    def block_samples(self) -> int:
        """Samples of one replica's step."""
        return self.samples_per_step // self.replicas

    def blocks_before(self, step: int) -> int:
        """Return the blocks used before ``step`` if all replicas were present, which is the number of its first one."""
        return self.samples_before(step) // self.block_samples

    @property
    def last_block(self) -> int:
        """Number of blocks, including earlier parts of the run."""
        return self.blocks_before(self.steps)

    @property
    def offset(self) -> int:
        """Offset of all blocks in samples, if earlier parts of the run had steps of another size."""
        return self.samples_before(self.first_step) % self.block_samples

    def first_of(self, block: int) -> int:
        """Return a block's first sample."""
        return self.offset + block * self.block_samples

    @property
    def used(self) -> tuple[int, frozenset[int]]:
        """The blocks used before: all below the first number, and a set beyond."""
        floor = self.blocks_before(self.first_step) if self.first_block is None else self.first_block
        return floor, frozenset(self.blocks_ahead)

    def progress(self, blocks: int) -> int:
        """Return the step in progress after this many used blocks; also the step of the block with this number."""
        return self.first_step + (blocks - self.blocks_before(self.first_step)) // self.replicas

    def position_of(self, replica: int) -> ReplicaPosition:
        """Return the position at which a replica resumes."""
        return self.positions.get(replica, ReplicaPosition(step=self.first_step))

    def nodes(self, replica: int) -> list[list[int]]:
        """Return a replica's nodes of each stage."""
        return self.arrangement or [[node] for node in self._column(replica)]

    def routes_of(self, replica: int) -> list[list[int]]:
        """Return all distinct routes of microbatches in training, over the nodes of a replica."""
        if self.arrangement:
            return self.routes
        column = self._column(replica)
        return [[column[stage] for stage in route] for route in self.routes]

    def pairs_of(self, replica: int) -> list[tuple[int, int]]:
        """Return pairs of a replica's nodes that need an edge besides those on routes."""
        if self.arrangement:
            return self.extra_edges
        column = self._column(replica)
        return [(column[low], column[high]) for low, high in self.extra_edges]

    def _column(self, replica: int) -> list[int]:
        if self.arrangement:
            return [nodes[0] for nodes in self.arrangement]
        return self.nodes_by_replica[replica] if self.nodes_by_replica else list(range(self.stages + 1))

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Node → its stage, in all replicas that may exist."""
        held = [
            (node, stage)
            for r in range(self.max_replicas)
            for stage, nodes in enumerate(self.nodes(r))
            for node in nodes
        ]
        return dict(sorted(held))

    @cached_property
    def replica_of(self) -> dict[int, int]:
        """Node → its replica, of all that may exist."""
        return {node: r for r in range(self.max_replicas) for nodes in self.nodes(r) for node in nodes}
