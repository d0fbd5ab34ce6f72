from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_engine import Recipe, config_in

from planaria.config.schema import RunConfig


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture
def config(corpus_folder: Path) -> Recipe:
    """Makes the tiny recipe, with single fields of its sections changed."""

    def make(**sections: dict[str, Any]) -> RunConfig:
        return config_in(corpus_folder, **sections)

    return make
