"""With ``train.compile`` a restarted stage reuses compiled code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.sleeping_runner import warm_runner
from planaria.runtime.worker.step_samples import StepInputs
from support.tiny_engine import config_in

PROGRAM = """
import json, sys, torch
from pathlib import Path
from support.tiny_engine import config_in
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepInputs
from torch._dynamo.utils import counters
torch.set_num_threads(1)
runner = StageRunner(config_in(Path(sys.argv[1]), train={"compile": True}), 0)
runner.begin(StepInputs(lambda number: (torch.zeros(2, 16, dtype=torch.long),) * 2))
runner.forward(0, 1, runner.forward(0, 0, None))
print(json.dumps({name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}))
"""


@pytest.mark.slow
def test_a_spare_that_becomes_any_block_stage_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch caches compiled code by function, so a stage with a new module reuses it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    config = config_in(tmp_path, train={"compile": True})
    warm = warm_runner(config)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for runner in (warm, StageRunner(config, 3)):
        runner.begin(StepInputs())
        x = torch.randn(2, config.model.context, config.model.dim)
        runner.forward(0, 1, x)
        runner.backward(0, 1, x)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_a_new_process_reuses_the_compiled_ends_of_another(tmp_path: Path) -> None:
    paths = os.pathsep.join(sys.path)
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"), "PYTHONPATH": paths}
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=True)
        found.append(json.loads(done.stdout))
    assert found[0]["miss"] > 0 and found[1] == {"hit": found[0]["miss"], "miss": 0}
