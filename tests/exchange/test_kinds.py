"""What a recipe may say of an exchange, what it gets where it says nothing, and what it is told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_models import KINDS, make

from planaria import recipe
from planaria.config import ExchangeConfig, RunConfig
from planaria.errors import UserError
from planaria.exchange import exchange
from planaria.exchange.allreduce import AllReduce
from planaria.exchange.diloco import DiLoCo
from planaria.exchange.gasloc import Gasloc
from planaria.exchange.local import Local
from planaria.exchange.noloco import NoLoCo
from planaria.exchange.pair_mean import PairMean
from planaria.exchange.streaming import Streaming


def test_what_is_not_given_is_as_published() -> None:
    assert make("noloco") == NoLoCo(50, 2, 32, False, 0.5, 0.7, 0.7)
    assert make("diloco") == DiLoCo(500, 32, 0.9, 0.7, "nesterov")
    assert make("streaming_diloco") == Streaming(25, 32, 0.9, 0.7, "nesterov", 4, 0, 0.0)
    assert make("pair_mean") == PairMean(50, 2, 32, False)
    assert make("allreduce") == AllReduce(32) and make("local") == Local()


def test_what_is_given_is_taken() -> None:
    assert make("noloco", every=7, alpha=0.1, beta=0.2, gamma=0.3, group=3, bits=8, prefetch=True) == NoLoCo(
        7, 3, 8, True, 0.1, 0.2, 0.3
    )
    assert make("diloco", every=7, alpha=0.0, beta=1.0, bits=4, momentum="heavy_ball") == DiLoCo(
        7, 4, 0.0, 1.0, "heavy_ball"
    )
    assert make("gasloc", every=9, bits=16) == Gasloc(9, 2, 16, False, alpha=0.5, beta=0.7, gamma=0.7)
    assert make("pair_mean", group=4, prefetch=True) == PairMean(50, 4, 32, True)
    assert make("streaming_diloco", every=12, fragments=2, delay=5, mix=0.5) == Streaming(
        6, 32, 0.9, 0.7, "nesterov", 2, 5, 0.5
    )
    assert make("allreduce", every=0, bits=8) == AllReduce(8)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"kind": "nolocco"}, r"exchange\.kind = 'nolocco': no such exchange; did you mean 'noloco'\?"),
        ({"kind": "diloco", "every": 0}, r"exchange\.every = 0 with exchange\.kind = 'diloco': .* give 1 or more"),
        (
            {"kind": "allreduce", "every": 5},
            r"averages .* of every step, not of every 5; leave exchange\.every",
        ),
        ({"kind": "streaming_diloco", "every": 10, "fragments": 4}, r"every = 10 does not divide .*fragments = 4"),
        ({"kind": "streaming_diloco", "every": 8, "fragments": 16}, r"every = 8 does not divide .*fragments = 16"),
        ({"kind": "streaming_diloco", "every": 8, "delay": 2}, r"delay = 2: .* 2 steps later .*; lower it"),
        ({"kind": "gasloc", "alpha": 0.5, "gamma": 0.5}, r"'gasloc' has no defaults .* exchange\.beta"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_the_mend(settings: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        exchange(ExchangeConfig.model_validate(settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_value_of_the_recipe_that_its_help_names(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[exchange]\nkind = "{kind}"\n')
    assert recipe.load(file, {}).exchange.kind == kind
    assert kind in (ExchangeConfig.model_fields["kind"].description or "")


def test_a_run_that_says_nothing_averages_gradients() -> None:
    assert exchange(RunConfig().exchange) == AllReduce()
