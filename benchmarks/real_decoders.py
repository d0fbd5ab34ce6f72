"""Decoders of transformers at their real sizes: cuts of Gemma 3 270M, and the memory of workers and the controller."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

import planaria
from benchmarks.harness import ROOT, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, start
from planaria.common.errors import RunStopped, UserError
from planaria.control.log.reader import read_run
from planaria.control.log.state_file import read_state
from planaria.models.families import stage_parameters
from planaria.report.run.stage_peaks import stage_peaks
from planaria.runtime.preparation.requirements import stage_state_bytes

NAME = "real_decoders"
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
    """Return an empty folder for the runs of a case."""
    out = RUNS.absolute() / NAME / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def command(recipe: str, settings: dict[str, object], *flags: str) -> list[str]:
    words = [word for setting, value in settings.items() for word in (f"--{setting}", str(value))]
    return [sys.executable, "-m", "planaria", "train", recipe, *words, *flags]


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
    average = {"recovery.strategy": "checkfree"}
    refused = subprocess.run(
        command("gemma3_270m", {**settings, **average, **UNLIKE}, "--dry-run"), capture_output=True, text=True
    )
    named = dict(re.findall(r"((?:pipeline|model)\.\w+) = (\d+)", refused.stderr.partition("alike with")[2]))
    accepted = subprocess.run(
        command("gemma3_270m", {**settings, **average, **named}, "--dry-run"), capture_output=True
    )
    steps = {"train.steps": 1, "train.eval_every": 0, "checkpoint.every": 0, "recovery.strategy": "checkpoint"}
    subprocess.run(command("gemma3_270m", {**settings, **named, **steps}, "--quiet"), check=True)
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

    from planaria.config.schema import ModelConfig
    from planaria.models.transformers.decoder import Decoder
    from planaria.models.transformers.recipe_section import model_section

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


def peak_of(pid: int) -> int:
    """Return the peak resident bytes of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def trained(words: Sequence[str], folder: Path) -> tuple[int, int]:
    """Train one run; return the peak resident bytes of its controller until training ends, and in all.

    :raises RunStopped: if the run failed.
    """
    log, training, peak = folder.with_suffix(".log"), 0, 0
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
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
    Its export, which holds one file of at most 1 GiB or one layer, is shown.
    """
    out, rows = fresh("memory"), list[Row]()
    (out / "recipe.toml").write_text(RECIPE)
    for name, layers in zip(("lora", "full"), args.layers, strict=True):
        random_model(out / f"{name}-base", 2 * layers)
        settings: dict[str, object] = {"train.start": out / f"{name}-base", "name": name, "out": out}
        settings |= {"model.family": "transformers", "data.cache": out / "cache"}
        settings |= {"model.lora.rank": 16, "model.lora.precision": "bf16"} if name == "lora" else {}
        controller, exported = trained(command(str(out / "recipe.toml"), settings), out / name)
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


if __name__ == "__main__":
    start(gemma=run_gemma, memory=run_memory)
