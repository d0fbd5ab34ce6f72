"""Trackers get a run's configuration without secrets."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import RunConfig
from planaria.report.observe.settings import SECRET, settings


def test_every_setting_is_told_flat() -> None:
    told = settings(RunConfig.model_validate({"name": "mine", "train": {"steps": 7}, "optim": {"lr": 0.5}}))
    assert (told["name"], told["train.steps"], told["optim.lr"]) == ("mine", 7, 0.5)
    assert told["data.tokenizer"] != SECRET and told["model.vocab"] == RunConfig().model.vocab
    json.dumps(told)


SHAPES = (
    {"fleet": {"key": "{}"}},
    {"checkpoint": {"store": "s3://user:{}@host/bucket"}},
    {"checkpoint": {"store": "https://host/bucket?sig={}&x=1"}},
    {"data": {"source": "https://me:{}@host/corpus.txt?token={}"}},
    {"observe": {"trackers": "mine:Own", "options": {"api_key": "{}"}}},
    {"observe": {"options": {"wandb": {"auth": {"nested": "{}"}}}}},
    {"observe": {"options": {"hosts": [{"password": "{}"}, "https://a:{}@b/c"]}}},
)


def filled(shape: object, secret: str) -> object:
    if isinstance(shape, dict):
        return {key: filled(value, secret) for key, value in shape.items()}
    if isinstance(shape, list):
        return [filled(value, secret) for value in shape]
    return shape.replace("{}", secret) if isinstance(shape, str) else shape


@given(
    shape=st.sampled_from(SHAPES), secret=st.from_regex(r"[A-Za-z0-9_.-]{1,3}Q7x[A-Za-z0-9_.-]{0,20}", fullmatch=True)
)
def test_no_secret_is_told(shape: object, secret: str) -> None:
    told = settings(RunConfig.model_validate(filled(shape, secret)))
    assert secret not in repr(told)
    assert any(SECRET in str(value) or "//host/bucket" in str(value) for value in told.values())
