"""A recipe file that trains in seconds."""

from __future__ import annotations

import random
from pathlib import Path

RECIPE = """
name = "tiny"
out = "{folder}/runs"
engine = "inline"
prompt = "eta"

[model]
vocab = 257
dim = 32
layers = 4
heads = 2
hidden = 64
context = 16

[pipeline]
stages = 4
microbatches = 4
microbatch_size = 2

[data]
source = "{folder}/corpus.txt"
tokenizer = "bytes"
validation = 0.1
cache = "{folder}/cache"

[optim]
lr = 5e-3

[train]
steps = 8
eval_every = 4
eval_microbatches = 2

[checkpoint]
every = 0

[fleet]
missed_heartbeats = 40

[chaos]
trace = "tiny.trace.json"
"""
TRACE = '{"version": 1, "faults": [{"step": 3, "stage": 2, "moment": "forward"}]}'


def written(folder: Path) -> Path:
    """Write the recipe, its text and its trace to ``folder``; stage 2 is lost in step 3."""
    rng = random.Random(34107)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(60)]
    (folder / "corpus.txt").write_text(" ".join(rng.choices(words, k=6000)))
    (folder / "tiny.trace.json").write_text(TRACE)
    (folder / "tiny.toml").write_text(RECIPE.format(folder=folder))
    return folder / "tiny.toml"
