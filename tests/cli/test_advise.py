"""``planaria advise``: strategies on short and long runs, codecs between stages (``--wire``), and machines to use."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from planaria import cli
from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.lab.commands.advise_machines import practically_fastest
from planaria.lab.commands.advise_wire import WIRES, weigh_wires
from planaria.lab.commands.advised_command import deployed, train_command
from planaria.lab.commands.machine_strategies import not_weighed, weigh_machines
from planaria.lab.commands.placed_strategy import Strategy
from planaria.pipeline.network.topology import Topology, read
from planaria.runtime.prediction.memory import combined_peak, stage_memory
from planaria.runtime.prediction.preflight_table import stated_step_s
from planaria.runtime.resolved_run import ResolvedRun
from support.command_line import refused


def advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["advise", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_advice_on_a_short_run_is_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    out = advice(capsys, "demo")
    head = next(line for line in out.splitlines() if "recovery.strategy" in line)
    assert "seconds" in head and "hours" not in out
    found = re.search(r"^advice +[^:]+: ([\d.]+) seconds ", out, re.MULTILINE)
    assert found is not None and 50 < float(found[1]) < 70
    assert re.search(r"  [1-9]\d\.\d\d … [1-9]\d\.\d\d  ", out), "four digits tell the strategies apart"
    assert "equivalent  " in out
    doubted = r"^unknown +checkfree_plus: raced with 0.34 million parameters, .+; at the same cost [\d.]+ seconds$"
    assert re.search(doubted, out, re.MULTILINE)


def test_missing_network_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "advise", "gossip")
    assert "network.store_bandwidth" in line and "set each in [network]" in line


PRICES = {
    "network.forward_s": "[0.01, 0.02, 0.02, 0.02, 0.02]",
    "network.backward_s": "[0.02, 0.04, 0.04, 0.04, 0.04]",
    "network.latency_s": "0.02",
}


def advised(capsys: pytest.CaptureFixture[str], *words: str, bandwidth: str = "1.25e6") -> str:
    flags = [word for name, value in PRICES.items() for word in (f"--{name}", value)]
    assert cli.run(["advise", "demo", "--wire", "--network.bandwidth", bandwidth, *flags, *words]) == 0
    return capsys.readouterr().out


def test_on_slow_links_fewer_bits_and_on_fast_ones_none_are_advised(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = advised(capsys), advised(capsys, bandwidth="1.25e9")
    assert "fastest       4/4: " in slow
    assert re.search(r"^command +planaria train .*demo\.toml .*--pipeline\.wire 4/4", slow, re.MULTILINE)
    assert "not compared with your machines" in slow
    one_machine = advised(capsys, bandwidth="1e3")
    assert "advice        one machine" in one_machine and "--engine inline" in one_machine
    for out in (slow, fast, one_machine):
        (command,) = re.findall(r"^command +planaria (.*)$", out, re.MULTILINE)
        assert cli.run([*shlex.split(command), "--dry-run"]) == 0
    assert "advice        bf16: fewer bits make a step less than 1% shorter" in fast
    for wire in WIRES:
        assert f"  {wire} " in slow


def test_small_messages_prefer_larger_microbatches() -> None:
    network = {"forward_s": [0.0], "backward_s": [0.0], "bandwidth": 25e6, "latency_s": 0.05, "inbound": "shared",
               "latency_queued": True}  # fmt: skip
    pipeline = {"stages": 4, "microbatches": 32, "microbatch_size": 2}
    config = RunConfig.model_validate(
        {"network": network, "pipeline": pipeline, "model": {"context": 1024, "dim": 1024}}
    )
    found = {choice.wire: choice for choice in weigh_wires(config).choices}
    assert found["fp32"].config.pipeline.microbatch_size <= found["6/4"].config.pipeline.microbatch_size
    assert found["6/4"].step_s <= found["6/4"].own_s
    steps = [found[wire].step_s for wire in WIRES]
    assert steps == sorted(steps, reverse=True)


def test_missing_costs_are_named(tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text("[pipeline]\nstages = 2\n")
    with pytest.raises(UserError, match=r"advice needs network\.forward_s, network\.backward_s, network\.bandwidth;"):
        cli.run(["advise", str(tmp_path / "bare.toml"), "--wire"])
    with pytest.raises(UserError, match="--compress and --wire: are separate questions"):
        cli.run(["advise", "demo", "--wire", "--compress"])


NODES = """
[[nodes]]
site = "Bern"
memory_gb = {memory}
price_per_hour = 0.5

[[nodes]]
site = "Oslo"
memory_gb = {memory}
price_per_hour = 0.125

[[nodes]]
site = "Rome"
speed = 0.5
memory_gb = {memory}
"""


def household(
    folder: Path, mbit: float, memory: float = 24, nodes: str = NODES, sites: Sequence[str] = ("Bern", "Oslo", "Rome")
) -> Path:
    """Write a topology with equal links of 10 ms."""
    links = "".join(
        f'[[link]]\nid = "{a}{b}"\nsites = ["{a}", "{b}"]\nlatency_ms = 10\nbandwidth_mbit = {mbit}\n'
        for a, b in combinations(sites, 2)
    )
    (path := folder / "homes.toml").write_text(links + nodes.format(memory=memory))
    return path


def home_recipe(**network: object) -> RunConfig:
    network = {"forward_s": [0.0, 0.2, 0.2], "backward_s": [0.0, 0.4, 0.4]} | network
    pipeline = {"stages": 2, "microbatches": 8, "microbatch_size": 4, "wire": "bf16"}
    model = {"dim": 512, "layers": 4, "heads": 4, "context": 512}
    return RunConfig.model_validate({"network": network, "pipeline": pipeline, "model": model})


def on_homes(capsys: pytest.CaptureFixture[str], homes: Path, *words: str) -> str:
    costs = ["--network.forward_s", "[0.0, 0.2]", "--network.backward_s", "[0.0, 0.4]", "--pipeline.stages", "1"]
    assert cli.run(["advise", "demo", "--wire", "--network.topology", str(homes), *costs, *words]) == 0
    return capsys.readouterr().out


def test_on_slow_links_one_machine_and_on_fast_ones_several_are_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = on_homes(capsys, household(tmp_path, mbit=0.01))
    assert "advice        Bern 1 alone" in slow and "no pipeline and no exchange over these links is faster" in slow
    fast = on_homes(capsys, household(tmp_path, mbit=10_000))
    assert re.search(r"^advice +(pipeline|2 replicas)", fast, re.MULTILINE)
    assert re.search(r"^one machine +Bern 1 alone: .* the advice takes 0\.\d+ of it$", fast, re.MULTILINE)
    assert "cheapest      Rome 1 alone: 0.00" in fast


def test_strategies_that_exceed_a_machines_memory_are_not_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = on_homes(capsys, household(tmp_path, mbit=1000, memory=0.25))
    assert "advice        none" in out
    reason = r"needs [\d.]+ GB; Bern 1 has 0.25 GB, 0.23 GB usable: (set|lower|choose|train) .+"
    assert re.search(rf"^does not fit +Bern 1 alone: {reason}$", out, re.M)


def test_a_pipeline_uses_the_machines_that_hold_a_model_too_large_for_one(tmp_path: Path) -> None:
    config = home_recipe()
    config = config.model_copy(update={"model": config.model.model_copy(update={"dim": 2048, "vocab": 1024})})
    least = {one.name: one for one in weigh_machines(config, read(household(tmp_path, 1000, 0.001)))}
    alone, pipeline = least["Bern 1 alone"].peak, least["pipeline, 6/4"].peak
    assert least["Bern 1 alone"].config.pipeline.microbatch_size == 1
    assert alone is not None and pipeline is not None and pipeline < alone
    between = (alone + pipeline) / 2 / 0.92e9
    best, *_ = weigh_machines(config, read(household(tmp_path, 1000, between)))
    assert best.name.startswith("pipeline") and not best.obstacle


def test_equal_machines_have_the_step_of_equal_links(tmp_path: Path) -> None:
    """All of ``network.topology`` against ``network.bandwidth`` and ``network.latency_s``."""
    config = home_recipe(bandwidth=1e6, latency_s=0.01, inbound="shared")
    homes = household(tmp_path, mbit=8, nodes=NODES.replace("speed = 0.5", ""))
    steps = {one.name: one.step_s for one in weigh_machines(_only_two_stages(config), read(homes))}
    expected = {choice.wire: choice.step_s for choice in weigh_wires(_only_two_stages(config)).choices}
    for wire in ("bf16", "8/8", "6/4"):
        assert steps[f"pipeline, {wire}"] == pytest.approx(expected[wire])


def _only_two_stages(config: RunConfig) -> RunConfig:
    """Stages of unequal cost cannot be divided differently."""
    network = config.network.model_copy(update={"forward_s": [0.0, 0.2, 0.2000001]})
    return config.model_copy(update={"network": network})


def test_faster_machines_take_the_larger_share_and_more_than_seven_are_refused(tmp_path: Path) -> None:
    config = home_recipe(forward_s=[0.0, 0.2, 0.1], backward_s=[0.0, 0.4, 0.2])
    topology = read(household(tmp_path, mbit=10_000))
    pipeline = next(one for one in weigh_machines(config, topology) if one.name == "pipeline, 6/4")
    assert pipeline.machines[1].speed == 1.0 and pipeline.machines[0].name == "Rome 1", "stage 0 is free here"
    with pytest.raises(UserError, match="8 nodes; advice weighs every order of at most 7"):
        weigh_machines(config, Topology(topology.nodes[:1] * 8, topology.links))


def test_slower_machines_hold_fewer_layers_and_the_advised_command_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["recipes", "demo", "--to", str(mine := tmp_path / "mine.toml")]) == 0
    nodes = NODES.replace("speed = 0.5", "speed = 0.3").replace('site = "Oslo"', 'site = "Oslo"\nspeed = 0.5')
    costs = ["--network.forward_s", "[0.02]", "--network.backward_s", "[0.04]", "--model.layers", "8"]
    homes = household(tmp_path, mbit=10_000, nodes=nodes)
    capsys.readouterr()
    assert cli.run(["advise", str(mine), "--wire", "--network.topology", str(homes), *costs]) == 0
    out = capsys.readouterr().out
    (command,) = re.findall(r"^command +planaria (.*)$", out, re.MULTILINE)
    assert "--pipeline.layers '[6, 1]'" in command and "recovery      from checkpoints; 'checkfree' does not" in out
    assert "machines      Oslo 1: the ends, layer 0; Bern 1: stage 1 (layers 1–6); Rome 1: stage 2 (layer 7)" in out
    assert "then on Bern 1, Rome 1 in any order (the run times all; " in out
    assert "--model.layers 8" in command
    assert cli.run([*shlex.split(command), "--dry-run"]) == 0


def test_of_practically_equal_pipelines_the_one_with_more_bits_is_advised(tmp_path: Path) -> None:
    found = {}
    for mbit in (10_000, 20):
        weighed = weigh_machines(home_recipe(), read(household(tmp_path, mbit)))
        pipelines = [one for one in weighed if one.name.startswith("pipeline")]
        found[mbit] = pipelines[0].name, practically_fastest(pipelines).name
    assert found == {10_000: ("pipeline, 6/4", "pipeline, bf16"), 20: ("pipeline, 6/4", "pipeline, 6/4")}


COSTS = {"network.forward_s": "[0.02]", "network.backward_s": "[0.04]"}


def commanded(strategy: Strategy, topology: Topology) -> RunConfig:
    """Return the configuration of the command that is printed for a strategy on the demo's recipe."""
    path = shipped.find("demo")
    command = train_command(path, recipe.load(path, COSTS, "train"), deployed(strategy, topology), COSTS)
    words = shlex.split(command)
    assert cli.run([*words[1:], "--dry-run"]) == 0
    names, texts = words[3::2], words[4::2]
    return recipe.load(path, {name.removeprefix("--"): text for name, text in zip(names, texts, strict=True)}, "train")


def test_the_command_of_every_strategy_makes_the_run_that_was_weighed(tmp_path: Path) -> None:
    topology = read(household(tmp_path, mbit=100))
    weighed = weigh_machines(recipe.load(shipped.find("demo"), COSTS, "train"), topology)
    kinds = {"Rome 1 alone", "pipeline, bf16", "2 replicas, noloco, every 50", "2 replicas, allreduce"}
    chosen = [strategy for strategy in weighed if strategy.name in kinds]
    assert len(chosen) == len(kinds)
    for strategy in chosen:
        run = commanded(strategy, topology)
        workers = run.fleet.local_workers or 1
        assert combined_peak(run, stage_memory(run), workers) == strategy.peak
        step_s, replicas = stated_step_s(ResolvedRun(run)), run.exchange.replicas
        assert run.samples == 32 and step_s is not None
        if replicas == 1:
            assert step_s == pytest.approx(strategy.step_s, rel=0.02)
        else:  # the time of exchanges is not stated before a run
            assert run.pipeline.stages == 1 and workers == 2 and step_s < strategy.step_s
        assert run.chaos.trace is None


def test_one_machine_and_replicas_are_weighed_with_smaller_microbatches(tmp_path: Path) -> None:
    config = home_recipe()
    usual = {one.name: one for one in weigh_machines(config, read(household(tmp_path, 100)))}
    least = {one.name: one for one in weigh_machines(config, read(household(tmp_path, 100, 0.001)))}
    for name in ("Bern 1 alone", "2 replicas, noloco, every 50"):
        peak = least[name].peak
        assert peak is not None and usual[name].config.pipeline.microbatch_size == 4
        tight = read(household(tmp_path, 100, 1.001 * peak / 0.92e9))
        smaller = next(one for one in weigh_machines(config, tight) if one.name == name)
        assert not smaller.obstacle and smaller.config.pipeline.microbatch_size == 1
        assert smaller.config.samples == config.samples
        assert smaller.step_s == pytest.approx(usual[name].step_s)


def test_every_strategy_of_a_replicated_recipe_has_its_samples_per_step(tmp_path: Path) -> None:
    config = recipe.load(shipped.find("gossip"), COSTS, "train")
    topology = read(household(tmp_path, 100))
    weighed = weigh_machines(config, topology)
    assert config.exchange.replicas == 4 and {one.config.samples for one in weighed} == {config.samples}
    (line,) = not_weighed(config, topology, weighed)
    assert line.startswith("replicas, allreduce: exchange.options.every: no option of 'allreduce'")


def test_two_equal_machines_share_the_layers(tmp_path: Path) -> None:
    """The ends take half of the layers; hours count them in both of their visits."""
    nodes = NODES.partition('[[nodes]]\nsite = "Rome"')[0]
    topology = read(household(tmp_path, mbit=10_000, nodes=nodes, sites=("Bern", "Oslo")))
    weighed = {one.name: one for one in weigh_machines(home_recipe(), topology)}
    pipeline = weighed["pipeline, bf16"]
    assert pipeline.config.model.ends_layers == 2 and pipeline.config.network.entry_backward_s > 0
    assert 0.5 < pipeline.step_s / weighed["Bern 1 alone"].step_s < 0.65


def test_equal_stages_join_in_order_and_each_machine_has_one_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers are no replicas."""
    workers = NODES.replace("speed = 0.5", "").replace('site = "Oslo"', 'site = "Oslo"\nrole = "worker"')
    workers = workers.replace('site = "Rome"', 'site = "Rome"\nrole = "worker"')
    homes = household(tmp_path, mbit=10_000, nodes=workers)
    fixed = ["--network.forward_s", "[0.0, 0.2, 0.2001]", "--network.backward_s", "[0.0, 0.4, 0.4]"]
    out = advice(capsys, "demo", "--wire", "--network.topology", str(homes), "--pipeline.stages", "2", *fixed)
    assert "machines      Bern 1: the ends; Oslo 1: stage 1 (layers 0–1); Rome 1: stage 2 (layers 2–3)" in out
    assert "on Bern 1 (ADDRESS: its address), then on Oslo 1, Rome 1 one after the other, in this order:" in out
    assert "planaria join ADDRESS:7001 --key-file key --workers 1" in out


def test_a_reason_names_the_role_and_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roles = NODES.replace("memory_gb", 'role = "worker"\nmemory_gb')
    out = on_homes(capsys, household(tmp_path, mbit=1000, nodes=roles))
    assert "Bern 1 alone or as a replica: its role = 'worker' excludes the ends; set role = 'any'" in out
    assert "pipelines: no machine may hold the ends: all 3 have role = 'worker'" in out
    assert "replicas: 0 machines with role = 'any'; at least 2 are required" in out
    topology = read(household(tmp_path, mbit=1000))
    fixed, two = home_recipe(forward_s=[0.0, 0.1, 0.2]), Topology(topology.nodes[:2], topology.links)
    (line,) = (line for line in not_weighed(fixed, two, []) if line.startswith("pipelines"))
    assert "need 3 machines; there are 2" in line and "network.forward_s" in line


def test_a_rival_within_the_range_lowers_the_confidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = on_homes(capsys, household(tmp_path, mbit=0.01))
    fast = on_homes(capsys, household(tmp_path, mbit=10_000))
    assert "range         1 to 1.15 of the simulated step" in fast
    assert re.search(r"^advice .+ hours \(low confidence\)", fast, re.MULTILINE)
    assert re.search(r"^confidence +low: .+ hours, is within the range of the advice$", fast, re.MULTILINE)
    assert "advice        Bern 1 alone" in alone and "confidence  " not in alone


def test_a_table_as_codec_is_weighed_and_written_as_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = '{backward = 3, forward = 3, kind = "groups"}'
    assert f"  {table} " in advised(capsys, "--pipeline.wire", table)
    assert f"pipeline, {table} " in on_homes(capsys, household(tmp_path, 100), "--pipeline.wire", table)
    slow = on_homes(
        capsys, household(tmp_path, 20), "--pipeline.wire", '{kind="subspace", rank=8}', "--model.tied", "false"
    )
    assert 'pipeline, {kind = "subspace", rank = 8}' in slow


def test_missing_costs_name_the_command_that_measures_them(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "advise", "home_links", "--wire")
    assert "network.forward_s" in line and "`planaria report RUN --waits`" in line


def test_emulation_does_not_change_the_advice_on_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    homes, replicas = household(tmp_path, mbit=100), ("--exchange.replicas", "2")
    slow = ("--network.straggle_probability", "0.1", "--network.straggle_s", "5", "--network.straggle_factor", "2")
    plain, *others = (
        on_homes(capsys, homes, *replicas, *words) for words in ((), ("--network.emulate", "true", *slow), slow)
    )
    for other in others:
        assert other.partition("command ")[0] == plain.partition("command ")[0]
        assert "--network.straggle_probability 0 " in other and "--network.straggle_s none" in other
