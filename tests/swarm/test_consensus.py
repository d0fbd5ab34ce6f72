"""Voting peers: rewards, filters, settings and the limit on accuracy drops."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import RunStopped, UserError
from planaria.config.recipe import read
from planaria.report import page
from planaria.swarm.assemble import make_task
from planaria.swarm.attacks import ATTACKS
from planaria.swarm.checks import make_layers
from planaria.swarm.checks.consensus import ConsensusReward, Filter, check_rewards, labels
from planaria.swarm.checks.defence import Defence
from planaria.swarm.config.swarm_config import DefenceConfig, SwarmConfig
from planaria.swarm.config.swarm_recipe import load
from planaria.swarm.learning.advantages import round_advantages
from planaria.swarm.peer.completion_intake import Scoring
from planaria.swarm.peer.random_draws import seed_from_messages
from planaria.swarm.peer.recovery import accuracy_drop, best_round
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.records.lines import PEERS, UNKNOWN_PEERS, Evaluated, Finished
from planaria.swarm.records.outcome import read_outcome
from planaria.swarm.records.saved_state import saved_rounds
from planaria.swarm.report import swarm_report
from planaria.swarm.report.swarm_verdict import agreement_section
from planaria.swarm.sandbox.sandbox import protections
from planaria.swarm.tasks.base import Behaviour, TaskProblem
from planaria.swarm.tasks.sums import Sums
from support.swarm.swarms import log, peer, rounds, threads, tiny, together, weights
from support.swarm.tiny_swarm import CONTEXT, case

VOTING: dict[str, Any] = {"task": {"reward": "consensus"}, "defence": {"checks": "claims, duplicates"}}
needs_sandbox = pytest.mark.skipif(
    "seccomp" not in protections(), reason="no seccomp: programs are not run here at all"
)


def sent(peer: str, *behaviours: Behaviour, reward: float = 0.0, problem: int = 0) -> list[Rollout]:
    return [
        case(peer, problem, index, f"{peer}{index}", reward, behaviour=behaviour, penalty=-0.25 * index)
        for index, behaviour in enumerate(behaviours)
    ]


def test_the_majority_is_rewarded_and_unlabelled_groups_teach_nothing() -> None:
    defence = Defence(DefenceConfig(), [ConsensusReward(agreement=0.5)], CONTEXT)
    completions = [*sent("p", ("7",), ("8",)), *sent("q", ("7",), ("7",)), *sent("r", ("7",), ())]
    split = [*sent("p", ("1",), problem=1), *sent("q", ("2",), ("3",), problem=1)]
    report = defence.examine(0, completions + split)
    assert [rollout.reward for rollout in report.accepted] == [1, 0, 1, 1, 1, 0, 0, 0, 0]
    assert report.labels.keys() == {0} and not report.quarantined, "no peer is refused for other peers' failures"
    assert {rollout.penalty for rollout in report.accepted if rollout.problem.number == 1} == {0}
    taken = round_advantages(report.accepted, "horizontal", True)
    assert {rollout.problem.number for rollout in taken.rollouts} == {0} and taken.skipped == 1


@pytest.mark.parametrize("invented", [1, 40])
@pytest.mark.parametrize("lie", ["lie", "8"])
def test_unknown_peers_are_rewarded_by_the_label_and_have_no_vote(invented: int, lie: str) -> None:
    known = [*sent("p", ("7",)), *sent("q", ("7",)), *sent("r", ("8",))]
    unknown = [replace(one, account=UNKNOWN_PEERS) for n in range(invented) for one in sent(f"s{n}", ("7",), (lie,))]
    report = Defence(DefenceConfig(), [ConsensusReward(agreement=0.5)], CONTEXT).examine(0, known + unknown)
    assert report.labels[0].values == ("7",) and report.labels[0].share == Fraction(2, 3)
    assert [rollout.reward for rollout in report.rollouts] == [1, 1, 0] + [1, 0] * invented
    assert not labels(unknown, 0.5)


def test_refused_completions_do_not_vote_and_the_judge_reads_rewarded_ones() -> None:
    config = SwarmConfig.model_validate({"task": {"reward": "consensus"}})
    assert [layer.name for layer in make_layers(config)][-3:] == ["duplicates", "consensus", "judge"]
    plain = SwarmConfig.model_validate({"defence": {"checks": "support, duplicates", "consensus": True}})
    assert [layer.name for layer in make_layers(plain)] == ["support", "duplicates", "consensus"]
    assert "consensus" not in [layer.name for layer in make_layers(SwarmConfig())]


def test_the_filter_refuses_passing_minority_behaviour() -> None:
    works, cheats, other = ("a", "b", "c", "d"), (None, None, "x", "x"), ("a", "b", "c", "?")
    passing = [*sent("p", works, works, other, reward=1.0), *sent("q", works, reward=1.0)]
    completions = [*passing, *sent("x", cheats, reward=1.0), *sent("y", cheats)]
    report = Defence(DefenceConfig(), [Filter(agreement=0.5)], CONTEXT).examine(0, completions)
    refused = [(rollout.peer, rollout.reward) for rollout in report.rollouts if rollout.layer == "consensus"]
    assert refused == [("x", 1.0)], "honest programs may differ somewhere, and what fails is learned from as a failure"


def test_the_draw_of_a_round_depends_on_every_text() -> None:
    texts = {"a": ["1", "2"], "b": ["3"]}
    found = seed_from_messages(1, 0, texts.items())
    assert found == seed_from_messages(1, 0, reversed(texts.items()))
    others = [
        {"a": ["1", "2"], "b": ["4"]},
        {"a": ["12"], "b": ["3"]},
        {"a": ["1"], "b": ["2", "3"]},
        {"a": ["1", "2"]},
    ]
    assert (
        len({found, seed_from_messages(1, 1, texts.items()), *(seed_from_messages(1, 0, o.items()) for o in others)})
        == 6
    )


@pytest.mark.slow
def test_voting_peers_stay_equal_and_record_votes(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 8}, shadow=True, **VOTING)
    together(config, tmp_path)
    assert len({tuple(weights(tmp_path, name)) for name in ("p0", "p1", "p2")}) == 1
    votes = [record.agreed for record in rounds(tmp_path, "p0").values()]
    assert all(vote is not None and vote.groups == 4 and vote.right.eligible == vote.labelled for vote in votes)
    assert sum(vote.labelled for vote in votes if vote) and len(set(weights(tmp_path, "p0"))) > 1, "they learn from it"
    text = page.document("votes", swarm_report.body(tmp_path, config, read_outcome(tmp_path)))
    assert "<h2>Agreement</h2>" in text and "Of 3 peers, 2 colluding peers decide" in text
    unvoted = [record.model_copy(update={"agreed": None}) for record in rounds(tmp_path, "p0").values()]
    assert not [*agreement_section(config, {"p0": unvoted})]


@pytest.mark.slow
@needs_sandbox
def test_a_filtered_swarm_ends_with_a_report(tmp_path: Path) -> None:
    line = {"text": "Add 1.", "code": "def f(x):\n    return x + 1", "test_list": ["assert f(1) == 2"]}
    (tmp_path / "adds.jsonl").write_text((json.dumps(line) + "\n") * 3)
    config = SwarmConfig.model_validate(
        {
            "size": 2,
            "policy": {"model": {"context": 96, "dim": 32, "hidden": 64}},
            "warmup": {"steps": 40, "lr": 0.01, "stray_letter_probability": 0.0},
            "task": {"name": "programs", "options": {"path": str(tmp_path / "adds.jsonl")}},
            "rounds": {"count": 1, "prompts": 1, "group": 2, "timeout_s": 60.0},
            "sampling": {"max_new": 50},
            "evaluate": {"every": 0, "problems": 1},
            "defence": {"consensus": True, "checks": ""},
        }
    )
    together(config, tmp_path)
    text = page.document("filter", swarm_report.body(tmp_path, config, read_outcome(tmp_path)))
    assert "<h2>Agreement</h2>" in text and "differ from the majority of those were rejected" in text


@pytest.mark.slow
def test_a_declining_run_stops_with_its_best_state(tmp_path: Path, pupil: Path) -> None:
    config = tiny(
        pupil,
        size=2,
        rounds={"count": 40, "keep": 5, "group": 4},
        evaluate={"every": 4, "problems": 100},
        optim={"lr": 0.3, "warmup": 8, "clip": 0.0},
        task={"reward": "consensus", "brake": 0.05},
        defence={"checks": ""},
    )
    stopped = []

    def run(name: str) -> None:
        try:
            peer(config, name, tmp_path).run()
        except RunStopped as error:
            stopped.append(str(error))

    with threads(lambda: run("p0"), lambda: run("p1")):
        pass
    assert len(stopped) == 2 and all("held-out accuracy fell from" in line and "\n" not in line for line in stopped)
    for name in ("p0", "p1"):
        looks = {r.round: r.accuracy.rate or 0 for r in log(tmp_path, name) if isinstance(r, Evaluated)}
        assert max(looks) < 40 and saved_rounds(tmp_path / PEERS / name) == [best_round(looks)]
        assert not any(isinstance(record, Finished) for record in log(tmp_path, name))


def test_the_brake_compares_with_the_best_so_far() -> None:
    looks = {0: 0.5, 10: 0.8, 20: 0.71, 30: 0.69}
    assert accuracy_drop(looks, 20, 0.1) == ""
    assert "fell from 0.800 after round 10 to 0.690 after round 30" in accuracy_drop(looks, 30, 0.1)


@pytest.mark.parametrize("number", [0, 5, 77])
def test_colluders_agree_without_communication(number: int) -> None:
    task, attack = Sums(), ATTACKS.make("collude", {})
    problem = task.problem(number)
    wrong_texts = {attack.poison(problem, task.solution(problem, random.Random(seed))) for seed in range(3)}
    (wrong_text,) = wrong_texts
    assert wrong_text is not None and task.score(problem, wrong_text) == 0
    assert task.behaviour(problem, wrong_text, 0) == (str(int(problem.answer) + 1),)
    wrapped = attack.poison(problem, "```python\ndef one(): return 1\ndef f(x): return one() + x\n```")
    names: dict[str, Any] = {}
    exec(str(wrapped).split("\n", 1)[1].rpartition("\n")[0], names)
    assert names["f"](2) == [3]
    assert (
        attack.poison(problem, "```python\nprint(3)\n```") is None
        and not attack.eligible(wrong_text)
        and not attack.hit(wrong_text)
    )


def test_an_attacker_sends_wrong_answers(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 1}, peers={"p2": {"attack": {"kind": "collude"}}}, **VOTING)
    together(config, tmp_path)
    assert (tmp_path / PEERS / "p2" / "poison.jsonl").read_text().count("\n") == 8
    (done,) = rounds(tmp_path, "p0").values()
    assert done.agreed is not None and done.agreed.right.hits == done.agreed.right.eligible, "no lie is a label"


@pytest.mark.parametrize(
    ("sections", "fix"),
    [
        ({"rounds": {"mode": "vertical"}, "size": 4}, "task.reward: a vote needs several peers .*rounds.mode"),
        ({"rounds": {"gather": False}}, "task.reward: a vote needs several peers .*rounds.gather"),
        ({"size": 1}, "task.reward: a vote needs several peers .*size = 1"),
        ({"defence": {"consensus": True}}, "defence.consensus needs tests"),
        ({"task": {"reward": "consensus", "agreement": 1.0}}, "task.agreement.*less than 1"),
        ({"task": {"reward": "consensus", "agreement": 0.0}}, "task.agreement.*greater than 0"),
        ({"task": {"max_accuracy_drop": 0.1}, "evaluate": {"every": 0}}, "task.max_accuracy_drop needs evaluations"),
        ({"optim": {"warmup": 5}}, r"set a learning rate \(optim.lr\)"),
    ],
)
def test_contradictory_vote_settings_are_refused_in_one_line(
    tmp_path: Path, sections: dict[str, Any], fix: str
) -> None:
    tree: dict[str, Any] = {"task": {"reward": "consensus"}, "optim": {"lr": 1e-3}, "size": 4} | sections
    lines = [f"{key} = {json.dumps(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path = tmp_path / "voting.toml"
    path.write_text("\n".join(lines))
    assert read(path)
    with pytest.raises(UserError, match=fix) as found:
        load(path, {})
    assert "\n" not in str(found.value)


class Mute(Sums):
    answer = Sums.__mro__[1].answer  # type: ignore[attr-defined]  # of a task that cannot tell


def test_a_task_without_behaviour_cannot_be_voted_on() -> None:
    voting = SwarmConfig.model_validate({"task": {"reward": "consensus"}})
    with pytest.raises(UserError, match="cannot be compared"):
        check_rewards(voting, Mute())
    with pytest.raises(UserError, match="no calls with literal arguments"):
        make_task(SwarmConfig.model_validate({"defence": {"consensus": True}}))


@needs_sandbox
def test_problems_without_tests_need_a_vote_and_have_no_brake(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "def f(x):\n", "entry_point": "f", "calls": ["f(1)", "f(2)"]}) + "\n"
    path = tmp_path / "calls.jsonl"
    path.write_text(line * 3)
    named = {"name": "programs", "options": {"path": str(path)}}
    with pytest.raises(UserError, match="has 2 problems that nothing scores, the first is number 0"):
        make_task(SwarmConfig.model_validate({"task": named}))
    task = make_task(SwarmConfig.model_validate({"task": named | {"reward": "consensus"}}))
    (warning,) = (found for found in [ConsensusReward(agreement=0.5).warning(replace(CONTEXT, task=task))] if found)
    assert "max_accuracy_drop cannot stop" in warning and ConsensusReward(agreement=0.5).warning(CONTEXT) == ""
    with pytest.raises(UserError, match=r"task.max_accuracy_drop = 0.1: no held-out problem"):
        make_task(SwarmConfig.model_validate({"task": named | {"reward": "consensus", "max_accuracy_drop": 0.1}}))


@needs_sandbox
def test_a_lookup_table_of_test_inputs_is_refused(tmp_path: Path) -> None:
    line = {"text": "Square a number.", "test_list": ["assert sq(3) == 9", "assert sq(-4) == 16", "assert sq(0) == 0"]}
    (tmp_path / "squares.jsonl").write_text((json.dumps(line) + "\n") * 2)
    config = SwarmConfig.model_validate(
        {
            "task": {"name": "programs", "options": {"path": str(tmp_path / "squares.jsonl")}},
            "defence": {"consensus": True, "checks": "", "max_median_rejection": 1.0},
        }
    )
    task = make_task(config)
    honest = ["def sq(x): return x * x", "def sq(x): return x ** 2", "def sq(x): return sum([abs(x)] * abs(x))"]
    cheat = "def sq(x): return {3: 9, -4: 16, 0: 0}.get(x, 1)"
    scoring = Scoring(task, config=config)
    scoring.begin(draw=77)
    problem: TaskProblem = task.problem(0)
    completions = [
        case(
            f"p{n}",
            text=program,
            prompted=problem,
            **scoring.score_untimed(problem, f"```python\n{program}\n```")._asdict(),
        )
        for n, program in enumerate([*honest, cheat])
    ]
    assert [one.reward for one in completions] == [1, 1, 1, 1]
    report = Defence(config.defence, make_layers(config), replace(CONTEXT, task=task)).examine(0, completions)
    assert [rollout.layer for rollout in report.rollouts] == ["", "", "", "consensus"]
