"""Settings of exchanges in recipes: defaults, values and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.config.section import meaning
from planaria.exchange.allreduce import AllReduce, NoExchange
from planaria.exchange.gossip import PairMean
from planaria.exchange.registry import make_exchange
from support.lab_models import KINDS, make


def test_defaults_are_as_published() -> None:
    assert make("noloco").model_dump() == {
        "bits": 32, "aggregator": "mean", "every": 50, "group": 2, "prefetch": False,
        "alpha": 0.5, "beta": 0.7, "gamma": 0.7,
    }  # fmt: skip
    diloco = {"bits": 32, "aggregator": "mean", "every": 500, "alpha": 0.9, "beta": 0.7, "momentum": "nesterov"}
    assert make("diloco").model_dump() == diloco
    streaming = diloco | {"every": 100, "fragments": 4, "delay": 0, "mix": 0.0}
    assert make("streaming_diloco").model_dump() == streaming and make("streaming_diloco").interval == 25
    assert make("pair_mean") == PairMean(every=50, group=2, bits=32, prefetch=False)
    assert make("allreduce") == AllReduce(bits=32) and make("local") == NoExchange() and not NoExchange.model_fields


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("nolocco", {}, r"^exchange\.kind = 'nolocco': no such choice; did you mean 'noloco'\?"),
        ("diloco", {"every": 0}, r"^exchange\.options\.every = 0: .* greater than 0"),
        (
            "allreduce",
            {"every": 5},
            r"^exchange\.options\.every: no option of 'allreduce'; known here: aggregator, bits",
        ),
        ("local", {"bits": 8}, r"^exchange\.options\.bits: no option of 'local'; there are none; remove it"),
        ("noloco", {"fragments": 2}, r"^exchange\.options\.fragments: no option of 'noloco'"),
        ("noloco", {"group": 1}, r"^exchange\.options\.group = 1: .* greater than or equal to 2"),
        ("streaming_diloco", {"every": 8, "fragments": 16}, r"every = 8 does not divide .*fragments = 16"),
        ("streaming_diloco", {"every": 8, "delay": 2}, r"^exchange\.options: delay = 2: .* fragments = 2.*; lower it"),
        (
            "gasloc",
            {"alpha": 0.5, "gamma": 0.5},
            r"^exchange\.options\.beta: 'gasloc' has no default for it; set outer learning rate$",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_fix(kind: str, options: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        make_exchange(ExchangeConfig(kind=kind, options=Options(options)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["every", "bits", "momentum", "gamma"])
def test_the_error_of_an_old_recipe_names_the_options_new_place(option: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[exchange]\nkind = "noloco"\n{option} = 4\n')
    with pytest.raises(UserError, match=rf"exchange\.{option}: unknown key; .* as exchange\.options\.{option}(; or|$)"):
        recipe.load(file, {})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_accepted_and_in_the_help(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[exchange]\nkind = "{kind}"\n')
    assert recipe.load(file, {}).exchange.kind == kind
    assert kind in meaning(ExchangeConfig, "kind")


def test_the_default_exchange_averages_gradients() -> None:
    assert make_exchange(RunConfig().exchange) == AllReduce()


@pytest.mark.usefixtures("allow_code")
@pytest.mark.parametrize(
    ("interval", "overlap", "message"),
    [
        ("-3", "0", r"interval is -3; it must be a number of steps, or None$"),
        ("'soon'", "0", r"interval is 'soon'; it must be a number of steps"),
        ("1 // 0", "0", r"Own failed: .*: ZeroDivisionError"),
        ("4", "4", r"overlap is 4; it must be below interval = 4$"),
        ("None", "1", r"overlap is 1; it must be below interval = None$"),
    ],
)
def test_a_custom_exchanges_rounds_are_checked_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str, overlap: str, message: str
) -> None:
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "from planaria.exchange.gossip import PairMean\n\nclass Own(PairMean):\n"
        f"    interval = property(lambda self: {interval})\n    overlap = property(lambda self: {overlap})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=message):
        make_exchange(ExchangeConfig(replicas=2, kind=f"{name}:Own"))
