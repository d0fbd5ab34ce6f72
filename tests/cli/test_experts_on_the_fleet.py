"""Experts trained on the fleet equal those trained in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria import cli
from planaria.control.facts.events import StageReady
from planaria.control.log.reader import read_run
from planaria.lab.experts.experts_results import Results

pytestmark = pytest.mark.timeout(300)
"""A dozen processes start one after the other."""

RECIPE = """
name = "{engine}"
out = "{folder}"
engine = "{engine}"
model = {{ vocab = 257, dim = 16, layers = 2, heads = 2, context = 32 }}
pipeline = {{ stages = 2, microbatches = 2, microbatch_size = 2 }}
exchange = {{ kind = "allreduce", replicas = 2 }}
data = {{ tokenizer = "bytes", cache = "{folder}/cache" }}
train = {{ eval_every = 0 }}

[experts]
seeds = [1]
sizes = {{ M = 32 }}
steps = [4]
max_chars = 60000
test_windows = 8
workers = 1
seed = {{ steps = 4 }}
probe = {{ by = ["hand"] }}

[experts.domains]
tables = {{ source = "stdlib:encodings/cp*.py", hand = 0 }}
code = {{ source = "stdlib:*.py", hand = 1 }}
"""
EXPERTS = ("tables-M-4", "code-M-4")


def trained(folder: Path, engine: str) -> Results:
    recipe = folder / f"{engine}.toml"
    recipe.write_text(RECIPE.format(engine=engine, folder=folder))
    assert cli.run(["experts", "train", str(recipe), "--quiet"]) == 0
    return Results.model_validate_json((folder / engine / "results.json").read_text())


@pytest.mark.slow
def test_replicated_pipelines_train_the_same_experts(tmp_path: Path) -> None:
    inline, fleet = trained(tmp_path, "inline"), trained(tmp_path, "fleet")
    assert fleet.runs[0].lost == []
    assert fleet.runs[0].parent == pytest.approx(inline.runs[0].parent, abs=1e-6)
    for name in EXPERTS:
        assert fleet.runs[0].single[name] == pytest.approx(inline.runs[0].single[name], abs=1e-6)
        assert fleet.runs[0].single[name] != pytest.approx(fleet.runs[0].parent, abs=1e-3)
        history = read_run(tmp_path / "fleet" / "seed-1" / "experts" / name).history
        ready = [fact for _, fact in history if isinstance(fact, StageReady) and fact.step == 3]
        assert sorted(fact.stage for fact in ready) == [0, 0, 1, 1, 2, 2]
