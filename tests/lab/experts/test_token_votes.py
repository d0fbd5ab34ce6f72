"""Votes of tokens: counts against token streams, new domains, ties, options, and a whole ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from planaria.common.errors import UserError
from planaria.lab.experts import manifest, ridge
from planaria.lab.experts.ensemble import Ensemble
from planaria.lab.experts.experts_spec import MixtureSpec, VotesSpec
from planaria.lab.experts.votes import FILE, VotesPrior, bayes_table, count_sums, token_counts
from support.untrained_ensemble import write_ensemble

V, END = 12, 11


def embeddings() -> Tensor:
    return torch.randn(V, 5, generator=torch.Generator().manual_seed(1))


def stream(seed: int) -> Tensor:
    return torch.randint(0, V, (40, 9), generator=torch.Generator().manual_seed(seed)) * (seed + 1) % V


def fitted(domains: int, **spec: Any) -> VotesPrior:
    counts = {f"d{n}": token_counts(stream(n), V) for n in range(domains)}
    return VotesPrior(embeddings(), counts, VotesSpec.model_validate(spec), END)


def test_counts_and_the_token_stream_give_the_same_router() -> None:
    streams = [stream(n) for n in range(3)]
    by_counts = ridge.router([count_sums(embeddings(), token_counts(s, V)) for s in streams], 1e-2)
    by_stream = ridge.router([ridge.sums(embeddings()[s.flatten()]) for s in streams], 1e-2)
    assert float((by_counts - by_stream).abs().max()) <= 1e-5
    assert by_counts[:-1].norm(dim=0).tolist() == pytest.approx([1.0] * 3), "without the bias"


@pytest.mark.parametrize("by", ["votes", "bayes"])
def test_an_added_domain_equals_a_fit_from_scratch(tmp_path: Path, by: str) -> None:
    votes = {"by": by}
    run = write_ensemble(tmp_path / "added", {"prior": "votes", "votes": votes})
    Ensemble(run)
    kept = load_file(run / "parent" / FILE)
    assert sorted(kept) == ["digits", "lower"]
    names = ("digits", "lower", "upper")
    scratch = write_ensemble(tmp_path / "scratch", {"prior": "votes", "votes": votes}, names)
    (run / "domains" / "upper.jsonl").write_bytes((scratch / "domains" / "upper.jsonl").read_bytes())
    given = {name: [name] for name in names}, VotesSpec.model_validate(votes)
    added = VotesPrior.load_or_fit(run / "parent" / "model", run, *given)
    whole = VotesPrior.load_or_fit(scratch / "parent" / "model", scratch, *given)
    assert torch.equal(added.table, whole.table) and added.table.shape == (257, 3)
    assert all(torch.equal(load_file(run / "parent" / FILE)[name], kept[name]) for name in kept)


def test_ties_go_to_the_first_domain() -> None:
    prior = fitted(3)
    best = prior.table.argmax(-1)
    one, other = (next(t for t in range(V - 1) if int(best[t]) == n) for n in sorted({*best[: V - 1].tolist()})[:2])
    tied = torch.tensor([[one, other], [other, one]])
    assert prior.scores(tied).argmax(-1).tolist() == [int(best[one])] * 2, "an equal number of votes"
    prior.table[:] = 1.0
    assert prior.scores(tied).argmax(-1).tolist() == [0, 0], "equal scores"


def test_options_select_voters_and_scores() -> None:
    prior, tokens = fitted(3), torch.tensor([[0, 1, 2, END, END, END]])
    hits = prior.table[:3].argmax(-1).bincount(minlength=3) / 3
    torch.testing.assert_close(prior.scores(tokens)[0], hits.double())
    torch.testing.assert_close(fitted(3, by="average").scores(tokens)[0], prior.table[:3].mean(0))
    padded = fitted(3, by="average", padding=True)
    torch.testing.assert_close(padded.scores(tokens)[0], padded.table[tokens[0]].mean(0))
    entropy = torch.special.entr(prior.table[:3].softmax(-1)).sum(-1)
    kept = fitted(3, by="average", keep=1).scores(tokens)[0]
    torch.testing.assert_close(kept, prior.table[int(entropy.argmin())])
    assert prior.scores(torch.tensor([[END, END]])).tolist() == [[0.0] * 3]


def test_the_control_is_naive_bayes() -> None:
    counts = [torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0])]
    torch.testing.assert_close(bayes_table(counts).exp(), torch.tensor([[4 / 5, 1 / 2], [1 / 5, 1 / 2]]))


def test_one_domain_is_refused(tmp_path: Path) -> None:
    run = write_ensemble(tmp_path, {"prior": "votes"})
    known = manifest.read(run)
    manifest.write(run, known.model_copy(update={"members": known.members[:1]}))
    with pytest.raises(UserError, match=r"experts\.mixture\.prior = 'votes': a router needs two domains, and 'digits'"):
        Ensemble(run)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prior": "ridge", "votes": {"keep": 4}}, "prior = 'ridge' has no votes"),
        ({"prior": "votes", "votes": {"by": "bayes", "ridge": 1.0}}, "votes.ridge: by = 'bayes'"),
    ],
)
def test_unused_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        MixtureSpec.model_validate(fields)
