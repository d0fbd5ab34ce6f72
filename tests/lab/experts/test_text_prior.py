"""Text priors by the parent: causal, equal in measurement and generation, and stored with checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria.common.errors import UserError
from planaria.lab.experts import manifest, ridge
from planaria.lab.experts.domains import HELD_OUT, TEST, TRAINED
from planaria.lab.experts.ensemble import Ensemble
from planaria.lab.experts.log_probabilities import domain_samples
from planaria.lab.experts.text_prior import FILE, SAMPLES, RidgePrior, mean_states, text_sums
from planaria.models.llama_stages import Llama
from support.mixture_checks import check_generation
from support.untrained_ensemble import END, SHAPE, text, write_ensemble

DOMAINS = ("digits", "lower")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_ensemble(tmp_path, {"prior": "ridge"})


def samples(ensemble: Ensemble, domain: str, count: int = 4) -> torch.Tensor:
    ids = ensemble.tokenizer.encode(text(domain, count * 33))
    return torch.tensor(ids).view(count, 33)


def test_states_are_running_means() -> None:
    model, tokens = Llama(SHAPE, seed=1).eval(), torch.randint(0, 256, (2, 9))
    with torch.inference_mode():
        rows = model.ends.norm(model.hidden(tokens)).double()
    found = mean_states(model, tokens)
    for at in range(9):
        torch.testing.assert_close(found[:, at], rows[:, : at + 1].mean(1))


VOTES = [{}, {"by": "average"}, {"by": "bayes"}, {"keep": 4}]
MIXTURES = [{"prior": "ridge"}, *({"prior": "votes", "votes": votes} for votes in VOTES)]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_a_prior_identifies_the_domain_from_earlier_text_alone(tmp_path: Path, mixture: dict[str, Any]) -> None:
    ensemble = Ensemble(write_ensemble(tmp_path, mixture))
    for number, domain in enumerate(DOMAINS):
        given = samples(ensemble, domain, 10)
        before = ensemble.log_prior(given)
        assert before.shape == (2, 10, 32) and before.exp().sum(0).allclose(torch.ones(10, 32, dtype=torch.float64))
        assert float(before.exp()[number, :, 16:].mean()) > 0.8
        for length in (1, 17):  # hidden states are fp32
            alone = ensemble.log_prior_after(given[2, :length].tolist())
            torch.testing.assert_close(alone, before[:, 2, length - 1], atol=1e-4, rtol=1e-4)
        given[:, 17:] = samples(ensemble, DOMAINS[1 - number], 10)[:, 17:]
        assert torch.equal(ensemble.log_prior(given)[..., :17], before[..., :17]), "later text has no effect"


@pytest.mark.parametrize(("top_k", "prefix"), [(0, 0), (1, 8)])
def test_generation_and_measurement_use_the_same_weights(tmp_path: Path, top_k: int, prefix: int) -> None:
    ensemble = Ensemble(write_ensemble(tmp_path, {"prior": "ridge", "top_k": top_k, "prefix": prefix}))
    assert check_generation(ensemble, "31", 20) == 20


@pytest.mark.parametrize("domain", DOMAINS)
def test_without_a_prefix_the_prior_alone_selects_and_one_expert_is_loaded(tmp_path: Path, domain: str) -> None:
    ensemble = Ensemble(write_ensemble(tmp_path, {"prior": "ridge", "top_k": 1, "prefix": 0}))
    assert len(list(ensemble.generate(ensemble.tokenizer.encode(text(domain, 32)), 5))) == 5
    assert list(ensemble._models) == [f"{domain}-expert"]


def test_sums_are_stored_and_extended_by_a_new_domain(run: Path) -> None:
    Ensemble(run)
    file = run / "parent" / FILE
    kept = load_file(file)
    assert set(kept) == set(DOMAINS)
    (run / "domains" / "upper.jsonl").write_text(json.dumps({"text": text("upper")}))
    three = {name: [name] for name in (*DOMAINS, "upper")}
    more = RidgePrior.load_or_fit(run / "parent" / "model", run, three)
    again = load_file(file)
    assert set(again) == {*DOMAINS, "upper"} and all(torch.equal(kept[name], again[name]) for name in kept)
    ensemble = Ensemble(run)
    prior = more.priors(samples(ensemble, "upper", 100), list(three), 0.1).exp()
    assert float(prior[2, :, 16:].mean()) > 0.7
    two = Ensemble(run).log_prior(samples(ensemble, "digits"))
    assert two.shape[0] == 2, "a domain without an expert has no prior"


def test_sums_are_of_training_text_only(run: Path) -> None:
    ensemble = Ensemble(run)
    kept, model = load_file(run / "parent" / FILE)["digits"], Llama(SHAPE, seed=1).eval()
    for part in (TRAINED, HELD_OUT, TEST):
        ids = [*ensemble.tokenizer.encode(text("digits", part=part)), END]
        given = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
        assert torch.allclose(ridge.sums(mean_states(model, given).flatten(0, 1)), kept) == (part == TRAINED)


def test_a_mixing_domain_has_the_text_of_others_and_the_manifest_names_the_parent(run: Path) -> None:
    """As for experts that branched off other experts."""
    known = manifest.read(run)
    first, second = known.members
    mixed = [first, second.model_copy(update={"domain": "mix", "parent": "digits/model"})]
    changes = {"members": mixed, "mixes": {"mix": ["digits", "lower"]}, "parent": "parent/model"}
    manifest.write(run, known.model_copy(update=changes))
    assert Ensemble(run).log_prior(samples(Ensemble(run), "lower")).shape == (2, 4, 32)
    sums = load_file(run / "parent" / FILE)
    assert sorted(sums) == ["digits", "mix"] and not (run / "digits" / FILE).exists()
    both = domain_samples(run, ["digits", "lower"], TRAINED, SHAPE.vocab, SHAPE.context, SAMPLES)
    letters = [sum(97 <= token < 123 for token in one.tolist()) for one in both]
    assert 2 * sum(count > 16 for count in letters) == len(both), "as many of each"
    assert torch.equal(sums["mix"], text_sums(Llama(SHAPE, seed=1).eval(), both))
    (run / TRAINED / "lower.jsonl").unlink()
    (run / "parent" / FILE).unlink()
    with pytest.raises(UserError, match=r"domain 'digits', 'lower' .*lower\.jsonl"):
        Ensemble(run)


def test_damaged_sums_or_those_of_another_model_are_rejected(run: Path) -> None:
    Ensemble(run)
    file = run / "parent" / FILE
    found = load_file(file)
    save_file(found, file, metadata={"model": "0" * 64})
    with pytest.raises(UserError, match="was not computed with the model next to it; remove it"):
        Ensemble(run)
    whose = manifest.digest(run / "parent" / "model" / manifest.WEIGHTS)
    save_file({name: sums[:3] for name, sums in found.items()}, file, metadata={"model": whose})
    with pytest.raises(UserError, match="not 17 × 17 finite numbers"):
        Ensemble(run)
    file.write_text("rubbish")
    with pytest.raises(UserError, match="damaged"):
        Ensemble(run)
    file.unlink()
    (run / "domains" / "lower.jsonl").unlink()
    with pytest.raises(UserError, match=r"domain 'lower' .*lower\.jsonl"):
        Ensemble(run)


def test_an_unknown_or_missing_parent_is_reported(run: Path) -> None:
    known = manifest.read(run)
    orphans = [member.model_copy(update={"parent": ""}) for member in known.members]
    manifest.write(run, known.model_copy(update={"members": orphans}))
    with pytest.raises(UserError, match="parent of its experts is unknown"):
        Ensemble(run)
    manifest.write(run, known)
    (run / "parent" / "model" / manifest.WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing; restore it"):
        Ensemble(run)
