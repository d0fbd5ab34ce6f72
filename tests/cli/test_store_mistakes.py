"""``checkpoint.store`` is refused by commands that do not support it, before any training."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import refused

RUN = 'train = { steps = 100, eval_every = 10 }\ndata = { source = "stdlib" }\n'
STORE = 'checkpoint = { store = "memory://runs" }\n'
DOMAINS = "[experts.domains]\n" + "".join(f'{name} = {{ source = "stdlib:{name}*.py" }}\n' for name in "abc")


@pytest.mark.parametrize(
    ("command", "recipe", "place"),
    [
        ("compare", f"{RUN}{STORE}[compare]\nseeds = [1]\n[compare.arms.one]\n", "r.toml: checkpoint.store: races"),
        ("compare", f"{RUN}[compare.arms.one]\n{STORE}", "r.toml: compare.arms.one: checkpoint.store: races keep"),
        ("experts train", f"{RUN}{STORE}{DOMAINS}", "r.toml: checkpoint.store supports single runs"),
    ],
)
def test_a_store_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, recipe: str, place: str
) -> None:
    (tmp_path / "r.toml").write_text(recipe)
    line = refused(capfd, *command.split(), tmp_path / "r.toml", "--quiet", "--out", tmp_path / "runs")
    assert place in line and "remove it" in line
    assert not (tmp_path / "runs").exists()
