"""The parts of an audit that look at what is there already: files, who signed, what was repaired, what is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planaria.cli.commands.realign import FILE as REALIGNED
from planaria.cli.commands.realign import Realigned
from planaria.cli.commands.released import Released
from planaria.common import documents
from planaria.common.errors import UserError
from planaria.report.words import counted, listed
from planaria.swarm.audit.files import look
from planaria.swarm.audit.results import FAILED, NONE, PASSED, UNASKED, Leakage, Part
from planaria.swarm.certificate import CERTIFICATE, NotCertified, verify
from planaria.swarm.records.measure import Tally

MOST = 1 << 24
"""bytes of realigned.json: a share for each tensor"""


def files_part(place: Path, unread: str | None) -> Part:
    """``unread``: why the model could not be opened, if it could not."""
    found = look(place)
    faults = [*found.faults, *([unread] if unread is not None and unread not in found.faults else [])]
    if faults:
        return Part(name="files", verdict=FAILED, said=f"{counted(len(faults), 'fault')}: {faults[0]}", facts=faults)
    return Part(name="files", verdict=PASSED, said="; ".join(found.facts), facts=list(found.facts))


def provenance_part(released: Released) -> Part:
    """Who made these weights, as far as anybody signed."""
    name = "provenance"
    if not (released.place / CERTIFICATE).is_file():
        missing = next(iter(released.told), "")
        if missing:  # there is a committee, and it did not sign these
            return Part(name=name, verdict=FAILED, said=missing)
        return Part(name=name, verdict=NONE, said="no certificate lies beside it: nobody vouches for who made it")
    try:
        lines = verify(released.place)
    except (NotCertified, UserError) as error:
        return Part(name=name, verdict=FAILED, said=str(error))
    return Part(name=name, verdict=PASSED, said=lines[0], facts=lines)


def repair_part(place: Path, weights: str | None) -> Part:
    """Whether it was realigned, how, and what that came to by its own record."""
    name, file = "repair", place / REALIGNED
    if not file.is_file():
        return Part(name=name, verdict=NONE, said=f"no {REALIGNED} lies beside it: not known to have been repaired")
    try:
        found = documents.model(file, Realigned, MOST)
    except UserError as error:
        return Part(name=name, verdict=FAILED, said=str(error))
    if weights is not None and found.result != weights:
        told = f"is of other weights ({found.result[:12]}…) than these ({weights[:12]}…)"
        return Part(name=name, verdict=FAILED, said=f"{REALIGNED} {told}")
    before, after = found.before, found.after
    facts = [
        f"by {found.by}{f' ({found.told})' if found.told else ''} from {found.trusted} trusted texts",
        *(f"{kind}: success {before.success[kind]}, then {tally}" for kind, tally in after.success.items()),
        *([f"right: {before.accuracy}, then {after.accuracy}"] if after.accuracy.eligible else []),
    ]
    if found.mended is False:
        return Part(name=name, verdict=FAILED, said=f"repaired by {found.by}, and not mended", facts=facts)
    said = f"repaired by {found.by}; " + ("mended" if found.mended else "whether that mended it was not measured")
    return Part(name=name, verdict=PASSED if found.mended else UNASKED, said=said, facts=facts)


def behaviour_part(attacks: Mapping[str, Tally], most: float) -> Part:
    """Attacks that show more often than ``most``; one that nothing could show in is none that passed."""
    facts = [f"{kind}: success {tally}" for kind, tally in attacks.items()]
    over = [kind for kind, tally in attacks.items() if tally.rate is None or tally.rate > most]
    name = "behaviour"
    if over:
        said = "; ".join(f"{kind} in {attacks[kind]}" for kind in over)
        return Part(name=name, verdict=FAILED, said=f"{said}; at most {most:g} is wanted", facts=facts)
    unsure = [kind for kind, tally in attacks.items() if tally.interval[1] > most]
    more = f"; it may still be more of {listed(unsure)}, by the interval" if unsure else ""
    return Part(name=name, verdict=PASSED, said=f"{'; '.join(facts)}; at most {most:g} is wanted{more}", facts=facts)


def leakage_part(found: Leakage, most: float) -> Part:
    """Questions whose parts give away more than ``most`` nats."""
    over = [one for one in found.questions if one.leak.mean > most]
    count, worst = counted(len(found.questions), "question"), found.questions[0]
    asked = f"for {'this' if len(found.questions) == 1 else 'these'} {count}, this adversary, this prior"
    facts = [f"{one.name}: {one.leak} nats, guessed {one.guessed:.2f}" for one in found.questions]
    if over:
        names = listed([one.name for one in over])
        said = f"{names}: up to {worst.leak} nats by {counted(found.k, 'part')}, at most {most:g} is wanted; {asked}"
        return Part(name="leakage", verdict=FAILED, said=said, facts=facts)
    said = f"at most {worst.leak} nats ({worst.name}), {most:g} are allowed; {asked}"
    return Part(name="leakage", verdict=PASSED, said=said, facts=facts)


def unasked(name: str, why: str) -> Part:
    return Part(name=name, verdict=UNASKED, said=why)
