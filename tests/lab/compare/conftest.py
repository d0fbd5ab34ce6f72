"""Fixtures of the tests of comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.data.shards import Dataset, tokenise_corpus
from support.race_jobs import config


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    return tokenise_corpus(config(tmp_path).data, 257)
