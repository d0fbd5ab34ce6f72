"""Servers that draw completions, as real processes over HTTP."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.models.llama_stages import Llama
from planaria.swarm.commands.swarm import prepare
from planaria.swarm.completions.client import BadReply, Client, parse_completions
from planaria.swarm.completions.remote_sampling import Backoff, RemoteSampler
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.policy.base import SampledCompletion
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from planaria.swarm.policy.reading import read_completions
from support.swarm.swarms import openai_server, rounds, together
from support.swarm.tiny_swarm import MODEL, byte_tokenizer, policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "model"
    LlamaPolicy(Llama(MODEL.model_copy(update={"context": 48, "init_std": 0.05}), seed=1), byte_tokenizer()).export(
        made
    )
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Of the process that all tests here talk to."""
    with openai_server(folder) as url:
        yield url


@pytest.fixture
def serve(address: str, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The URL of a server of this test's own with a habit."""
    who = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return lambda habit: f"{address}/{who}+{habit}/v1"


def swarm(folder: Path, url: str, size: int = 1, count: int = 4, **policy: Any) -> SwarmConfig:
    options = {"path": str(folder), **policy.pop("options", {})}
    sections: dict[str, Any] = {
        "size": size,
        "policy": {"kind": "pretrained", "options": options, "server": url, **policy},
        "rounds": {"count": count, "prompts": 3, "group": 4, "keep": 0},
        "sampling": {"max_new": 8},
        "defence": {"checks": "claims"},
        "optim": {"lr": 0.05},
        "evaluate": {"every": 0, "problems": 4},
    }
    return SwarmConfig.model_validate(sections)


def server_of(config: SwarmConfig, place: Path) -> tuple[RemoteSampler, LlamaPolicy]:
    options = config.policy.options
    policy = open_policy(str(options["path"]), options.get("lora", 0))
    assert isinstance(policy, LlamaPolicy)
    return RemoteSampler(config, policy, place / "served", "p0"), policy


Start = Callable[..., tuple[RemoteSampler, LlamaPolicy]]


@pytest.fixture
def start(folder: Path, tmp_path: Path, serve: Callable[[str], str]) -> Start:
    """Start a server with a habit for a policy with these settings."""
    return lambda habit, **policy: server_of(swarm(folder, serve(habit), **policy), tmp_path)


def learn(policy: LlamaPolicy, amount: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(amount * torch.randn(parameter.shape, generator=generator))


PROMPTS = [[49, 43, 50, 61], [51, 43, 52, 61], [55]]


def off(policy: LlamaPolicy, drawn: list[list[SampledCompletion]]) -> float:
    """Nats between what the server claims and what the policy finds, of the token where that is most."""
    pairs = [
        (prompt, [*one.ids, *([policy.end] if one.ended else [])])
        for prompt, group in zip(PROMPTS, drawn, strict=True)
        for one in group
    ]
    claims = [torch.tensor(one.logps) for group in drawn for one in group]
    found = [torch.from_numpy(reading.logps) for reading in read_completions(policy, pairs, 1.0)]
    return max(float((a - b).abs().max()) for a, b in zip(claims, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["tokens", "named", "llamacpp", "one"])
def test_tokens_and_log_probabilities_are_parsed_in_every_format(start: Start, habit: str) -> None:
    server, policy = start(habit)
    drawn = server.draw(0, PROMPTS, 4)
    assert drawn is not None and [len(group) for group in drawn] == [4, 4, 4]
    assert all(one.logps for group in drawn for one in group) and server.last_stats.claimed == 1
    assert off(policy, drawn) < 1e-4 and server.draw(0, PROMPTS, 4) == drawn, "the seed decides"
    found = server.last_stats
    assert found.tokens == sum(len(o.ids) + o.ended for g in drawn for o in g) and found.speed > 0
    assert found.requests == (12 if habit == "one" else 3) and not found.local


@pytest.mark.slow
def test_a_server_without_token_ids_is_used_without_claims(start: Start) -> None:
    server, _ = start("mute")
    drawn = server.draw(0, PROMPTS, 2)
    assert drawn is not None and not any(one.logps for group in drawn for one in group)
    assert server.last_stats.claimed == 0


@pytest.mark.parametrize(("habit", "options"), [("tokens", {"lora": 2}), ("weights", {})])
def test_new_weights_are_pushed_before_the_next_round(
    start: Start, folder: Path, tmp_path: Path, serve: Callable[[str], str], habit: str, options: dict[str, int]
) -> None:
    server, policy = start(habit, options=options, behind=0)
    for number in range(4):
        drawn = server.draw(number, PROMPTS, 3)
        assert drawn is not None and server.last_stats.behind == 0, server.last_stats
        assert off(policy, drawn) < 1e-4, f"round {number}"
        learn(policy)
        assert off(policy, drawn) > 0.01, "they did learn"
    assert len(list((tmp_path / "served").iterdir())) == 2, "old versions do not pile up"
    if options:
        client = Client(swarm(folder, serve(habit)).policy)
        assert client.model("") == "base" and client.model("planaria-p0-000003")
        with pytest.raises(UserError, match="no such model"):
            client.model("planaria-p0-000001")


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_staleness_never_exceeds_the_bound(start: Start, behind: int) -> None:
    server, _ = start("fixed", behind=behind)
    server.start_at(5)
    for number in range(5, 11):
        drawn = server.draw(number, PROMPTS[:1], 1)
        assert (drawn is not None) == (number - 5 <= behind)
        if drawn is None:
            assert f"the limit is {behind} (policy.max_staleness_rounds)" in server.last_stats.local
        assert server.last_stats.behind == number - 5 and bool(server.last_stats.unpushed) == (number > 5)
    assert "404" in server.last_stats.unpushed


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("broken", r"answered with 500 \(out of memory\)"),
        ("garbage", "answered with invalid JSON"),
        ("empty", "has no choices"),
        ("huge", "a reply of more than"),
        ("drips", "took too long"),
    ],
)
def test_a_failing_server_is_replaced_and_backed_off(start: Start, habit: str, reason: str) -> None:
    server, _ = start(habit, serving={"timeout_s": 1.5, "push": "never"}, behind=99)
    assert server.draw(0, PROMPTS, 2) is None
    assert re.search(reason, server.last_stats.local), server.last_stats.local
    overlapped = []
    for number in range(1, 5):
        assert server.draw(number, PROMPTS, 2) is None
        overlapped.append("next request in round" not in server.last_stats.local)
    assert overlapped == [True, False, True, False]


def test_backoff_doubles_up_to_a_bound_and_ends_with_success() -> None:
    rest = Backoff()
    for number in range(10):
        rest.record_failure(number)
    assert rest.until == 9 + 16
    rest.reset()
    rest.record_failure(20)
    assert rest.until == 21


def test_the_token_is_sent_and_never_logged(
    folder: Path, tmp_path: Path, serve: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame")
    config = swarm(folder, serve("token"), serving={"token": "MY_TOKEN"})
    server, _ = server_of(config, tmp_path)
    assert server.draw(0, PROMPTS, 1) is not None
    assert "sesame" not in config.model_dump_json() + server.last_stats.model_dump_json()
    monkeypatch.setenv("MY_TOKEN", "melon")
    other, _ = server_of(config, tmp_path)
    assert other.draw(0, PROMPTS, 1) is None
    assert other.last_stats.local == "/v1/completions was answered with 401 (who [31m are you?)"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"url": "http://127.0.0.1:1/v1"}, r"policy.server = 'http://127.0.0.1:1': /v1/models failed .*check its URL"),
        ({"url": "http://:80"}, "not the URL of a server"),
        ({"serving": {"token": "NO_SUCH_VARIABLE"}}, "the environment has no such variable"),
        ({"serving": {"model": "bass"}}, r"policy.serving.model = 'bass': the server has no such model; did you mean"),
        ({"serving": {"push": "adapters"}}, r"push = 'adapters': no adapters are trained; set policy.options.lora"),
    ],
)
def test_server_mistakes_are_reported_before_any_round(
    folder: Path, tmp_path: Path, serve: Callable[[str], str], policy: dict[str, Any], message: str
) -> None:
    config = swarm(folder, policy.pop("url", serve("")), **policy)
    with pytest.raises(UserError, match=message):
        server_of(config, tmp_path)
    if "push" not in str(policy):
        with pytest.raises(UserError, match=message):
            prepare(config, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"server": "ftp://x"}}, "policy.server"),
        ({"policy": {"server": "http://user:pass@x"}}, "policy.server"),
        ({"policy": {"serving": {"model": "x"}}}, "no effect without policy.server"),
        ({"policy": {"server": "http://x"}, "sampling": {"temperature": 0.7}}, "at temperature 1"),
        ({"policy": {"server": "http://x"}, "attack": {"kind": "text"}}, "attacker cannot use a server"),
    ],
)
def test_contradictory_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwarmConfig.model_validate(changes)


@pytest.mark.slow
def test_two_peers_learn_from_stale_server_draws(folder: Path, tmp_path: Path, serve: Callable[[str], str]) -> None:
    """One has a server that cannot load anything: two rounds of its weights, then its own. Both finish all rounds."""
    config = swarm(folder, "", size=2, count=4)
    own = {"policy": {"server": serve("fixed"), "max_staleness_rounds": 1}}
    # Unsolved problems reward shorter completions, so there are lessons.
    lengths = {"loss": {"overlong": 23}, "sampling": {"max_new": 24, "top_k": 257}}
    config = SwarmConfig.model_validate(config.model_dump(mode="json") | {"peers": {"p0": own}} | lengths)
    together(config, tmp_path)
    mine, others = rounds(tmp_path, "p0"), rounds(tmp_path, "p1")
    assert len(mine) == len(others) == 4
    assert all(record.serving is None for record in others.values())
    found = [mine[number].serving for number in range(4)]
    assert [one is not None and bool(one.local) for one in found] == [False, False, True, True]
    first, second = (one for one in found[:2] if one is not None)
    assert (first.behind, second.behind, first.claimed) == (0, 1, 1.0) and first.tokens > 0
    assert len({record.weights for record in mine.values()}) > 1, "it learned"
    assert {number: mine[number].weights for number in range(4)} == {
        number: others[number].weights for number in range(4)
    }
    assert all(
        record.layers["claims"] == {} or not any(found.rejected for found in record.layers["claims"].values())
        for record in others.values()
    )


def test_token_texts_become_ids_if_tokenizers_agree() -> None:
    logprobs = {"tokens": ["o", "k", ""], "token_logprobs": [-1.0, -2.0, -0.5]}
    (drawn,) = parse_completions({"choices": [{"text": "ok", "finish_reason": "stop", "logprobs": logprobs}]}, WORDS, 8)
    assert drawn == SampledCompletion((111, 107), True, (-1.0, -2.0, -0.5))
    other = {"tokens": ["ok", ""], "token_logprobs": [-1.0, -0.5]}
    (drawn,) = parse_completions({"choices": [{"text": "ok", "finish_reason": "stop", "logprobs": other}]}, WORDS, 8)
    assert drawn == SampledCompletion((111, 107), True), "its tokens are others"


WORDS = policy()
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tokens", "token_logprobs", "content", "id", "logprob", "text"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.fixed_dictionaries(
        {
            "text": st.text(st.characters(max_codepoint=127), max_size=6),
            "finish_reason": st.sampled_from(["stop", "length", None]),
        },
        optional={"token_ids": st.lists(st.integers(-2, 260), max_size=9) | json, "logprobs": json},
    )
)
def test_any_reply_is_a_bounded_completion_or_a_bad_reply(choice: dict[str, Any]) -> None:
    try:
        (drawn,) = parse_completions({"choices": [choice]}, WORDS, 8)
    except BadReply:
        return
    assert len(drawn.ids) + drawn.ended <= 8 and all(0 <= i < 257 for i in drawn.ids) and 256 not in drawn.ids
    assert not drawn.logps or len(drawn.logps) == len(drawn.ids) + drawn.ended
    assert all(-1e4 <= p <= 0 for p in drawn.logps)
