"""``planaria serve``: an OpenAI-compatible server on this machine, optionally behind a censor.

:func:`open_released` opens the model as it would be released: the model itself, or an export of a run or peer.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from planaria.cli.http_flags import read_token, require_server
from planaria.common.errors import UserError
from planaria.models.chat import Template
from planaria.models.huggingface import is_exported
from planaria.runtime.api.import_export import export_run
from planaria.runtime.preparation.weight_sources import local_weights
from planaria.swarm.audit.censor import Censor, LeakageLedger
from planaria.swarm.audit.questions import read_questions
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.policy.prompts import PromptFormat
from planaria.swarm.trained_policy import ModelArguments, export_peer, trained_state

if TYPE_CHECKING:
    from planaria.report.live_page.http_server import ServerAddress

DEFAULT_BUDGET_REPLIES = 8
"""default budget of a question, in units of ε"""


@dataclass(frozen=True)
class CensorSettings:
    """Settings of the censor."""

    epsilon: float
    questions: Path
    ledger: Path
    budget: float | None = None


def serve(
    target: ModelArguments,
    name: str | None,
    settings: CensorSettings | None,
    address: ServerAddress,
    token_file: Path | None,
) -> int:
    """Serve a model until Ctrl-C; return the exit code.

    :raises UserError: for invalid arguments, before anything is served.
    """
    require_server("serve")
    from planaria.report.live_page.guard import new_token
    from planaria.report.live_page.http_server import Server
    from planaria.report.live_page.http_server import serve as run
    from planaria.swarm.completions.server import CompletionsApi, Service

    torch.set_num_threads(1)
    token = new_token() if token_file is None else read_token(token_file)
    censor = None if settings is None else _censor(settings)
    with open_released(target) as result:
        policy = open_policy(str(result.path))
    if result.template is not None and isinstance(policy, PromptFormat):
        policy.template = result.template
    served_name = name or target.peer or Path(target.model.rstrip("/")).name
    service = Service(
        CompletionsApi(policy, served_name, censor), lambda text: print(f"planaria: {text}", file=sys.stderr)
    )

    def announce(where: str) -> None:
        print(f"serving       {served_name} at {where.partition('/?')[0]}/v1", flush=True)
        print(f"token         {token if token_file is None else f'in {token_file}'}", flush=True)
        print(f"censor        {_describe_censor(settings)}", flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        run(Server(service, address, token, announce))
    return 0


def _censor(settings: CensorSettings) -> Censor:
    budget = DEFAULT_BUDGET_REPLIES * settings.epsilon if settings.budget is None else settings.budget
    if not budget > 0:
        raise UserError(f"--budget {budget:g} must be above 0, in nats per question")
    questions = read_questions(settings.questions)
    if not settings.epsilon > 0:
        raise UserError(f"--censor {settings.epsilon:g} must be above 0, in nats per reply")
    return Censor(questions, settings.epsilon, LeakageLedger(settings.ledger, budget))


def _describe_censor(settings: CensorSettings | None) -> str:
    if settings is None:
        return "off: every request is answered"
    return f"{settings.epsilon:g} nats per reply about {settings.questions}; unlisted paraphrases are not recognised"


CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Released:
    """A model as it would be released."""

    path: Path
    notes: list[str] = field(default_factory=list)
    """messages of its export about a certificate"""
    template: Template | None = None
    """chat template of the peer, which its export lacks"""


@contextlib.contextmanager
def open_released(target: ModelArguments) -> Iterator[Released]:
    """Open the model as it would be released: the model itself, or a temporary export.

    :raises UserError: if there is no such model, run or peer.
    """
    folder, peer = Path(target.model), target.required_peer()
    trained = folder.is_dir() and not is_exported(folder) and (folder / CHECKPOINTS).is_dir()
    if peer is None and not trained:
        path = local_weights(target.model)
        if not path.exists():
            raise UserError(f"{target.model}: there is no such run, folder or file; check the path")
        yield Released(path)
        return
    with tempfile.TemporaryDirectory(prefix="planaria-") as temporary:
        path, notes = Path(temporary) / "model", list[str]()
        if peer is None:
            yield Released(export_run(folder, path))
            return
        template = getattr(trained_state(folder, peer, target.round).policy, "template", None)
        yield Released(export_peer(folder, peer, path, target.round, notes.append), notes, template)
