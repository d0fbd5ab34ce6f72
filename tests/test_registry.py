"""Choices in a recipe: found classes, permission to import code, and errors."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config import consent, registry
from planaria.config.options import Options
from planaria.config.schema import RecoveryConfig, RunConfig
from planaria.exchange.coded.schemes import SCHEMES
from planaria.exchange.compress.compression import COMPRESSORS, FEEDBACKS
from planaria.exchange.registry import EXCHANGES
from planaria.exchange.robust.rules import RULES
from planaria.models.families import FAMILIES
from planaria.models.optimizers import OPTIMIZERS
from planaria.pipeline.codecs import CODECS
from planaria.pipeline.routing import ROUTINGS
from planaria.recovery import RECOVERIES, make_chain, with_strategy
from planaria.recovery.codes import CODES
from planaria.recovery.echo import Echo
from planaria.report.observe.trackers import TRACKERS
from planaria.runtime.api.configure import merge_settings
from planaria.runtime.custom_classes import custom_classes
from planaria.swarm.attacks import ATTACKS
from planaria.swarm.checks import CHECKS
from planaria.swarm.policy import POLICIES
from planaria.swarm.tasks import TASKS
from support.command_line import refused

ALL: list[registry.Registry[Any]] = [
    *(RECOVERIES, CODES, ROUTINGS, FAMILIES, EXCHANGES, SCHEMES, COMPRESSORS, FEEDBACKS, RULES, TRACKERS),
    *(CODECS, OPTIMIZERS, ATTACKS, CHECKS, POLICIES, TASKS),
]

OWN = """
from pydantic import Field
from planaria.recovery.base import Recovery
from planaria.recovery.checkfree import CheckFree

class Mine(CheckFree):
    noise: float = Field(0.0, ge=0)

class Bare(Recovery):
    pass

class Picky(CheckFree):
    def model_post_init(self, context):
        raise RuntimeError("not today")

class Older(CheckFree):
    def concerns(self, copy, lost):
        return True

class Reusing(CheckFree):
    def give(self):
        pass

    def donate(self, lost, own, kept):
        return own

class Other:
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, with a unique name."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return name


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory that creates a file when it is imported."""
    name = f"evil_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\nclass X: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return name


def test_every_registry_is_listed_here() -> None:
    source = Path(registry.__file__).parents[1]
    assert sum(file.read_text().count("] = Registry(") for file in source.rglob("*.py")) == len(ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.kind)
def test_no_registry_imports_a_module_without_permission(kind: registry.Registry[Any], evil: str) -> None:
    line = rf"^{kind.setting} = '{evil}:X': neither planaria .* trust the module '{evil}', pass --allow-code"
    with pytest.raises(UserError, match=line):
        kind.find(f"{evil}:X")
    assert not Path("imported").exists()
    with consent.permit_code(), pytest.raises(UserError, match="is not derived from"):
        kind.find(f"{evil}:X")
    assert Path("imported").exists()


COMMANDS = [
    "train RECIPE --dry-run",
    "train RECIPE",
    "train --resume RUN",
    "plan RECIPE",
    "advise RECIPE",
    "compare RECIPE --arms echo --dry-run",
    "compare demo --arms EVIL:X",
    "swarm train SWARM --dry-run",
    "swarm train SWARM",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_a_module_without_permission(
    command: str, evil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(f'recovery.strategy = "{evil}:X"\n')
    (tmp_path / "swarm.toml").write_text(f'task.name = "{evil}:X"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(f'{{"recovery": {{"strategy": "{evil}:X"}}}}')
    words = {"RECIPE": "recipe.toml", "SWARM": "swarm.toml", "RUN": "run"}
    line = refused(capsys, *(words.get(word, word).replace("EVIL", evil) for word in command.split()))
    assert "pass --allow-code" in line
    assert not Path("imported").exists() and not Path("runs").exists()


def test_permission_covers_the_call_and_the_modules_that_it_imported(own: str) -> None:
    with consent.permit_code():
        assert consent.current_consent().any_module and consent.flags() == ["--allow-code"]
        RECOVERIES.find(f"{own}:Mine")
    handed = consent.current_consent()
    assert not handed.any_module and own in handed.modules
    assert RECOVERIES.find(f"{own}:Mine").__name__ == "Mine"
    with pytest.raises(UserError, match="--allow-code"):
        RECOVERIES.find(f"{own}_other:Mine")


def test_an_imported_class_needs_no_permission(own: str) -> None:
    import sys

    sys.path.append(".")
    module = __import__(own)
    assert merge_settings({"recovery.strategy": module.Mine}, {}) == {"recovery.strategy": f"{own}:Mine"}
    assert RECOVERIES.find(f"{own}:Mine") is module.Mine
    assert own in consent.current_consent().modules, "child processes inherit it"


def test_shipped_classes_need_no_permission_by_any_name() -> None:
    assert RECOVERIES.find("planaria.recovery.echo:Echo") is Echo


@pytest.mark.usefixtures("allow_code")
def test_a_custom_class_is_found_in_the_working_directory_with_its_options(own: str) -> None:
    made = RECOVERIES.make(f"{own}:Mine", {"noise": 0.5, "lr_scale": 2.0})
    assert made.model_dump() == {
        "noise": 0.5, "lr_scale": 2.0, "moments": "fresh", "omega": "l2sq", "measured": "preclip"
    }  # fmt: skip
    assert [kind.__name__ for kind in registry.custom_choices([type(made), Echo])] == ["Mine"]


def test_a_package_registers_names(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"noisy": EntryPoint("noisy", f"{own}:Mine", "planaria.recovery")}
    monkeypatch.setattr(registry, "_entry_points", lambda kind: points)
    assert RECOVERIES.find("noisy").__name__ == "Mine" and "noisy" in RECOVERIES.names
    assert RECOVERIES.find(f"{own}:Mine").__name__ == "Mine", "an installed package provides it"
    with pytest.raises(UserError, match=r"no such choice; did you mean 'noisy'\?"):
        RECOVERIES.find("noisi")


@pytest.mark.usefixtures("allow_code")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eco", r"recovery\.strategy = 'eco': no such choice; did you mean 'echo'\? \(or 'module:Class'"),
        ("?", r"known here: .*, whole_copies; for comparisons: copy, identity, oracle, random, reset, uniform \("),
        ("nowhere_at_all:Mine", r"there is no module 'nowhere_at_all' on Python's path or in "),
        ("OWN:Mien", r"has no 'Mien'; did you mean 'Mine'\?"),
        ("OWN:Other", r"is not derived from planaria\.recovery\.base\.Recovery; derive it"),
        ("broken:Mine", r"cannot be imported: .*broken\.py:2: ZeroDivisionError"),
        ("worse:Mine", r"cannot be imported: .*worse\.py:1: SyntaxError"),
        ("quits:Mine", r"cannot be imported: .*quits\.py:2: SystemExit: 0"),
        (":Mine", r"'' is not a module name; use 'module:Class'"),
        ("../mine:Mine", r"'\.\./mine' is not a module name"),
        ("OWN:Bare", r"lacks donors; define them"),
    ],
)
def test_an_unavailable_choice_is_refused(own: str, name: str, message: str) -> None:
    Path("broken.py").write_text("\n1 / 0\n")
    Path("worse.py").write_text("class\n")
    Path("quits.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=message):
        RECOVERIES.find(name.replace("OWN", own))


@pytest.mark.usefixtures("allow_code")
def test_a_method_of_an_older_name_is_not_ignored(own: str) -> None:
    with pytest.raises(UserError, match=rf"'{own}:Older': Older.concerns is now called helps_rebuild; rename it"):
        RECOVERIES.make(f"{own}:Older", {})
    assert RECOVERIES.find(f"{own}:Reusing"), "a class with the present name may use the former one for itself"
    for kind in ALL:
        assert all(hasattr(kind.base, present) for present in kind.base.former_members.values())


@pytest.mark.usefixtures("allow_code")
def test_a_class_that_cannot_be_instantiated_is_refused(own: str) -> None:
    with pytest.raises(UserError, match=rf"'{own}:Picky' cannot be created: .*{own}\.py:\d+: RuntimeError: not today"):
        RECOVERIES.make(f"{own}:Picky", {})


@pytest.mark.usefixtures("allow_code")
def test_unexpected_errors_are_attributed_to_custom_classes_only(own: str) -> None:
    mine = RECOVERIES.find(f"{own}:Mine")
    cause = rf"^{own}:Mine may be the cause: .*: ZeroDivisionError"
    with pytest.raises(UserError, match=cause), registry.blame_custom_code(lambda: [mine]):
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError), registry.blame_custom_code(lambda: []):
        _ = 1 / 0
    with pytest.raises(UserError, match=r"^known$"), registry.blame_custom_code(lambda: [mine]):
        raise UserError("known")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bit": 4}, r"^recovery\.options\.bit: no option of 'echo', 'checkfree'; did you mean 'bits'\?$"),
        ({"bits": 3}, r"^recovery\.options\.bits = 3: input should be 2, 4 or 8$"),
        ({"echo": 3}, r"^recovery\.options\.echo = 3 is a table of the options of 'echo'$"),
        ({"echo": {"omega": "l2"}}, r"^recovery\.options\.echo\.omega: unknown; known here: bits, distance, every$"),
        ({"checkpoint": {}}, r"^recovery\.options\.checkpoint: no option of 'echo', 'checkfree'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_chain(RecoveryConfig(strategy="echo, checkfree", options=Options(options)), 4)


def test_an_option_applies_to_all_that_declare_it_and_a_table_to_one() -> None:
    options = Options({"lr_scale": 1.5, "copy": {"lr_scale": 1.25}})
    chain = make_chain(RecoveryConfig(strategy="checkfree, copy, random", options=options), 4).strategies
    assert [one.lr_scale for one in chain.values()] == [1.5, 1.25, 1.5]  # type: ignore[attr-defined]


def test_another_strategy_drops_options_it_does_not_declare() -> None:
    first = RecoveryConfig(strategy="echo", options=Options({"bits": 4, "echo": {"every": 2}}))
    assert with_strategy(first, "checkfree").options == {}
    assert with_strategy(first, "checkfree, echo").options == first.options


def test_options_compare_by_value() -> None:
    one, other = Options({"a": [1, 2], "b": 2}), Options({"b": 2, "a": [1, 2]})
    assert one == other and hash(one) == hash(other) and {one: 1}[other] == 1
    assert RecoveryConfig.model_validate_json(RecoveryConfig(options=one).model_dump_json()).options == one


def test_the_documented_entry_points_are_those_of_the_registries() -> None:
    """docs/extend.md: | part | setting | base class | entry point group |."""
    table = (Path(__file__).parents[1] / "docs" / "extend.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table if line.startswith("| ")][1:]
    documented = {row[1]: (row[3], row[2]) for row in rows if len(row) == 4}
    known = {one.setting: (f"planaria.{one.kind}", f"{one.base.__module__}.{one.base.__qualname__}") for one in ALL}
    assert documented.items() <= known.items() and len(documented) >= 11


def test_a_custom_codec_is_code_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining machines import it before they start, and results of comparisons depend on its source."""
    (tmp_path / "own_codec.py").write_text(
        "from planaria.pipeline.codecs.floats import Fp32\n\nclass Own(Fp32):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with consent.permit_code(True):
        for wire in ("own_codec:Own", {"kind": "own_codec:Own"}):
            config = RunConfig.model_validate({"pipeline": {"wire": wire}})
            assert [one.__name__ for one in custom_classes(config)] == ["Own"]
