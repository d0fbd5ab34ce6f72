"""``checkpoint.store`` where no run copies anything there: said in one line, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria import cli

RUN = 'train = { steps = 100, eval_every = 10 }\ndata = { source = "stdlib" }\n'
STORE = 'checkpoint = { store = "memory://runs" }\n'
DOMAINS = "[experts.domains]\n" + "".join(f'{name} = {{ source = "stdlib:{name}*.py" }}\n' for name in "abc")


@pytest.mark.parametrize(
    ("command", "recipe", "place"),
    [
        ("compare", f"{RUN}{STORE}[compare]\nseeds = [1]\n[compare.arms.one]\n", "r.toml: checkpoint.store: races"),
        ("compare", f"{RUN}[compare.arms.one]\n{STORE}", "r.toml: compare.arms.one: checkpoint.store: races keep"),
        ("experts", f"{RUN}{STORE}{DOMAINS}", "r.toml: checkpoint.store: takes single runs"),
    ],
)
def test_it_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, recipe: str, place: str
) -> None:
    (tmp_path / "r.toml").write_text(recipe)
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, str(tmp_path / "r.toml"), "--quiet", "--out", str(tmp_path / "runs")])
    _, err = capfd.readouterr()
    assert exit_.value.code == 2 and err.startswith("planaria: ") and err.count("\n") == 1
    assert place in err and "leave it out" in err
    assert not (tmp_path / "runs").exists()
