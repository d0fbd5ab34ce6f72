"""Results on disk: written atomically, and read only for their identity."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.trials.result_cache import CachedResult, identity, make_folder


class Found(Record):
    loss: float
    pairs: list[tuple[int, float]] = []  # noqa: RUF012


def place(folder: Path, recipe: object = "mine") -> CachedResult[Found]:
    return CachedResult(folder / "result.json", Found, identity(recipe))


@pytest.mark.parametrize("loss", [0.1 + 0.2, math.inf])
def test_a_result_is_read_exactly_as_written(tmp_path: Path, loss: float) -> None:
    assert place(tmp_path).read() == (None, "")
    place(tmp_path).write(Found(loss=loss, pairs=[(1, 1 / 3)]))
    assert place(tmp_path).read() == (Found(loss=loss, pairs=[(1, 1 / 3)]), "")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_another_trial_s_result_is_rejected_with_a_reason(tmp_path: Path) -> None:
    place(tmp_path).write(Found(loss=1.0))
    assert place(tmp_path, "other").read() == (None, "it was made with a different recipe")
    place(tmp_path, "other").write(Found(loss=2.0))
    assert place(tmp_path, "other").read()[0] == Found(loss=2.0)


def test_a_result_without_an_identity_is_stale(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"job": "12ab", "course": {}}')
    assert place(tmp_path).read() == (None, "it was made by an older planaria")


@pytest.mark.parametrize("damage", ["loss", "cut", "list", "identity"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    file = place(tmp_path).file
    place(tmp_path).write(Found(loss=1.0))
    tree = json.loads(file.read_text())
    if damage == "loss":
        tree["result"]["loss"] = 0.5
    elif damage == "identity":
        tree["identity"]["recipe"] = identity("other").recipe
    file.write_text({"cut": file.read_text()[:-9], "list": "[]"}.get(damage, json.dumps(tree)))
    reader = place(tmp_path, "other" if damage == "identity" else "mine")
    with pytest.raises(UserError, match=r"result\.json.*; remove it to run this again"):
        reader.read()


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/c cannot be created .*--out"):
        make_folder(tmp_path / "file" / "c")
