"""The first fact of a run: every setting that the controller's decisions depend on."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from planaria.config.schema import ExchangeConfig, RecoveryConfig

if TYPE_CHECKING:
    from planaria.control.memory import Memory
    from planaria.recovery.chain import Chain


class Fact(BaseModel):
    """Base of events and decisions: immutable, and nothing unknown in them."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    interrupts: ClassVar[bool] = False
    """whether this is an order that cancels the current step"""


class Standing(Fact):
    """How far a replica has come."""

    step: int
    """steps it has committed"""
    rounds: int = 0
    """of its exchange that are settled"""
    inner: int = 0
    """steps since the last of them"""


class Shape(Fact):
    """How a part of a run is spread."""

    stages: int
    ends_layers: int
    block_layers: list[int] = []
    """of each block stage; empty: equally many"""
    vocab: int
    replicas: int
    exchange: str
    """the kind, empty where an older planaria did not write it down"""

    @property
    def cut(self) -> str:
        """Stages and their layers, in words."""
        ends = f", ends_layers = {self.ends_layers}" if self.ends_layers else ""
        layers = f" of {self.block_layers} layers" if self.block_layers else ""
        return f"{self.stages} stage{'s' * (self.stages > 1)}{layers}{ends}"

    def __str__(self) -> str:
        several = f", {self.replicas} replicas ({self.exchange or 'exchange not known'})" if self.replicas > 1 else ""
        return f"{self.cut}{several}"


class Recut(Fact):
    """A part of a run begins from a checkpoint of another shape."""

    checkpoint: str
    was: Shape
    now: Shape
    said: list[str]
    """to the user who resumed it: what was averaged, what begins anew"""

    def __str__(self) -> str:
        rows = f"; {self.was.vocab} tokens, now {self.now.vocab}" if self.was.vocab != self.now.vocab else ""
        return f"{self.checkpoint}: {self.was}, now {self.now}{rows}"


class Provenance(Fact):
    """What started a run: shown in its report, and without effect on any decision."""

    version: str
    """of planaria, Python and PyTorch"""
    machine: str
    """name, architecture and number of processors of the controller's machine"""
    command: str
    """the command line, without the secrets of addresses"""


class SnapshotLabel(Fact):
    """Which snapshot in memory: all stages' files of one snapshot have the same label."""

    part: str
    """of the run: ``RunStarted.part``"""
    generation: int
    """whose commit completed the snapshot"""
    step: int
    """whose beginning it holds"""


class RunStarted(Fact):
    """The controller is up: everything of the configuration that its decisions depend on."""

    kind: Literal["run_started"] = "run_started"
    name: str
    part: str = ""
    """random name of this part of the run; empty in logs of older versions"""
    seed: int
    stages: int
    steps: int
    first_step: int
    """steps that are committed already, > 0 when an earlier run is resumed"""
    first_generation: int = 0
    """the last generation of the run that is resumed"""
    samples_per_step: int
    first_sample: int | None = None
    """samples used before ``first_step``, if another number of replicas took part in them"""
    first_block: int | None = None
    """all blocks of samples before this one are used (a block: one replica's samples of a step); as ``first_sample``"""
    blocks_ahead: list[int] = []
    """used ones beyond: some replicas were ahead of others"""
    replicas: int = 1
    """that train by themselves and meet as ``exchange`` says; as many the run begins with"""
    columns: list[list[int]] = []
    """the nodes of each of several replicas, and of those that there may be in time, in order of stage; empty where
    node n is stage n"""
    standings: dict[int, Standing] = {}
    """replica → where it takes up, unless all do at ``first_step``"""
    exchange: ExchangeConfig = ExchangeConfig()
    wall_time: float
    """seconds since 1970, UTC"""
    provenance: Provenance | None = None
    """None in logs of versions before 0.2"""
    load: dict[int, str] = {}
    """stage → checkpoint folder it starts from; stages not named start from the seed's initial weights"""
    recalled: int = -1
    """step of the snapshot in memory from which the nodes in ``remembering`` begin; -1: none"""
    recalled_from: SnapshotLabel | None = None
    """that snapshot"""
    remembering: list[int] = []
    """their other nodes are to be rebuilt from these"""
    durable_step: int | None = None
    """that of the checkpoints in ``load``, where it is older than ``first_step``"""
    recut: Recut | None = None
    """why the shape is not that of the part before"""
    eval_every: int = 0
    save_every: int = 0
    """steps between checkpoints, at first"""
    save_in_background: bool = False
    """does training wait for copies of the stages only, and not until they are written?"""
    spares: int = 0
    own: int | None = None
    """workers that the run's own machines have room for, if that is not as many as it needs: others are to join"""
    replace: bool = True
    """is a new worker started for each that dies?"""
    routes: list[list[int]] = []
    """all different ways that microbatches go in training, over stages; with an arrangement, each microbatch's way over
    its nodes"""
    pairs: list[tuple[int, int]] = []
    """stages (low, high) that need an edge beside those on the routes: one keeps a copy of the other"""
    arrangement: list[list[int]] = []
    """a schedule's nodes of each stage; empty where node n is stage n"""
    recovery: RecoveryConfig = RecoveryConfig()
    diagnose: Literal["off", "tell", "act"] = "off"
    """what is done about slow workers and links (``fleet.diagnose``)"""
    work: list[float] = []
    """of a pass of stages 0..S, in passes of a decoder layer; empty where all block stages have as many layers"""
    relays: dict[str, float] = {}
    """by name, bytes per second of what edges may go over; none: ends call each other"""
    memory_needs: list[int] = []
    """bytes that stages 0..S take of a CUDA device, at least; empty where all have as many layers, and on CPUs"""

    @cached_property
    def chain(self) -> Chain:
        """The recovery strategies, in the order in which they are tried."""
        from planaria.recovery import recovery  # imports torch, which readers of logs do without

        return recovery(self.recovery, self.stages)

    @cached_property
    def memory(self) -> Memory | None:
        """What a replica remembers at first, where one of its strategies has all stages remember their state."""
        from planaria.control.memory import Memory

        retaining = self.chain.retaining
        return None if retaining is None else Memory(*retaining)

    def samples_before(self, step: int) -> int:
        """Samples used in the steps before ``step``: its first one's number."""
        first = self.first_step * self.samples_per_step if self.first_sample is None else self.first_sample
        return first + (step - self.first_step) * self.samples_per_step

    @cached_property
    def lockstep_replicas(self) -> int:
        """Number of replicas that train in lockstep with different weights; each is saved separately. 0 otherwise."""
        from planaria.exchange.kinds import exchange  # imports torch, which readers of logs do without

        several = self.replicas == 1 and self.exchange.replicas > 1
        return self.exchange.replicas if several and exchange(self.exchange).interval != 0 else 0

    @property
    def saved_replicas(self) -> int:
        """Number of replicas that a checkpoint saves separately."""
        return self.lockstep_replicas or self.replicas

    @property
    def coded(self) -> bool:
        """Whether replicas use gradient coding."""
        return bool(self.exchange.coded)

    @property
    def most_replicas(self) -> int:
        """The most replicas that there may be at once."""
        return max(self.replicas, len(self.columns))

    @cached_property
    def own_workers(self) -> int:
        """Workers that the run's own machines have room for: as many as ``own`` says, or all."""
        return self.all_workers if self.own is None else self.own

    @cached_property
    def all_workers(self) -> int:
        """Workers of the first replicas, and spares."""
        return sum(len(nodes) for r in range(self.replicas) for nodes in self.nodes(r)) + self.spares

    @property
    def block_samples(self) -> int:
        """Samples of one replica's step."""
        return self.samples_per_step // self.replicas

    def blocks_before(self, step: int) -> int:
        """Blocks used before ``step`` if all replicas were there: its first one's number."""
        return self.samples_before(step) // self.block_samples

    @property
    def last_block(self) -> int:
        """Blocks that there are, those of earlier parts of the run included."""
        return self.blocks_before(self.steps)

    @property
    def offset(self) -> int:
        """Samples that all blocks are shifted by: earlier parts of the run took samples in steps of another size."""
        return self.samples_before(self.first_step) % self.block_samples

    def first_of(self, block: int) -> int:
        """A block's first sample."""
        return self.offset + block * self.block_samples

    @property
    def used(self) -> tuple[int, frozenset[int]]:
        """The blocks used before: all below the first number, and those beyond."""
        floor = self.blocks_before(self.first_step) if self.first_block is None else self.first_block
        return floor, frozenset(self.blocks_ahead)

    def progress(self, blocks: int) -> int:
        """The step that begins or is under way when so many blocks are used; also that of the block of this number."""
        return self.first_step + (blocks - self.blocks_before(self.first_step)) // self.replicas

    def standing(self, replica: int) -> Standing:
        """Where a replica takes up."""
        return self.standings.get(replica, Standing(step=self.first_step))

    def nodes(self, replica: int) -> list[list[int]]:
        """A replica's nodes of each stage."""
        return self.arrangement or [[node] for node in self._column(replica)]

    def routes_of(self, replica: int) -> list[list[int]]:
        """All different ways that microbatches go in training, over the nodes of a replica."""
        if self.arrangement:
            return self.routes
        column = self._column(replica)
        return [[column[stage] for stage in route] for route in self.routes]

    def pairs_of(self, replica: int) -> list[tuple[int, int]]:
        """Nodes of a replica that need an edge beside those on the routes."""
        if self.arrangement:
            return self.pairs
        column = self._column(replica)
        return [(column[low], column[high]) for low, high in self.pairs]

    def _column(self, replica: int) -> list[int]:
        if self.arrangement:
            return [nodes[0] for nodes in self.arrangement]
        return self.columns[replica] if self.columns else list(range(self.stages + 1))

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Node → its stage, in all replicas that there may be."""
        held = [
            (node, stage)
            for r in range(self.most_replicas)
            for stage, nodes in enumerate(self.nodes(r))
            for node in nodes
        ]
        return dict(sorted(held))

    @cached_property
    def replica_of(self) -> dict[int, int]:
        """Node → the replica to which it belongs, of all that there may be."""
        return {node: r for r in range(self.most_replicas) for nodes in self.nodes(r) for node in nodes}
