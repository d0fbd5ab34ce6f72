"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_mistakes import TEXT

RECIPE = """
name = "small"
engine = "inline"
model = {{ vocab = 300, dim = 32, layers = 4, heads = 4, hidden = 64, context = 32 }}
pipeline = {{ stages = 4, microbatches = 2, microbatch_size = 2 }}
data = {{ source = "{source}", tokenizer = "bytes", cache = "{cache}" }}
train = {{ steps = 2, eval_every = 0 }}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a valid text and a valid recipe."""
    (tmp_path / "text.txt").write_text(TEXT)
    recipe = RECIPE.format(source=tmp_path / "text.txt", cache=tmp_path / "cache")
    (tmp_path / "good.toml").write_text(recipe)
    return tmp_path
