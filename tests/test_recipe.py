from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.kinds import kinds_of
from planaria.config.options import NAME, choice_of
from planaria.config.schema import RunConfig, Section
from planaria.config.section import entry_of, section_of
from planaria.swarm.config.swarm_config import SwarmConfig

RECIPES = [
    path for path in shipped.shipped_recipes().values() if not {*kinds_of(recipe.read(path))} & {"swarm", "drill"}
]
"""of one model; `tests/swarm/test_swarm_recipe.py` reads the others"""


@pytest.fixture
def write(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def refused(text: str, file: Path, **flags: str) -> str:
    """Return the one line with which loading ``text`` fails, without the folder's name."""
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        recipe.load(file, {name.replace("__", "."): value for name, value in flags.items()})
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(file.parent) + "/", "")


def test_flags_override_the_recipe_and_the_recipe_defaults(write: Path) -> None:
    write.write_text("seed = 1\n[model]\ndim = 64\nheads = 2\n")
    config = recipe.load(write, {"model.dim": "32", "optim.lr": "3e-4"})
    assert (config.model.dim, config.model.heads, config.model.layers) == (32, 2, RunConfig().model.layers)
    assert (config.seed, config.optim.lr, config.name) == (1, 3e-4, "mine")


def test_a_recipe_may_name_its_run(write: Path) -> None:
    write.write_text('name = "other"')
    assert recipe.load(write, {}).name == "other"
    assert recipe.load(write, {"name": "third"}).name == "third"
    assert recipe.load(None, {}).name == RunConfig().name


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("model.tied", "false", False),
        ("model.kv_heads", "2", 2),
        ("pipeline.order", "gpipe", "gpipe"),
        ("data.source", "hf:123", "hf:123"),
        ("data.cache", "true", "true"),
        ("network.forward_s", "[0.1]", [0.1]),
        ("network.bandwidth", "1e6", 1e6),
        ("prompt", "1 + 1 =", "1 + 1 ="),
        ("optim.lr", "1", 1.0),
    ],
)
def test_a_flag_is_parsed_as_toml_and_bare_words_are_strings(flag: str, text: str, value: object) -> None:
    plain = recipe.load(None, {flag: text}).model_dump()
    for part in flag.split("."):
        plain = plain[part]
    assert plain == value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[optim]\nlrr = 1", "mine.toml: optim.lrr: unknown key; did you mean 'lr'?"),
        (
            "[optim]\ndim = 3",
            "mine.toml: optim.dim: unknown key; set an option of optim.kind as optim.options.dim; "
            "or did you mean 'model.dim'?",
        ),
        ("dim = 3", "mine.toml: dim: unknown key; did you mean 'model.dim'?"),
        ("[modle]\ndim = 3", "mine.toml: modle: unknown key; did you mean 'model'?"),
        ("model = 3", "mine.toml: model is a section; set its keys below [model]"),
        ('[model]\ndim = "64"', "mine.toml: model.dim = '64': input should be a valid integer"),
        ("[model]\ntied = 1", "mine.toml: model.tied = 1: input should be a valid boolean"),
        ('seed = "x"', "mine.toml: seed = 'x': input should be a valid integer"),
        ("seed = -1", "mine.toml: seed = -1: input should be greater than or equal to 0"),
        ("[optim]\nlr = inf", "mine.toml: optim.lr = inf: input should be a finite number"),
        ("[model]\ndim = 0", "mine.toml: model.dim = 0: input should be greater than 0"),
        ("[model]\ndim = 63", "mine.toml: model.dim = 63 does not divide into model.heads = 4"),
        (
            "[model]\nlayers = 5",
            "mine.toml: model.layers = 5 does not divide into pipeline.stages = 4; set model.ends_layers = 1",
        ),
        ("[model]\nkv_heads = 3", "mine.toml: model.heads = 4 is not a multiple of model.kv_heads = 3"),
        (
            "[train]\nsteps = 7\nschedule_steps = 5",
            "mine.toml: train.schedule_steps = 5 ends before train.steps = 7 do; set it to at least train.steps",
        ),
    ],
)  # fmt: skip
def test_an_invalid_recipe_is_refused(text: str, line: str, write: Path) -> None:
    assert refused(text, write) == line


MIXTURE = """[data.mixture]
books = { source = "books", weight = 0.7 }
web = { source = "hf:owner/web", weight = 0.3, epochs = 2 }
"""


def test_a_mixture_is_a_table_of_sources(write: Path) -> None:
    write.write_text(MIXTURE)
    config = recipe.load(
        write, {"data.mixture.books.weight": "1", "data.mixture.code.source": "stdlib", "data.mixture.code.weight": "2"}
    )
    assert {name: (one.source, one.weight) for name, one in config.data.mixture.items()} == {
        "books": ("books", 1.0),
        "web": ("hf:owner/web", 0.3),
        "code": ("stdlib", 2.0),
    }
    write.write_text(recipe.dump(config))
    assert recipe.load(write, {}) == config == recipe.parse(config.model_dump_json(), "config.json")
    assert "[data.mixture.code]" in write.read_text()
    assert recipe.with_flags(config, {"data.mixture.books.source": "2024"}).data.mixture["books"].source == "2024"
    assert recipe.load(None, {"data.mixture": "{ a = { source = 'x', weight = 1 } }"}).data.sources["a"].source == "x"
    assert recipe.flatten(config)["data.mixture.web.epochs"] == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("books = 3", "data.mixture.books is a section; set its keys below [data.mixture.books]"),
        ("books = { source = 'x', weigth = 1 }", "data.mixture.books.weigth: unknown key; did you mean 'weight'?"),
        ("books = { source = 'x' }", "data.mixture.books.weight is missing; set it"),
        ("books = { source = 'x', weight = 0 }", "data.mixture.books.weight = 0: input should be greater than 0"),
        ("books = { source = 'x', weight = 1, epochs = 0 }", "books.epochs = 0: input should be greater than 0"),
        ("'a.b' = { source = 'x', weight = 1 }", "not a valid name; use 1 to 64 letters"),
        (
            "a = { source = 'x', weight = 1 }\nb = { source = 'x', weight = 1e-5 }",
            "data.mixture.b.weight = 1e-05 is less than one in 10000 of all weights; raise it, or remove the source",
        ),
    ],
)  # fmt: skip
def test_an_invalid_mixture_is_refused_by_source(text: str, line: str, write: Path) -> None:
    found = refused(f"[data.mixture]\n{text}", write)
    assert found.startswith("mine.toml: ") and line in found


def test_an_invalid_flag_is_refused(write: Path) -> None:
    assert refused("", write, seed="x") == "--seed x: input should be a valid integer"
    known = "input should be '1f1b' or 'gpipe'"
    assert refused("", write, pipeline__order="gpip") == f"--pipeline.order gpip: {known}; did you mean 'gpipe'?"
    assert refused("", write, pipeline__order="x") == f"--pipeline.order x: {known}"
    assert refused("", write, pipeline__stages="3") == (
        "mine.toml with these flags: model.layers = 4 does not divide into pipeline.stages = 3; "
        "set model.ends_layers = 1"
    )
    assert "these flags: network.forward_s has 2 numbers" in refused("", write, network__forward_s="[1, 2]")


def test_files_that_are_not_recipes_are_refused(write: Path, tmp_path: Path) -> None:
    assert "mine.toml: not valid TOML" in refused("[model\n", write)
    write.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        recipe.load(write, {})
    with pytest.raises(UserError, match=r"miine.toml: no such recipe; did you mean 'mine.toml'\?"):
        recipe.load(tmp_path / "miine.toml", {})
    with pytest.raises(UserError, match="no such recipe; known here: "):
        recipe.load(tmp_path / "nowhere" / "mine.toml", {})
    write.write_text("#" * (recipe.MAX_RECIPE_BYTES + 1))
    with pytest.raises(UserError, match="bytes is too large for a recipe"):
        recipe.load(write, {})


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.name)
def test_shipped_recipes_survive_dump_and_load(file: Path, write: Path) -> None:
    config = recipe.load(file, {})
    write.write_text(recipe.dump(config))
    assert recipe.load(write, {}) == config
    assert recipe.parse(config.model_dump_json(), "config.json") == config


def test_every_field_is_documented_and_settable_by_its_dotted_name() -> None:
    fields = dict(recipe.fields())
    assert len(fields) > 40
    assert list(fields) == [name for name, _ in recipe.meanings()]
    assert not [name for name, meaning in recipe.meanings() if not meaning]
    plain = recipe.load(None, {}).model_dump(mode="json")
    for name in fields:
        value = plain
        for part in name.split("."):
            value = value[part]
        if value is not None:
            text = value if isinstance(value, str) else str(value).lower()
            assert recipe.load(None, {name: text}) == recipe.load(None, {})


def test_overlay_changes_only_the_given_settings() -> None:
    before = recipe.load(None, {"model.dim": "64"})
    after = recipe.with_flags(before, {"train.steps": "7"})
    assert after.train.steps == 7
    assert after.model_copy(update={"train": before.train}) == before
    with pytest.raises(UserError, match=r"--train.steps 0: input should be greater than 0"):
        recipe.with_flags(before, {"train.steps": "0"})


def test_a_damaged_config_is_refused() -> None:
    with pytest.raises(UserError, match=r"^run/config.json: Invalid JSON"):
        recipe.parse("{", "run/config.json")
    with pytest.raises(UserError, match=r"^run/config.json: model.dim: input should be a valid integer$"):
        recipe.parse('{"model": {"dim": "a"}}', "run/config.json")


@given(st.sampled_from([name for name, _ in recipe.fields()]), st.text(max_size=12))
def test_any_flag_is_accepted_or_refused(name: str, text: str) -> None:
    try:
        assert isinstance(recipe.load(None, {name: text}), RunConfig)
    except UserError as error:
        assert name in str(error) or "the defaults with these flags" in str(error)


def test_relative_paths_are_resolved_from_the_recipes_folder(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "own.toml"
    file.write_text(
        """
        data.source = "../texts/a.txt"
        data.tokenizer = "bytes"
        data.mixture.law = { source = "../texts/a.txt", weight = 1.0 }
        data.mixture.talk = { source = "../texts/none.txt", weight = 1.0 }
        train.start = "../texts"
        """
    )
    found = recipe.load(file, {})
    assert found.data.source == str(tmp_path / "texts" / "a.txt") == found.data.mixture["law"].source
    assert found.data.tokenizer == "bytes" and found.data.mixture["talk"].source == "../texts/none.txt"
    assert found.train.start == str(tmp_path / "texts")
    flagged = recipe.load(file, {"data.source": "../texts/a.txt"})
    assert flagged.data.source == "../texts/a.txt", "a flag is relative to the working directory"


def sections(section: type[Section]) -> list[type[Section]]:
    inner = [kind for field in section.model_fields.values() if (kind := section_of(field.annotation))]
    return [section, *(below for kind in inner for below in sections(kind))]


def test_every_section_with_options_declares_the_field_that_names_its_choice() -> None:
    """Without it, ``merge_tables`` would keep the options of the former choice."""
    every = [*sections(RunConfig), *sections(SwarmConfig)]
    assert [kind for kind in every if (NAME in kind.model_fields) != (choice_of(kind) is not None)] == []
    assert sum(NAME in kind.model_fields for kind in every) > 10
    entries = [entry_of(field.annotation) for kind in every for field in kind.model_fields.values()]
    assert not any(NAME in entry.model_fields for entry in entries if entry), "merge_tables does not reach these"


def test_a_changed_choice_starts_without_the_options_of_the_former() -> None:
    tree = {"exchange": {"kind": "noloco", "options": {"every": 20}}, "fleet": {"kind": "local", "options": {"a": 1}}}
    same = recipe.merge_tables(tree, {"exchange": {"kind": "noloco", "replicas": 4}}, RunConfig)
    assert same["exchange"] == {"kind": "noloco", "replicas": 4, "options": {"every": 20}}
    other = recipe.merge_tables(tree, {"exchange": {"kind": "diloco"}, "fleet": {"kind": "ray"}}, RunConfig)
    assert other == {"exchange": {"kind": "diloco"}, "fleet": {"kind": "ray", "options": {"a": 1}}}
