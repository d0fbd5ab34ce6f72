"""Certificate of an exported model: a quorum of the committee signed these weights."""

from __future__ import annotations

from pathlib import Path

from planaria.common import digests, documents
from planaria.common.errors import RunStopped, UserError
from planaria.swarm.board.board import Board
from planaria.swarm.board.message import BadMessage
from planaria.swarm.board.receipts import Certified, Committee, RunCertificate, check_certificate, quorum_digest
from planaria.swarm.policy.base import weights_digest
from planaria.swarm.policy.policies import open_policy

CERTIFICATE = "certificate.json"
MAX_CERTIFICATE_BYTES = 1 << 21
"""maximum bytes of a certificate: 256 receipts and the rules"""


class NotCertified(RunStopped):
    """A certificate is invalid, or does not belong to the model."""


def attach_certificate(board: str, round_number: int, model: Path) -> str:
    """Write the certificate of a model exported after ``round_number`` rounds next to it; return a status line."""
    mirror = Board.open(board)
    committee = Committee.from_rules(mirror.rules.rules)
    if committee is None:
        return "no certificate: the run's rules have no committee"
    read = {
        peer: result for peer in committee.members if (result := mirror.read_receipt(peer, "weights", round_number))
    }
    receipts = [receipt for receipt, _ in read.values()]
    digest = quorum_digest(receipts, committee)
    if digest is None:
        kinds = len({receipt.digest for receipt in receipts})
        signed = f"{len(receipts)} of {len(committee.members)} peers that signed"
        return f"no certificate: {kinds} fingerprints among {signed}"
    if digest != weights_digest(open_policy(str(model)).module):
        return "no certificate: the peers signed other weights, such as adapters before merging"
    envelopes = tuple(raw.decode() for receipt, raw in read.values() if receipt.digest == digest)
    rules = mirror.founding_envelope.decode()
    certificate = RunCertificate(about="weights", round=round_number, digest=digest, rules=rules, receipts=envelopes)
    digests.write_files(model, {CERTIFICATE: certificate.model_dump_json(indent=2).encode()})
    return f"certificate   {len(envelopes)} of {len(committee.members)} peers signed these weights"


def verify_certificate(model: Path, board: str | None = None) -> list[str]:
    """Verify the certificate next to a model, also against the run on ``board`` if given; return a description.

    :raises UserError: if there is no certificate.
    :raises NotCertified: with the failed check.
    """
    file = model / CERTIFICATE
    if not file.is_file():
        raise UserError(f"{file}: not found; `planaria export RUN --peer NAME` writes it if the run has a committee")
    certificate, result = _read_certificate(file)
    try:
        weights = weights_digest(open_policy(str(model)).module)
    except UserError as error:
        raise NotCertified(str(error)) from None
    if weights != certificate.digest:
        raise NotCertified(
            f"{model}: its weights are not the signed ones ({weights[:12]}…, {certificate.digest[:12]}…)"
        )
    run = result.rules.run
    if board is not None and (board_run := Board.open(board).rules.run) != run:
        raise NotCertified(f"{board} holds the run {board_run}; the certificate belongs to {run}")
    return [
        f"{len(result.signers)} of {len(result.committee.members)} named peers signed these weights after "
        f"{certificate.round} rounds; at most {result.committee.max_faulty} of them may be Byzantine",
        f"run            {run}, founded by {result.rules.peer}, rules {result.rules.fingerprint}",
        f"weights        {weights}",
        *(f"signed by      {peer}" for peer in result.signers),
    ]


def _read_certificate(file: Path) -> tuple[RunCertificate, Certified]:
    try:
        certificate = documents.read_model(file, RunCertificate, MAX_CERTIFICATE_BYTES)
    except UserError as error:
        raise NotCertified(str(error)) from None
    if certificate.about != "weights":
        raise NotCertified(f"{file} is about {certificate.about}, not weights")
    try:
        return certificate, check_certificate(certificate)
    except BadMessage as error:
        raise NotCertified(f"{file}: {error.reason}") from None
