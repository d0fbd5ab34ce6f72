"""Settings without effect in a run are rejected or reported, not silently ignored.

This applies to the start of a run. A resumed run, or an arm of a comparison, may keep settings that it does not need. A
recipe may have fleet settings for ``inline``, and settings of replicas for one replica, so that a study can train it
both ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from planaria.common.errors import UserError
from planaria.config.recipe import fields
from planaria.config.schema import RunConfig
from planaria.exchange.registry import make_exchange, too_few_steps
from planaria.faults.trace import CORRUPT_UPDATE, FATAL, LAGGING, Trace
from planaria.models.bf16_weights import copied_bytes
from planaria.models.families import build_stage
from planaria.models.optimizers import make_optimizer
from planaria.runtime.resolved_run import ResolvedRun

Used = Callable[[RunConfig], bool]


def _skips(config: RunConfig) -> bool:
    return config.routing.kind == "skipping" or config.routing.schedule is not None


def _has_standby(config: RunConfig) -> bool:
    return config.fleet.standby != "off" or config.fleet.shared_log is not None


def _straggles(config: RunConfig) -> bool:
    return config.engine == "fleet" and config.network.emulate is True and config.exchange.replicas > 1


def _admits(config: RunConfig) -> bool:
    alone = config.exchange.replicas == 1 or (
        config.engine == "fleet" and not make_exchange(config.exchange).exchanges_gradients
    )
    return alone and config.routing.schedule is None


def _refuses(config: RunConfig) -> bool:
    rule = make_exchange(config.exchange)
    refuses = (rule.has_rounds or (rule.exchanges_gradients and rule.tolerated > 0)) and not config.exchange.coded
    return config.exchange.replicas == 1 or refuses


def _casts_matrices(config: RunConfig) -> bool:
    block = build_stage(config.model, config.pipeline.stages, 1, 0, "meta")
    return config.train.precision == "bf16" and copied_bytes(block) > 0


SKIPPING = "only routing.kind = 'skipping' uses it, and a schedule that `planaria plan` made with it (routing.schedule)"
STRAGGLING = "only replicas on a fleet with network.emulate = true straggle"
FAMILY = "this model.family cannot recompute activations"
TEXTS = "it is for dialogues, and these are texts; for dialogues at a URL or of a hub dataset, set data.format"
RULES: dict[str, tuple[Used, str]] = {
    "data.source": (lambda c: not c.data.mixture, "data.mixture names the sources"),
    "data.max_chars": (lambda c: not c.data.mixture, "with data.mixture, each source has its own"),
    "data.format": (lambda c: not c.data.mixture, "with data.mixture, each source has its own"),
    "data.learn": (lambda c: c.data.dialogues, TEXTS),
    "data.pack": (lambda c: c.data.dialogues, TEXTS),
    "data.template": (lambda c: c.data.dialogues, TEXTS),
    "data.tokenization": (
        lambda c: not all(source.dialogues for source in c.data.sources.values()),
        "it is for texts, and these are dialogues",
    ),
    "pipeline.in_flight": (
        _admits,
        "a schedule, and replicas that add up gradients or share a process, admit microbatches by another rule",
    ),
    "routing.skip": (_skips, SKIPPING),
    "routing.swaps": (_skips, SKIPPING),
    "routing.max_jump": (_skips, SKIPPING),
    "routing.data_nodes": (lambda c: c.routing.schedule is not None, "it is for `planaria plan`, and its schedule"),
    "routing.wait_for_gradient_sums": (
        lambda c: c.routing.schedule is not None,
        "it is for `planaria plan`, and its schedule",
    ),
    "routing.search": (lambda c: c.routing.schedule is not None, "it is for `planaria plan`, and its schedule"),
    "routing.routes": (lambda c: c.routing.kind == "given", "only routing.kind = 'given' uses them"),
    "routing.mixed": (lambda c: c.exchange.replicas > 1, "there is one replica; set exchange.replicas"),
    "exchange.strikes": (_refuses, "no replica rejects another's updates in this run"),
    "optim.beta2": (lambda c: "beta2" not in make_optimizer(c.optim).unused, "this optim.kind does not use it"),
    "optim.eps": (lambda c: "eps" not in make_optimizer(c.optim).unused, "this optim.kind does not use it"),
    "optim.clip_by": (lambda c: c.optim.clip > 0, "optim.clip = 0 disables clipping"),
    "train.bf16_weights": (_casts_matrices, "only train.precision = 'bf16' with trained matrices of layers uses it"),
    "train.recompute": (lambda c: hasattr(build_stage(c.model, c.pipeline.stages, 1, 0, "meta"), "recompute"), FAMILY),
    "checkpoint.background": (
        lambda c: c.checkpoint.every != 0,
        "the save at the end, the only one with checkpoint.every = 0, is not in the background",
    ),
    "optim.final_lr": (lambda c: c.optim.schedule != "constant", "only optim.schedule = 'cosine' or 'wsd' ends there"),
    "train.schedule_steps": (lambda c: c.optim.schedule != "constant", "a constant learning rate has no end"),
    "optim.decay": (lambda c: c.optim.schedule == "wsd", "only optim.schedule = 'wsd' has a decay"),
    "fleet.join_s": (
        lambda c: c.fleet.local_workers is not None,
        "only a run with fleet.local_workers waits for machines to join",
    ),
    "fleet.orphan_s": (_has_standby, "only a run with fleet.standby or fleet.shared_log uses it"),
    "fleet.lease_s": (_has_standby, "only a run with fleet.standby or fleet.shared_log uses it"),
    "fleet.standby_at": (lambda c: c.fleet.shared_log is not None, "only a run with fleet.shared_log uses it"),
    "fleet.address": (lambda c: c.fleet.kind == "ray", "only fleet.kind = 'ray' has one"),
    "fleet.gpu_share": (
        lambda c: c.fleet.kind == "ray" and c.train.device == "cuda",
        "only fleet.kind = 'ray' with train.device = 'cuda' reserves GPUs",
    ),
    "network.straggle_probability": (_straggles, STRAGGLING),
    "network.straggle_factor": (_straggles, STRAGGLING),
    "network.straggle_s": (lambda c: _straggles(c) and c.network.straggle_probability > 0, STRAGGLING),
}


def require_used(config: RunConfig) -> None:
    """Raise UserError for the first setting that would be ignored."""
    for name, why in unused(config):
        raise UserError(f"{name} = {_value(config, name)!r}: {why}; remove it")


def unused(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield each changed setting that has no effect, with the reason."""
    usual = RunConfig()
    for name, _ in fields():
        if _value(config, name) == _value(usual, name):
            continue
        if name in RULES and not RULES[name][0](config):
            yield name, RULES[name][1]


def without_effect(run: ResolvedRun, trace: Trace) -> Iterator[str]:
    """Yield a line about settings and faults that have no effect in this run."""
    config, usual = run.config, RunConfig()
    names = [name for name, _ in fields() if _value(config, name) != _value(usual, name)]
    exchanged = [name for name in names if name.startswith("exchange.") and name != "exchange.max_replicas"]
    if exchanged and config.exchange.replicas == 1:
        yield f"{', '.join(exchanged)}: for several replicas; this run has one"
    if line := too_few_steps(config):
        yield f"{line}; lower the first, or raise the second"
    several = {"network.emulate", "checkpoint.background", "exchange.patience_s"}
    several |= {"exchange.strikes"} if config.routing.mixed else set()
    fleet = [name for name in names if name.startswith("fleet.") or name in several]
    if fleet and config.engine == "inline":
        yield f"{', '.join(fleet)}: for workers in separate processes; engine 'inline' has none"
    elif config.fleet.diagnose == "act" and not config.fleet.spares and config.fleet.local_workers is None:
        yield "fleet.diagnose = 'act': without spares, slow workers are only reported"
    kept = {*FATAL, CORRUPT_UPDATE, "flip", *(LAGGING if config.exchange.coded else ())}
    left_out = Counter(fault.signal for fault in trace.faults if fault.signal not in kept)
    if left_out and config.engine == "inline":
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
        yield f"faults left out: {kinds}; they need workers in separate processes; engine 'inline' has none"


def _value(config: RunConfig, name: str) -> object:
    setting: object = config
    for part in name.split("."):
        setting = getattr(setting, part)
    return setting
