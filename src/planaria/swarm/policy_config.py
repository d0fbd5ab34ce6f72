"""What a peer draws its completions with: a policy, where it computes, the school it comes from, the server that draws
for it. No torch here: every command's help reads this."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.config import bounds
from planaria.config.bounds import Fraction, Natural, Positive
from planaria.config.options import Options
from planaria.config.schema import ModelConfig, Section


class SchoolConfig(Section):
    """Supervised steps on worked solutions, before the first round; equal schools give equal weights."""

    steps: Positive = 800
    """supervised updates"""
    batch: Positive = 32
    """solutions in one of them"""
    lr: Annotated[float, Field(gt=0)] = 6e-3
    """peak learning rate"""
    noise: Fraction = 0.15
    """sums: probability that a step of a solution is wrong; a policy that is always right has nothing to learn"""
    strays: Fraction = 0.05
    """probability that stray letters stand between a solution's steps: whoever has read only clean text is lost after
    the first odd word, which no model that has read the web is"""
    seed: Natural = 0
    """of weights and solutions"""


class SmallModel(ModelConfig):
    """A LLaMA that learns sums in a minute; read and written byte by byte."""

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
    """How a server that draws completions is reached, and how it gets the weights."""

    model: str = ""
    """the server's name for the model that the policy started from; the first that it lists unless given"""
    token: str = ""
    """the environment variable that holds the server's token; none is sent if empty"""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """how long all draws of a round may take; what is late is drawn by the policy itself"""
    at_once: Annotated[int, Field(ge=1, le=256)] = 8
    """requests that the server is sent at once"""
    push: Literal["auto", "adapters", "weights", "never"] = "auto"
    """what the server is told to load after a round: adapters (policy.options.lora; vLLM, SGLang), whole weights
    (SGLang), or whichever of them is trained (auto)"""
    folder: str = ""
    """where these are put for it, on a disk that both see; the peer's own folder unless given"""


class PolicyConfig(Section):
    kind: str = "small"
    """small, a LLaMA that goes to school first, pretrained, or 'module:Class'"""
    options: Options = Options()
    """of the kind"""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """the small LLaMA's: bytes, or pairs of them that it finds in the task's own worked solutions (policy.model.vocab
    ids in all)"""
    model: SmallModel = SmallModel()
    """the small LLaMA"""
    chat: Literal["auto", "always", "never"] = "auto"
    """whether problems are put as a conversation in the model's chat template; auto: where it has one"""
    instruction: str | None = None
    """said before the problems; with a chat template the task's own words about the form of answers, else nothing"""
    examples: Annotated[int, Field(ge=0, le=64)] | None = None
    """training problems with worked solutions that are shown before the one that is asked; with a chat template 4, as
    far as the task knows solutions, else none"""
    server: Annotated[str, Field(pattern=r"^(https?://[^\s@]+)?$")] = ""
    """URL of an OpenAI-compatible server that draws the completions; the policy itself draws unless given"""
    behind: Natural = 1
    """rounds that the server's weights may be older than the policy's; what would be older is drawn by the policy"""
    serving: ServingConfig = ServingConfig()
    """the server"""
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """what it computes on; auto: a CUDA device if the machine has one"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """of its passes; weights and updates stay fp32. bf16 needs a CUDA device"""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """processor threads of a peer; another number may change the last bit of sums, so equal peers have the same"""
    logits_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """most MB of logits at once: more completions are read and learned from in several passes"""
