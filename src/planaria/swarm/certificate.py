"""Certificate of an exported model: a quorum of the committee signed these weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from planaria.common import digests, documents
from planaria.common.errors import RunStopped, UserError
from planaria.swarm.board.board import Board
from planaria.swarm.board.claims import Hex64, Round, StrictModel
from planaria.swarm.board.envelope import unseal
from planaria.swarm.board.message import BadMessage, Receipt, RunRules
from planaria.swarm.board.receipts import About, Committee, quorum_digest
from planaria.swarm.policy.base import weights_digest
from planaria.swarm.policy.policies import open_policy

CERTIFICATE = "certificate.json"
MAX_CERTIFICATE_BYTES = 1 << 21
"""maximum bytes of a certificate: 256 receipts and the rules"""


class NotCertified(RunStopped):
    """A certificate is invalid, or does not belong to the model."""


class RunCertificate(StrictModel):
    """The rules and a quorum's receipts, copied from the board; can be verified without the board."""

    about: About
    round: Round
    digest: Hex64
    rules: str
    """envelope of the founder"""
    receipts: tuple[str, ...] = Field(strict=False, max_length=256)
    """envelopes of the members"""


@dataclass(frozen=True)
class Certified:
    """The content of a valid certificate."""

    rules: RunRules
    committee: Committee
    signers: Sequence[str]


def check_certificate(certificate: RunCertificate) -> Certified:
    """Verify a certificate.

    :raises BadMessage: with the invalid part and the reason.
    """
    try:
        rules = unseal(certificate.rules.encode(), RunRules)
    except BadMessage as error:
        raise BadMessage(f"the rules are {error.reason}") from None
    committee = Committee.from_rules(rules.rules)
    if committee is None:
        raise BadMessage("the rules have no committee")
    signers: list[str] = []
    for index, raw in enumerate(certificate.receipts):
        try:
            receipt = unseal(raw.encode(), Receipt, run=rules.run)
        except BadMessage as error:
            raise BadMessage(f"receipt {index} is {error.reason}") from None
        if why := _mismatch(receipt, certificate, committee, signers):
            raise BadMessage(f"receipt {index} is {why}")
        signers.append(receipt.peer)
    if len(signers) < committee.quorum:
        raise BadMessage(f"{len(signers)} receipts, but at least {committee.quorum} are required")
    return Certified(rules, committee, tuple(signers))


def _mismatch(receipt: Receipt, certificate: RunCertificate, committee: Committee, before: Sequence[str]) -> str:
    """Return why a receipt does not belong to the certificate, or an empty string if it does."""
    if receipt.peer not in committee.members:
        return f"of {receipt.peer[:8]}, which is not a committee member"
    if receipt.peer in before:
        return f"the second of {receipt.peer[:8]}"
    if receipt.about != certificate.about:
        return f"about {receipt.about}, not {certificate.about}"
    if receipt.round != certificate.round:
        return "about another round"
    return "" if receipt.digest == certificate.digest else "about another digest"


def attach_certificate(board: str, round_number: int, model: Path) -> str:
    """Write the certificate of a model exported after ``round_number`` rounds next to it; return a status line."""
    mirror = Board(board)
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
    try:
        certificate = documents.read_model(file, RunCertificate, MAX_CERTIFICATE_BYTES)
        if certificate.about != "weights":
            raise NotCertified(f"{file} is about {certificate.about}, not weights")
        result = check_certificate(certificate)
        weights = weights_digest(open_policy(str(model)).module)
    except BadMessage as error:
        raise NotCertified(f"{file}: {error.reason}") from None
    except UserError as error:
        raise NotCertified(str(error)) from None
    if weights != certificate.digest:
        raise NotCertified(
            f"{model}: its weights are not the signed ones ({weights[:12]}…, {certificate.digest[:12]}…)"
        )
    run = result.rules.run
    if board is not None and (board_run := Board(board).rules.run) != run:
        raise NotCertified(f"{board} holds the run {board_run}; the certificate belongs to {run}")
    return [
        f"{len(result.signers)} of {len(result.committee.members)} named peers signed these weights after "
        f"{certificate.round} rounds; at most {result.committee.max_faulty} of them may be Byzantine",
        f"run            {run}, founded by {result.rules.peer}, rules {result.rules.fingerprint}",
        f"weights        {weights}",
        *(f"signed by      {peer}" for peer in result.signers),
    ]
