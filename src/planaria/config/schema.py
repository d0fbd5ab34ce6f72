"""A run as strict typed data: the sections of a recipe, one class each.

Field descriptions are the help texts of the command line's flags. Reading recipes and flags, and saying kindly what is
wrong with them, is ``config/recipe.py``'s work; what a field does is the work of the room it is named after.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction, Natural, Positive, Seconds
from planaria.config.data_config import DataConfig as DataConfig
from planaria.config.fleet_config import FleetConfig as FleetConfig
from planaria.config.model_config import ModelConfig as ModelConfig
from planaria.config.model_config import even
from planaria.config.names import Name
from planaria.config.network_config import NetworkConfig as NetworkConfig
from planaria.config.options import Options
from planaria.config.section import Section as Section


class PipelineConfig(Section):
    stages: bounds.Stages = 4
    """block stages the decoder layers are cut into; the ends worker comes on top"""
    layers: Annotated[tuple[Positive, ...], Field(strict=False)] | Literal["auto"] | None = None
    """decoder layers of each block stage, such as [7, 8, 8, 7]; auto: as the machines' measured speeds and memories ask
    for; equally many unless given"""
    microbatches: bounds.Microbatches = 8
    """microbatches in one step"""
    microbatch_size: bounds.BatchSize = 4
    """samples in one microbatch"""
    order: Literal["1f1b", "gpipe"] = "1f1b"
    """what a worker prefers when several microbatches are ready: backward first (1f1b) or forward first (gpipe)"""
    in_flight: Positive | None = None
    """most microbatches under way at once; two for each worker under 1f1b, all under gpipe unless given"""
    wire: Literal["fp32", "bf16"] = "fp32"
    """how activations and their gradients travel between stages; bf16 rounds them and takes half the bytes"""

    @property
    def samples(self) -> int:
        """Samples in one step."""
        return self.microbatches * self.microbatch_size

    @property
    def unlike(self) -> bool:
        """Have block stages different numbers of layers, or may they come to?"""
        return self.layers == "auto" or len(set(self.layers or ())) > 1

    @property
    def cut(self) -> str:
        """What ``layers`` says, as a recipe has it."""
        return repr(self.layers) if isinstance(self.layers, str) else str(list(self.layers or ()))


class RoutingConfig(Section):
    kind: str = "full"
    """which way microbatches go through the stages: full, swapped, skipping (at random), given (by routes), or
    'module:Class'"""
    options: Options = Options()
    """of a routing of your own"""
    mixed: bool = False
    """with exchange.replicas: hand every microbatch to a replica drawn anew at each stage boundary"""
    skip: Fraction = 0.0
    """skipping and `planaria plan`: the share of the block stages that each microbatch leaves out"""
    swaps: Natural = 2
    """skipping and `planaria plan`: steps back to the stage just before the furthest that a route may take"""
    jump: Positive = 4
    """skipping and `planaria plan`: places a route may go beyond its furthest stage at once"""
    data_nodes: Positive = 1
    """`planaria plan`: ends workers, each of which lets in its share of the step's microbatches"""
    sums: bool = False
    """`planaria plan`: a step is over when all nodes have their stage's gradient sums, not with its passes"""
    routes: list[list[Natural]] = Field(default_factory=list)
    """given: the stages that each microbatch of a step visits, from 0 to 0"""
    schedule: str | None = None
    """a file that `planaria plan` wrote: its nodes, several to a stage, and its routes over them, whatever kind says"""


class OptimConfig(Section):
    kind: str = "adamw"
    """adamw; muon: matrices of decoder layers by Muon, with beta1 as its momentum, all else by AdamW; sgd: with
    beta1 as its momentum; or 'module:Class'"""
    options: Options = Options()
    """of the kind"""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """peak learning rate of AdamW, and of Muon scaled to updates of the same size"""
    beta1: Fraction = 0.9
    """decay of the first moment"""
    beta2: Fraction = 0.999
    """decay of the second moment"""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """decoupled weight decay"""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """largest L2 norm of one stage's gradient, or as ``clip_by`` says; 0 switches clipping off"""
    clip_by: Literal["stage", "layer"] = "stage"
    """what ``clip`` bounds: the gradient of each stage, or of each decoder layer, the embedding, final norm and head by
    themselves; layers are the same however the run is cut"""
    warmup: Natural = 0
    """steps of linear warm-up"""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """learning rate after the warm-up; wsd: constant (stable), then a decay along a line"""
    final_lr: Fraction = 0.1
    """cosine and wsd end at this fraction of lr"""
    decay: Annotated[Fraction, Field(gt=0)] = 0.2
    """wsd: the last fraction of the steps, in which it decays"""


class TrainConfig(Section):
    steps: bounds.Steps = 300
    """optimizer updates in the run"""
    schedule_steps: Natural = 0
    """steps that the learning rate's schedule is laid out for, of which the run's are the first; 0: steps"""
    start: str | None = None
    """weights that the first step starts from, with fresh moments: a run, a folder of safetensors, a GGUF file, or
    'hf:OWNER/NAME' (Hugging Face); what they fix, and their tokenizer, goes with them"""
    pretrained: bool = False
    """whether the recipe is made for pretrained weights; a run of it without start warns that it begins from random
    ones"""
    eval_every: Natural = 100
    """steps between validations; 0 switches them off"""
    eval_microbatches: Positive = 8
    """microbatches of one validation"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where stages compute"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs matrix products under autocast; weights and moments stay fp32"""
    compile: bool = False
    """compile each stage with torch.compile"""
    recompute: bool = False
    """keep no activations within a layer for the backward pass, which computes them again: less memory, more time"""


class RecoveryConfig(Section):
    strategy: str = "checkfree"
    """what becomes of a lost stage: one strategy, or several in the order they are tried ('echo, checkpoint'); names,
    or 'module:Class'""" ""
    options: Options = Options()
    """of the strategies: each goes to those that have it; a table of a strategy's name, to that alone"""
    meanwhile: Literal["wait", "skip"] = "wait"
    """while no worker is there for a lost block stage: wait for one, or train on with the stage skipped (with a
    schedule: by a new plan for the nodes that are left)"""


class ExchangeConfig(Section):
    replicas: bounds.Replicas = 1
    """copies of the model, each with samples of its own, that agree as kind says"""
    most: bounds.Replicas | None = None
    """on the fleet, how many there may be in time, as machines join; no more than replicas unless given"""
    kind: str = "allreduce"
    """how replicas agree: allreduce, local (not at all), diloco, streaming_diloco, noloco, pair_mean, gasloc, monna,
    or 'module:Class'"""
    options: Options = Options()
    """of the kind"""
    compress: str | Options = ""
    """how messages are made shorter: FEEDBACK:COMPRESSOR, such as 'econtrol:top1%', 'ef21:rand5%', 'ef14:4bits' or
    'sign'; or a table of kind (topk, randk, sign, quantised, plain, 'module:Class'), feedback (none, ef14, ef21,
    econtrol, 'module:Class') and their options"""
    robust: str | Options = ""
    """what replicas go on with when some of them lie, in place of the mean: RULE or MIX:RULE, such as 'multikrum' or
    'nnm:median'; or a table of rule (median, trimmed_mean, krum, multikrum, geometric_median, clipping, flag,
    'module:Class'), liars, mix (none, nnm, bucketing), scope (stage, replica) and the rule's options"""
    coded: str | Options = ""
    """how a step goes on without replicas that are late, its gradient exact all the same: a scheme (gc, srsgc, msgc,
    none, 'module:Class'), or a table of scheme, its options, jobs (parts of a step that are decoded by themselves) and
    slow (times what the fastest took, after which the others are late)"""
    inner: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """on the fleet, inner steps between rounds of each replica in turn, where machines are not equally fast"""
    patience_s: Seconds = 10.0
    """how long a replica waits for the others of its group; then it goes on with those that are there, or by itself"""
    strikes: bounds.Strikes = 3
    """on the fleet, steps or rounds in which what a replica says is proved to be of no use, after which its workers are
    sent away and others take their place; 0: never"""


class CheckpointConfig(Section):
    every: Natural | Literal["best"] = 100
    """steps between durable states; 0 keeps only the one at the end; 'best' measures steps and saves, then chooses"""
    keep: Positive = 2
    """newest durable states that are kept"""
    store: str | None = None
    """a place beside the run's folder for its checkpoints, such as s3://bucket/runs (any URL of fsspec), from which the
    run can be resumed on another machine; each is copied there while training goes on"""
    background: bool = False
    """on the fleet: each worker copies its stage, and writes the copy while training goes on; the save at the end is
    waited for"""


class ChaosConfig(Section):
    trace: str | None = None
    """file of faults to inject while the fleet trains (see `planaria trace`), or none"""

    @field_validator("trace")
    @classmethod
    def _names_a_file(cls, trace: str | None) -> str | None:
        if trace == "":
            raise ValueError("chaos.trace is empty; give the path of a trace, such as `planaria trace` writes, or none")
        return trace


class ObserveConfig(Section):
    trackers: str = "tensorboard"
    """what hears of the run's losses and other numbers: names, or 'module:Class', with commas between; nothing if
    empty"""
    options: Options = Options()
    """of the trackers: each goes to those that have it; a table of a tracker's name, to that alone"""


class RunConfig(Section):
    """A whole run: the root of a recipe. Its sections and settings are those of docs/recipes.md."""

    name: Name = "run"
    """the run's folder below out"""
    out: str = "runs"
    """folder that holds the runs"""
    seed: Natural = 34107
    """seed of initial weights and data order"""
    engine: Literal["fleet", "inline", "simulate"] = "fleet"
    """fleet: real processes; inline: all stages in this process; simulate: a clock only"""
    prompt: str = ""
    """text that the trained model completes at the end of the run"""
    model: ModelConfig = ModelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    routing: RoutingConfig = RoutingConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    fleet: FleetConfig = FleetConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()
    chaos: ChaosConfig = ChaosConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def samples(self) -> int:
        """Samples in one step of all replicas."""
        return self.pipeline.samples * self.exchange.replicas

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.model.block_layers != self.pipeline.layers:
            if self.pipeline.layers is None:
                raise ValueError("model.block_layers follows from pipeline.layers; give that")
            said, left = self.pipeline.layers, self.model.layers - self.model.ends_layers
            cut = even(left, self.pipeline.stages) if said == "auto" else said  # until the machines have been timed
            self.__dict__["model"] = self.model.model_copy(update={"block_layers": cut})
        if why := self.model.uncut(self.pipeline.stages):
            raise ValueError(why)
        together = self.exchange.replicas if self.engine == "inline" or self.routing.mixed else 1
        passes = 2 * (self.pipeline.stages + 1) * self.pipeline.microbatches * together
        if passes > bounds.MOST_PASSES:
            replicas = f" × exchange.replicas = {together}" if together > 1 else ""
            raise ValueError(
                f"pipeline.stages = {self.pipeline.stages} × pipeline.microbatches = {self.pipeline.microbatches}"
                f"{replicas} makes {passes} passes a step, each of which is planned (at most {bounds.MOST_PASSES}); "
                "lower pipeline.microbatches and raise pipeline.microbatch_size"
            )
        for field in ("forward_s", "backward_s"):
            given = len(getattr(self.network, field))
            if given == 1 and self.pipeline.unlike:
                raise ValueError(
                    f"network.{field} has one number for stages of {self.pipeline.cut} layers; give one for each of "
                    f"the {self.pipeline.stages + 1} stages 0..{self.pipeline.stages}"
                )
            if given not in (0, 1, self.pipeline.stages + 1):
                raise ValueError(
                    f"network.{field} has {given} numbers; give one, or one for each of the "
                    f"{self.pipeline.stages + 1} stages 0..{self.pipeline.stages}"
                )
        if self.network.staging_bandwidth is not None and self.routing.schedule is not None:
            raise ValueError("network.staging_bandwidth: a schedule has times of its own for messages; leave it out")
        if self.exchange.most is not None and self.exchange.most < self.exchange.replicas:
            raise ValueError(
                f"exchange.most = {self.exchange.most} is less than exchange.replicas = {self.exchange.replicas}"
            )
        if len(self.exchange.inner) not in (0, self.exchange.replicas):
            raise ValueError(
                f"exchange.inner has {len(self.exchange.inner)} numbers; give one for each of exchange.replicas = "
                f"{self.exchange.replicas}"
            )
        if 0 < self.train.schedule_steps < self.train.steps:
            raise ValueError(
                f"train.schedule_steps = {self.train.schedule_steps} ends before train.steps = {self.train.steps} do; "
                "give as many or more"
            )
        if self.train.precision == "bf16" and self.train.device == "cpu":
            raise ValueError("train.precision = 'bf16' needs train.device = 'cuda': on CPUs it is many times slower")
        return self
