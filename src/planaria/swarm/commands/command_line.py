"""The swarm's commands: swarm train, join, show, audit and realign; serve.

Commands import their modules when they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from planaria.cli.flags import DryRun, Quiet, Seed, command, flag, recipe_argument, reject_flags, run_argument, switch
from planaria.cli.http_flags import address, address_option, name_option, token_option
from planaria.cli.settings import Settings
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.config.schema import Section

MODEL = "a swarm's run with --peer, a run, or a model: a folder, a GGUF file, or hf:NAME"
Model = Annotated[str, Argument(metavar="MODEL|RUN", help=MODEL)]
Peer = Annotated[str | None, flag("NAME", "for a swarm's run: the peer whose model to use")]
Round = Annotated[int | None, flag("N", "with --peer: after N rounds (default: the newest saved)", "--round")]
Questions = Annotated[Path | None, flag("FILE", "with --censor: as for `planaria swarm audit`")]
PROTECTED = 'JSONL of {"question", "options", "answer", "parts"}: protected answers'
ADVERSARY = "reader of the replies: a model, counter, or counter:CHANCE (default: counter if possible, else the model)"
AUDITED = "folder of audit.html and audit.json (default: runs/audit-NAME, with the name of the model or run)"
STRATEGIES_HELP = "fine-tune, mask, return to the parent, or interpolate (default tune; mask for fused models)"
PAIRS = 'JSONL of {"prompt", "chosen", "rejected"}: learn the first, measure whether the second is likelier'
BENIGN = 'JSONL of {"text"} to leave unchanged, or a folder of such; one file per domain for fused experts'
MAX_SUCCESS = "maximum success of a repaired model; above it the exit code is 1"


class SwarmSettings(Settings):
    """A command with every field of a swarm's recipe as a flag."""

    def roots(self) -> tuple[type[Section], ...]:
        from planaria.swarm.config.swarm_config import SwarmConfig

        return (SwarmConfig,)


@command("swarm train", cls=SwarmSettings, lasting=True, forks=True)
def _train(
    recipe: Annotated[Path, recipe_argument(kinds=("swarm",))],
    *,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Train peers on each other's completions."""
    from planaria.swarm.commands.swarm import start

    return start(recipe, settings, dry_run, quiet)


@command("swarm join", cls=SwarmSettings, lasting=True, forks=True)
def _join(
    recipe: Annotated[Path | None, recipe_argument("; the rules on the board take precedence", ("swarm",))] = None,
    *,
    model: Annotated[
        str | None, flag("PATH", "a pretrained policy: sets --policy.kind and --policy.options.path")
    ] = None,
    task: Annotated[str | None, flag("NAME", "the same as --task.name")] = None,
    called: Annotated[str, flag("NAME", "this peer's name", "--as")] = "me",
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Join a swarm as one peer."""
    from planaria.swarm.commands.swarm import join_swarm

    kind = None if model is None else "pretrained"
    short = {"policy.kind": kind, "policy.options.path": model, "task.name": task}
    settings = settings | {name: text for name, text in short.items() if text is not None}
    return join_swarm(recipe, settings, called, quiet)


@command("swarm show", lasting=True)
def _show(
    run: Annotated[Path, run_argument("a swarm's run; with --certificate an exported model")],
    *,
    peer: Annotated[str | None, flag("NAME", "peer whose records to read (default p0)")] = None,
    number: Annotated[int | None, flag("N", "only this round", "--round")] = None,
    problem: Annotated[int | None, flag("N", "only this problem, with its completions")] = None,
    source: Annotated[str | None, flag("PEER", "only completions from this peer")] = None,
    rejected: Annotated[bool, switch("--rejected", "only rejected completions")] = False,
    credits: Annotated[bool, switch("--credits", "count accepted completions and debts between peers instead")] = False,
    certificate: Annotated[
        bool, switch("--certificate", "check the certificate next to an exported model instead")
    ] = False,
    board: Annotated[str | None, flag("URL", "with --certificate: it must belong to the run on this board")] = None,
) -> int:
    """Trace the origin of a peer's training completions, count credits, or check a certificate."""
    if credits and certificate:
        raise UserError("--credits is about a run, --certificate about a model; pass one of them")
    if credits or certificate:
        filters = {"peer": peer, "round": number, "problem": problem, "source": source, "rejected": rejected or None}
        reject_flags(filters, f"selects completions; remove --{'credits' if credits else 'certificate'}")
    if not certificate:
        reject_flags({"board": board}, "requires --certificate")
    if credits:
        from planaria.swarm.commands.swarm import show_credits

        show_credits(run)
    elif certificate:
        from planaria.swarm.certificate import verify_certificate

        print(*verify_certificate(run, board), sep="\n")
    else:
        from planaria.swarm.commands.swarm import show_completions

        show_completions(run, peer or "p0", number, problem, source, rejected)
    return 0


@command("swarm audit")
def _audit(
    run_or_model: Model,
    *,
    peer: Peer = None,
    number: Round = None,
    run: Annotated[Path | None, flag("RUN", "for a model: the swarm whose task measures it")] = None,
    watch: Annotated[str, flag("KINDS", "attacks to look for (default: the run's evaluate.watch)")] = "",
    questions: Annotated[Path | None, flag("FILE", PROTECTED)] = None,
    adversary: Annotated[str | None, flag("MODEL", ADVERSARY)] = None,
    k: Annotated[
        int | None, flag("N", "number of parts to ask (default: the minimum over all questions, at most 8)")
    ] = None,
    censor: Annotated[float | None, flag("EPS", "also show the leakage behind `planaria serve --censor`")] = None,
    max_leak: Annotated[float, flag("NATS", "maximum leakage of a question, nats")] = 0.1,
    max_success: Annotated[float, flag("SHARE", "maximum success of an attack")] = 0.02,
    show: Annotated[bool, switch("--show", "also record parts and replies of protected questions")] = False,
    seed: Seed = 0,
    to: Annotated[Path | None, flag("FOLDER", AUDITED)] = None,
) -> int:
    """Check a model before its release; exit code 1 if it does not pass."""
    from planaria.swarm.audit.audit_results import AuditLimits
    from planaria.swarm.commands.audit import audit
    from planaria.swarm.trained_policy import ModelArguments

    target = ModelArguments(run_or_model, peer, number)
    to = to or Path("runs", f"audit-{Path(run_or_model).resolve().name}")
    limits = AuditLimits(leak=max_leak, success=max_success)
    return audit(target, to, run, _kinds(watch), questions, adversary, k, censor, limits, show, seed)


@command("serve")
def _serve(
    run_or_model: Model,
    *,
    peer: Peer = None,
    number: Round = None,
    model_name: Annotated[
        str | None, flag("NAME", "served name of the model (default: its peer's or folder's)")
    ] = None,
    censor: Annotated[
        float | None, flag("EPS", "empty replies at random, so that each leaks at most EPS nats about --questions")
    ] = None,
    questions: Questions = None,
    ledger: Annotated[Path | None, flag("FILE", "with --censor: file of the spent budget")] = None,
    budget: Annotated[
        float | None, flag("NATS", "with --censor: total per question, for all users (default: 8 times EPS)")
    ] = None,
    at: Annotated[str | None, address_option()] = None,
    name: Annotated[list[str] | None, name_option()] = None,
    token_file: Annotated[Path | None, token_option()] = None,
) -> int:
    """Serve a model on this machine, as an OpenAI-compatible server."""
    from planaria.swarm.commands.serve import CensorSettings, serve
    from planaria.swarm.trained_policy import ModelArguments

    wrapper = None
    if censor is None:
        reject_flags({"questions": questions, "ledger": ledger, "budget": budget}, "requires --censor EPS")
    elif questions is None or ledger is None:
        raise UserError(f"--censor {censor:g}: needs --questions FILE and --ledger FILE")
    else:
        wrapper = CensorSettings(censor, questions, ledger, budget)
    where = address(at, name or [], "--at")
    return serve(ModelArguments(run_or_model, peer, number), model_name, wrapper, where, token_file)


@command("swarm realign")
def _realign(
    run: Annotated[str, Argument(metavar="RUN", help="a swarm's run with --peer, or a model: a folder, or hf:NAME")],
    *,
    to: Annotated[Path, flag("FOLDER", "folder to write the model to")],
    by: Annotated[Literal["tune", "mask", "back", "mix"] | None, Option(help=STRATEGIES_HELP)] = None,
    peer: Peer = None,
    number: Round = None,
    safe: Annotated[str | None, flag("MODEL", "the parent (default: from the run or fused.json)")] = None,
    watch: Annotated[str | None, flag("KINDS", "for a run: attacks to remove (default: evaluate.watch)")] = None,
    trusted: Annotated[Path | None, flag("FILE", 'JSONL of {"prompt", "text"} to learn from')] = None,
    pairs: Annotated[Path | None, flag("FILE", PAIRS)] = None,
    benign: Annotated[Path | None, flag("PATH", BENIGN)] = None,
    mask: Annotated[Path | None, flag("FILE", "apply this mask.safetensors; no training")] = None,
    max_success: Annotated[float, flag("SHARE", MAX_SUCCESS)] = 0.02,
    steps: Annotated[int, flag("N", "updates")] = 200,
    seed: Seed = 0,
    rivals: Annotated[bool, switch("--rivals", "also try all other strategies and show them")] = False,
) -> int:
    """Repair a model that learned unwanted behaviour, or apply a published repair."""
    from planaria.swarm.commands import realign
    from planaria.swarm.repair.repair_training import RepairPlan

    arguments = realign.RealignArguments(run, peer, number, safe, trusted, pairs, benign, _kinds(watch or ""))
    if mask is not None:
        requested = {"by": by, "watch": watch, "trusted": trusted, "pairs": pairs, "benign": benign}
        if extra := next((name for name, value in requested.items() if value is not None), None):
            raise UserError(f"--mask {mask} is applied unchanged; remove --{extra}")
        return realign.apply_mask(arguments, mask, to)
    if steps < 1 or not 0 <= max_success < 1:
        raise UserError("--steps must be 1 or more, --max-success 0 or more and below 1")
    return realign.realign(arguments, to, by, max_success, RepairPlan(seed=seed, steps=steps), rivals)


def _kinds(watch: str) -> tuple[str, ...]:
    """Return the attacks in a list with commas."""
    return tuple(filter(None, (kind.strip() for kind in watch.split(","))))
