"""Policy, warm-up and server sections of a recipe. Imports no torch: every command's help reads this module."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.config import bounds
from planaria.config.bounds import Fraction, Natural, Positive
from planaria.config.options import ChoiceName, Options
from planaria.config.schema import ModelConfig, Section
from planaria.config.section import formerly


class SupervisedWarmupConfig(Section):
    """Supervised steps on worked solutions before the first round. Equal settings result in equal weights."""

    steps: Positive = 800
    """supervised updates"""
    batch: Positive = 32
    """solutions per update"""
    lr: Annotated[float, Field(gt=0)] = 6e-3
    """peak learning rate"""
    noise: Fraction = 0.15
    """sums: probability that a step of a solution is wrong; a policy that is always right has nothing to learn"""
    stray_letter_probability: Annotated[Fraction, formerly("stray_letter_probability", "strays")] = 0.05
    """probability of stray letters between a solution's steps; they make the model robust to unexpected text"""
    seed: Natural = 0
    """seed of weights and solutions"""


class SmallModel(ModelConfig):
    """A LLaMA that learns sums in a minute; its vocabulary is bytes by default."""

    vocab: bounds.Vocab = 257
    """rows of the embedding table"""
    dim: bounds.Width = 48
    """width of the residual stream"""
    layers: bounds.Layers = 2
    """decoder layers"""
    hidden: bounds.Width = 128
    """width of the SwiGLU feed-forward layer"""
    context: bounds.Context = 64
    """tokens of prompt and completion together"""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """standard deviation of the initial weights"""


class ServingConfig(Section):
    """Connection to a server that samples completions, and its weight updates."""

    model: str = ""
    """the server's name of the initial model; by default the first it lists"""
    token: str = ""
    """environment variable with the server's token; empty sends none"""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """time for all samples of a round, in seconds; the policy itself draws the missing ones"""
    at_once: Annotated[int, Field(ge=1, le=256)] = 8
    """concurrent requests"""
    push: Literal["auto", "adapters", "weights", "never"] = "auto"
    """what the server loads after a round: adapters (policy.options.lora; vLLM, SGLang), whole weights (SGLang), or
    whichever is trained (auto)"""
    overlap: bool = True
    """whether a peer draws while it learns, with rounds.ahead; otherwise in turn, with equally old weights (a control)
    """
    folder: str = ""
    """folder for these files on a disk shared with the server; by default the peer's own folder"""


class PolicyConfig(Section):
    kind: ChoiceName = "small"
    """small (a LLaMA that is warmed up by supervised learning), pretrained, or 'module:Class'"""
    options: Options = Options()
    """options of the kind"""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """the small LLaMA's tokenizer: bytes, or byte pairs learned from the task's worked solutions (policy.model.vocab
    ids in all)"""
    model: SmallModel = SmallModel()
    """the small LLaMA"""
    chat: Literal["auto", "always", "never"] = "auto"
    """whether prompts use the model's chat template; auto: if it has one"""
    instruction: str | None = None
    """text before the problems; by default the task's description of the answer form with a chat template, else none"""
    examples: Annotated[int, Field(ge=0, le=64)] | None = None
    """worked training problems shown before each problem; by default 4 with a chat template if the task has
    solutions, else none"""
    server: Annotated[str, Field(pattern=r"^(https?://[^\s@]+)?$")] = ""
    """URL of an OpenAI-compatible server that samples completions; by default the policy samples"""
    max_staleness_rounds: Annotated[Natural, formerly("max_staleness_rounds", "behind")] = 1
    """maximum staleness of the server's weights in rounds; the policy itself samples beyond it. With rounds.ahead above
    0 that is the maximum"""
    serving: ServingConfig = ServingConfig()
    """the server's settings"""
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """compute device; auto: a CUDA device if available"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """precision of passes; weights and updates stay fp32. bf16 requires a CUDA device"""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of a peer; the number may change the last bit of sums, so equal peers need equal values"""
    logits_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """maximum MB of logits at once; larger batches take several passes"""
