"""What was found to be slow, and what is done about it: a line of English for each."""

from __future__ import annotations

from planaria.control import decisions as d
from planaria.report.run.naming import Naming, replicas, stages
from planaria.report.words import counted


def line(fact: d.Blamed | d.Relieve | d.Reroute | d.Cleared, naming: Naming) -> str:
    """What such a decision comes to, in one line."""
    match fact:
        case d.Blamed():
            return sentence(fact, naming)
        case d.Relieve():
            return deed(fact, naming)
        case d.Reroute():
            return rerouted(fact)
        case d.Cleared():
            return cleared(fact, naming)


def sentence(blamed: d.Blamed, naming: Naming) -> str:
    """What is slow, and the evidence, in one line."""
    where = naming.name(blamed.nodes)
    if blamed.fault in ("slow worker", "slow host"):
        who = ", ".join(blamed.workers)
        machine = "the machine of " if blamed.fault == "slow host" else ""
        usual = f", {ms(blamed.usual)} at its peers" if blamed.usual else ""
        times = blamed.seconds / (blamed.usual or blamed.past)
        return (
            f"{machine}{where} ({who}) is {times:.1f} times slower than {'its peers' if usual else 'at first'}: a "
            f"microbatch's passes take {ms(blamed.seconds)}, {ms(blamed.past)} at first{usual}"
        )
    if blamed.fault == "slow data":
        usual = f", {ms(blamed.usual)} elsewhere" if blamed.usual else ""
        return (
            f"the data of {where} ({blamed.workers[0]}) are slow: a step waits {ms(blamed.seconds)} for its batches, "
            f"{ms(blamed.past)} at first{usual}"
        )
    took = f"an activation takes {ms(blamed.seconds)}, {ms(blamed.past)} at first, {ms(blamed.usual)} elsewhere"
    match blamed.fault:
        case "slow sender":
            return f"what {where} ({blamed.workers[0]}) sends is slow, over all its edges: {took}"
        case "slow receiver":
            return f"what reaches {where} ({blamed.workers[0]}) is slow, over all its edges: {took}"
        case "stuck link":
            return f"the link {naming.way(*blamed.nodes)} delivered nothing in {ms(blamed.seconds)}, in this direction"
        case "flaky link":
            source, target = blamed.nodes
            return (
                f"the link {naming.way(source, target)} is flaky: it breaks, or now and then an activation takes "
                f"{ms(blamed.seconds)}; usually {ms(blamed.past)}"
            )
    source, target = blamed.nodes
    return f"the link {naming.way(source, target)} is slow, in this direction: {took}"


def deed(relieve: d.Relieve, naming: Naming) -> str:
    """What is done about a slow worker, in one line."""
    return (
        f"{naming.name([relieve.node])}: {relieve.worker} is to hand it to a spare; a step takes "
        f"{relieve.step_s:.2f} s, {relieve.predicted_s:.2f} s are predicted"
    )


def rerouted(fact: d.Reroute) -> str:
    """That microbatches go other ways, in one line."""
    return (
        f"microbatches go around the slow link: by simulation a step takes {fact.before_s:.2f} s, and "
        f"{fact.predicted_s:.2f} s by the new plan"
    )


def cleared(fact: d.Cleared, naming: Naming) -> str:
    """What is not slow any more, in one line."""
    if "link" in fact.fault:
        return f"the link {naming.way(*fact.nodes)} is not {fact.fault.partition(' ')[0]} any more"
    if fact.fault == "slow host":
        return f"the machine of {naming.name(fact.nodes)} is not slow any more"
    what = {"slow sender": "what it sends", "slow receiver": "what reaches it", "slow data": "what it reads"}
    return f"{naming.name(fact.nodes)}: {what.get(fact.fault, 'its worker')} is not slow any more"


def differing(found: d.Unequal) -> str:
    """Whose weights are not what they are to be, in one line."""
    if not found.odd:
        return (
            f"{replicas(found.replicas)}: their weights of {stages([found.stage])} differ, and are to be equal; no "
            "majority says whose are wrong"
        )
    odd, others = replicas(found.odd), counted(len(found.replicas) - len(found.odd), "replica")
    machine = "machines compute" if found.odd[1:] else "machine computes"
    return (
        f"{odd}: weights of {stages([found.stage])} differ from those of {others}, and are to be equal; "
        f"the {machine} wrongly, or otherwise than the others'"
    )


def ms(seconds: float) -> str:
    """Milliseconds, or seconds from one on."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
