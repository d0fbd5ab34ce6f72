"""The certificate of an exported model: a quorum of named peers signed these weights."""

from __future__ import annotations

from pathlib import Path

from planaria.common import digests, documents
from planaria.common.errors import RunStopped, UserError
from planaria.swarm.board.board import Board
from planaria.swarm.board.message import BadMessage
from planaria.swarm.board.receipts import Certified, Committee, RunCertificate, check, quorum_digest
from planaria.swarm.policy.base import weights_digest
from planaria.swarm.policy.policies import open_policy

CERTIFICATE = "certificate.json"
MAX_CERTIFICATE_BYTES = 1 << 21
"""maximum bytes of a certificate: 256 receipts and the rules"""


class NotCertified(RunStopped):
    """A certificate is invalid, or does not belong to the model."""


def attach(board: str, round: int, model: Path) -> str:
    """Write the certificate of an exported model's weights after ``round`` rounds beside it; return a status line."""
    mirror = Board.open(board)
    committee = Committee.named(mirror.rules.rules)
    if committee is None:
        return "no certificate: the run's rules name no committee"
    read = {peer: result for peer in committee.members if (result := mirror.receipt(peer, "weights", round))}
    receipts = [receipt for receipt, _ in read.values()]
    digest = quorum_digest(receipts, committee)
    if digest is None:
        kinds = len({receipt.digest for receipt in receipts})
        signed = f"{len(receipts)} of {len(committee.members)} peers that signed"
        return f"no certificate: {kinds} fingerprints among {signed}"
    if digest != weights_digest(open_policy(str(model)).module):
        return "no certificate: the peers signed other weights, such as adapters before merging"
    envelopes = tuple(raw.decode() for receipt, raw in read.values() if receipt.digest == digest)
    rules = mirror.founding.decode()
    certificate = RunCertificate(about="weights", round=round, digest=digest, rules=rules, receipts=envelopes)
    digests.put(model, {CERTIFICATE: certificate.model_dump_json(indent=2).encode()})
    return f"certificate   {len(envelopes)} of {len(committee.members)} peers signed these weights"


def verify(model: Path, board: str | None = None) -> list[str]:
    """Verify the certificate beside a model offline, or also against the run on ``board``; return a description.

    :raises UserError: if there is no certificate.
    :raises NotCertified: naming the failed check.
    """
    file = model / CERTIFICATE
    if not file.is_file():
        raise UserError(f"{file}: not found; `planaria export RUN --peer NAME` writes it if the run has a committee")
    certificate, result = _checked(file)
    try:
        weights = weights_digest(open_policy(str(model)).module)
    except UserError as error:
        raise NotCertified(str(error)) from None
    if weights != certificate.digest:
        raise NotCertified(f"{model} has other weights than were signed ({weights[:12]}…, {certificate.digest[:12]}…)")
    run = result.rules.run
    if board is not None and (board_run := Board.open(board).rules.run) != run:
        raise NotCertified(f"{board} holds the run {board_run}; the certificate is of {run}")
    return [
        f"{len(result.signers)} of {len(result.committee.members)} named peers signed these weights after "
        f"{certificate.round} rounds; at most {result.committee.faulty} of them may be Byzantine",
        f"run            {run}, founded by {result.rules.peer}, rules {result.rules.fingerprint}",
        f"weights        {weights}",
        *(f"signed by      {peer}" for peer in result.signers),
    ]


def _checked(file: Path) -> tuple[RunCertificate, Certified]:
    try:
        certificate = documents.model(file, RunCertificate, MAX_CERTIFICATE_BYTES)
    except UserError as error:
        raise NotCertified(str(error)) from None
    if certificate.about != "weights":
        raise NotCertified(f"{file} is about {certificate.about}, not weights")
    try:
        return certificate, check(certificate)
    except BadMessage as error:
        raise NotCertified(f"{file}: {error.reason}") from None
