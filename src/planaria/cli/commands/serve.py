"""``planaria serve``: a model over the protocol of OpenAI's completions, on this machine, behind a censor if asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from planaria.cli.commands.released import Named, released
from planaria.cli.commands.watch import require_server, token_in
from planaria.common.errors import UserError
from planaria.swarm.audit.censor import Censor
from planaria.swarm.audit.ledger import Ledger
from planaria.swarm.audit.questions import read
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.policy.wording import Wording

if TYPE_CHECKING:
    from planaria.report.live_page.serving import Address

REPLIES = 8
"""of ε that a question's budget is, unless said"""


@dataclass(frozen=True)
class Wrapper:
    """What the censor is to do."""

    epsilon: float
    questions: Path
    ledger: Path
    budget: float | None = None


def serve(named: Named, name: str | None, wrapper: Wrapper | None, address: Address, token_file: Path | None) -> int:
    """Serve a model until Ctrl-C; the exit code.

    :raises UserError: before anything is served, when something given is wrong.
    """
    require_server("serve")
    from planaria.report.live_page.guard import new_token
    from planaria.report.live_page.serving import Server
    from planaria.report.live_page.serving import serve as run
    from planaria.swarm.serving.answering import Answering
    from planaria.swarm.serving.routes import Service

    torch.set_num_threads(1)
    token = new_token() if token_file is None else token_in(token_file)
    censor = None if wrapper is None else _censor(wrapper)
    with released(named) as found:
        policy = open_policy(str(found.place))
    if found.template is not None and isinstance(policy, Wording):
        policy.template = found.template
    called = name or named.peer or Path(named.model.rstrip("/")).name
    service = Service(Answering(policy, called, censor), lambda said: print(f"planaria: {said}", file=sys.stderr))

    def announce(where: str) -> None:
        print(f"serving       {called} at {where.partition('/?')[0]}/v1", flush=True)
        print(f"token         {token if token_file is None else f'in {token_file}'}", flush=True)
        print(f"wrapper       {_said(wrapper)}", flush=True)

    try:
        run(Server(service, address, token, announce))
    except KeyboardInterrupt:
        return 0
    return 0


def _censor(wrapper: Wrapper) -> Censor:
    budget = REPLIES * wrapper.epsilon if wrapper.budget is None else wrapper.budget
    if not budget > 0:
        raise UserError(f"--budget {budget:g}: is above 0, in nats a question")
    questions = read(wrapper.questions)
    if not wrapper.epsilon > 0:
        raise UserError(f"--censor {wrapper.epsilon:g}: is above 0, in nats a reply")
    return Censor(questions, wrapper.epsilon, Ledger(wrapper.ledger, budget))


def _said(wrapper: Wrapper | None) -> str:
    if wrapper is None:
        return "none: everything is answered"
    return f"{wrapper.epsilon:g} nats a reply about {wrapper.questions}; other words for the same are not recognised"
