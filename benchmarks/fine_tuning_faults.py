"""LoRA on dialogues with workers of unlike speeds: a kill and a leave change neither losses nor adapters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import ROOT, RUNS
from benchmarks.elastic import Guest
from benchmarks.harness import Cell, Claim, Flag, Measurement, Result, Row, benchmark, start
from planaria.cli.commands.chaos import strike
from planaria.common.errors import RunStopped, UserError
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord, read_run
from planaria.control.state_file import StateFile, read_state
from planaria.report.run.ledger import prove_exactly_once
from planaria.report.run.stage_peaks import stage_peaks
from planaria.runtime import run
from planaria.runtime.checkpoint.loading import load_stages
from planaria.runtime.engine import run_folders

NAME = "fine_tuning_faults"
VICTIM = 2
"""block stage whose worker is killed; then the joined machine holds it until it leaves"""
PROMPT = "The capital of France is"
WAIT_S = 300.0
"""longest wait for an event of a run, in seconds"""


def command(given: Namespace, out: Path, name: str) -> list[str]:
    """Return the command of one run: the shipped recipe with adapters, three block stages and the ends."""
    settings = {
        "train.start": given.weights.absolute(), "model.lora.rank": given.rank, "data.source": given.dialogues,
        "model.context": given.context, "model.ends_layers": 0, "pipeline.stages": len(given.layers),
        "pipeline.layers": json.dumps(given.layers), "train.steps": given.steps, "train.eval_every": 0,
        "optim.lr": given.lr, "recovery.strategy": "redundant, checkpoint", "checkpoint.every": 0, "fleet.spares": 0,
        "data.cache": out / "cache", "observe.trackers": "", "out": out, "name": name,
    }  # fmt: skip
    flags = [word for setting, value in settings.items() for word in (f"--{setting}", str(value))]
    return [sys.executable, "-m", "planaria", "train", "smollm2_sft", *flags]


class Training:
    """A run as a command in its own process."""

    def __init__(self, given: Namespace, out: Path, name: str, *flags: str) -> None:
        self.folder, self._log = out / name, out / f"{name}.log"
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                [*command(given, out, name), *flags], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
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


def harmed(given: Namespace, out: Path) -> RunRecord:
    """Train with workers of unlike speeds; one is killed, then the machine that took over leaves."""
    slow = [
        {"step": 0, "stage": stage, "signal": "slow", "strength": times}
        for stage, times in enumerate(given.slow)
        if times > 1
    ]
    (out / "slow.json").write_text(json.dumps({"version": 1, "faults": slow}))
    training = Training(given, out, "faults", "--chaos.trace", str(out / "slow.json"))
    guest: Guest | None = None
    try:
        training.until(lambda state: state.step >= 1, "the first step")
        guest = Guest(training.folder, 1, "--workers", "1")
        training.until(lambda state: any(one.node is None for one in state.workers), "the join")
        (joined,) = (one.worker for one in read_state(training.folder).workers if one.node is None)
        print(strike(training.folder, "kill", f"stage={VICTIM}"), flush=True)
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


def losses(record: RunRecord) -> list[float]:
    """Return the loss of each step in nats; the last one of a repeated step."""
    found = {metric.step: metric.loss for metric in record.trained}
    return [found[step] for step in sorted(found)]


def logits_apart(folder: Path, weights: Path) -> float:
    """Return the largest difference between the logits of a run's stages and those of its export in ``peft``."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        tokens = torch.tensor([AutoTokenizer.from_pretrained(folder / run.MODEL)(PROMPT)["input_ids"]])
        plain = base(input_ids=tokens).logits
        theirs = PeftModel.from_pretrained(base, str(folder / run.MODEL)).eval()(input_ids=tokens).logits
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

    first, second = (load_file(folder / run.MODEL / ADAPTERS) for folder in (one, other))
    if first.keys() != second.keys():
        raise RunStopped(f"{other}: its adapters have other names than those of {one}")
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def rows(unharmed: RunRecord, struck: RunRecord, weights: Path) -> list[Row]:
    ours, base = losses(struck), losses(unharmed)
    events = Counter(fact.cause for _, fact in struck.history if isinstance(fact, e.WorkerLost))
    left = sum(isinstance(fact, d.Release) for _, fact in struck.history)
    formed = [fact.outcome for _, fact in struck.history if isinstance(fact, d.Form)]
    apart = [abs(a - b) for a, b in zip(ours, base, strict=True)]
    loss = {"first loss": base[0], "final loss": base[-1]}
    seen: dict[str, Cell] = {"deaths": sum(events.values()), "leaves": left, "generations": ", ".join(formed)}
    return [
        Row("largest difference of a step's loss, nats", [max(apart)], "0", Claim(high=0.0), loss),
        Row("difference of the final loss, nats", [apart[-1]], "0", Claim(high=0.0), loss),
        Row("largest difference of an adapter", [adapters_apart(unharmed.folder, struck.folder)], "0", Claim(high=0.0)),
        Row("logits: export in peft – stages", [logits_apart(struck.folder, weights)], "0", Claim(high=0.0)),
        Row("kills survived", [formed.count("recovered")], "", Claim(1, 1), seen),
        Row("leaves survived", [formed.count("handed over")], "", Claim(1, 1), seen),
        Row("problems of the ledger", [len(prove_exactly_once(struck))], "0", Claim(high=0.0)),
        *(
            Row(f"peak memory of {one.where}, MB", [one.bytes / 1e6], f"predicted {one.predicted / 1e6:.0f}")
            for one in stage_peaks(unharmed)
        ),
    ]


@benchmark(
    NAME,
    weights=Flag(Path("SmolLM2-135M-Instruct"), "Hugging Face folder with safetensors"),
    dialogues=Flag(None, "JSON lines; those of examples/stdlib_dialogues.py unless given", type=Path),
    rank=16,
    layers=Flag([12, 10, 8], "decoder layers of each block stage"),
    slow=Flag([1.0, 1.25, 1.5, 2.0], "factor by which actions of the ends and of each block stage are slowed"),
    context=128,
    steps=16,
    lr=5e-4,
)
def run_fine_tuning_faults(given: Namespace) -> Measurement:
    """Fine-tune SmolLM2-135M-Instruct with LoRA on dialogues, on a fleet of four workers, with and without faults.

    In the run with faults the workers have unlike speeds. A machine joins (``planaria join``); a worker is killed
    (SIGKILL), and the joined machine takes over its stage; two steps later that machine leaves (Ctrl-C). Claims: every
    step's loss and all adapters equal those of the run without faults to the last bit; the export gives the same logits
    in ``peft`` as the run's stages.

    Requires the weights as a folder (docs/models.md) and ``planaria[hf,lora]``.
    """
    if not (given.weights / "config.json").is_file():
        raise UserError(f"--weights {given.weights}: no folder with config.json; give one with safetensors")
    out = RUNS.absolute() / NAME
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if given.dialogues is None:
        given.dialogues = out / "dialogues.jsonl"
        made = [sys.executable, str(ROOT / "examples" / "stdlib_dialogues.py"), str(given.dialogues)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    given.dialogues = given.dialogues.absolute()
    training = Training(given, out, "unharmed")
    try:
        unharmed = training.end()
    finally:
        training.close()
    struck = harmed(given, out)
    curves = [f"{record.config.name}: {json.dumps(losses(record))}" for record in (unharmed, struck)]
    return Result(rows(unharmed, struck, given.weights), [f"rank {given.rank}, context {given.context}", *curves])


if __name__ == "__main__":
    start(run_fine_tuning_faults)
