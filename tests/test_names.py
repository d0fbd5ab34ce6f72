"""Names become files and folders: no name leaves its folder, is hidden, or looks like a flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from planaria.common.errors import UserError
from planaria.config import names, recipe
from planaria.config.data_config import DataConfig
from planaria.config.names import Key, Name, expand_home
from planaria.config.schema import RunConfig
from planaria.swarm.config.swarm_config import SwarmConfig
from support.command_line import refused

BAD = ("", ".", "..", "../../esc", "a/b", "/abs", ".hidden", "-x", "a b", "a\nb", "a\0b", "é", "x" * 101)
texts = st.text() | st.text(alphabet="ab.-_/ ", max_size=8)


@given(texts)
@example("a.b-2_")
def test_a_name_is_one_visible_component_of_a_path(text: str) -> None:
    try:
        name = TypeAdapter[str](Name).validate_python(text)
    except ValidationError:
        assert text not in ("a", "a.b-2_")
        return
    assert name == text and Path("out", name).parent == Path("out") and name[0] not in ".-" and name.isascii()
    try:
        assert "." not in TypeAdapter[str](Key).validate_python(text)
    except ValidationError:
        assert "." in name or len(name) > 64


@given(texts)
def test_a_recipe_without_a_name_is_named_after_its_file(stem: str) -> None:
    TypeAdapter(Name).validate_python(names.name_of_recipe(stem))


@pytest.mark.parametrize("bad", BAD)
def test_invalid_names_are_refused(bad: str) -> None:
    for kind in (RunConfig, SwarmConfig):
        with pytest.raises(ValidationError, match="not a valid name; use 1 to 100 letters"):
            kind.model_validate({"name": bad})
    with pytest.raises(ValidationError, match="not a valid name; use 1 to 64 letters"):
        DataConfig.model_validate({"mixture": {bad: {"source": "x", "weight": 1}}})
    with pytest.raises(UserError, match=r"^--as .*: not a valid name; "):
        names.require_name(bad, "--as")


@pytest.mark.parametrize(
    "command",
    [
        "train mine.toml --dry-run",
        "train mine.toml",
        "plan mine.toml",
        "compare mine.toml --arms echo --dry-run",
        "swarm train swarm.toml",
        "compare drill.toml",
        "experts train experts.toml",
        "swarm join swarm.toml --board board",
        "train demo --name ../../esc",
        "train demo --name=",
        "swarm join --board board --as ../../esc",
    ],
)
def test_a_command_refuses_an_invalid_name_and_writes_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    (inside / "mine.toml").write_text('name = "../../esc"\n')
    (inside / "swarm.toml").write_text('name = "../../esc"\nsize = 2\n')
    (inside / "drill.toml").write_text('name = "../../esc"\n[drill.arms.one]\n')
    (inside / "experts.toml").write_text(
        'name = "../../esc"\n[experts]\nsizes = { M = 8 }\nsteps = [4]\n'
        '[experts.domains]\nx.source = "x"\ny.source = "y"\n'
    )
    before = sorted(tmp_path.rglob("*"))
    line = refused(capsys, *command.split())
    assert "name" in line and "not a valid name; use 1 to 100" in line, line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_name_with_spaces_is_converted_to_a_name(tmp_path: Path) -> None:
    (tmp_path / "my recipe, 2.toml").write_text("")
    assert recipe.load(tmp_path / "my recipe, 2.toml", {}).name == "my-recipe-2"


def test_an_unknown_users_home_is_not_expanded() -> None:
    assert expand_home("~unknown-user/x") == Path("~unknown-user/x")
    assert expand_home("~/x") == Path.home() / "x"
