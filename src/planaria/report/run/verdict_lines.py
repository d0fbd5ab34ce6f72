"""One line of English per verdict of slowness and per action against it."""

from __future__ import annotations

from planaria.control.facts import decisions as d
from planaria.report.phrases import counted
from planaria.report.run.naming import Naming, replicas, stages


def line(fact: d.SlowPartFound | d.HandOverSlowStage | d.Reroute | d.Cleared, naming: Naming) -> str:
    """Return the line of a decision about slowness."""
    match fact:
        case d.SlowPartFound():
            return sentence(fact, naming)
        case d.HandOverSlowStage():
            return (
                f"{naming.name([fact.node])}: {fact.worker} hands it to a spare; a step takes {fact.step_s:.2f} s, "
                f"{fact.predicted_s:.2f} s are predicted"
            )
        case d.Reroute():
            return (
                f"microbatches are routed around the slow link: a simulated step takes {fact.before_s:.2f} s, and "
                f"{fact.predicted_s:.2f} s with the new plan"
            )
        case d.Cleared():
            return _cleared(fact, naming)


def sentence(blamed: d.SlowPartFound, naming: Naming) -> str:
    """Return what is slow, with the evidence after a colon."""
    where = naming.name(blamed.nodes)
    if blamed.fault in ("slow worker", "slow host"):
        workers = ", ".join(blamed.workers)
        machine = "the machine of " if blamed.fault == "slow host" else ""
        compared = f", {ms(blamed.peer_median_s)} at its peers" if blamed.peer_median_s else ""
        times = blamed.seconds / (blamed.peer_median_s or blamed.initial_s)
        return (
            f"{machine}{where} ({workers}) is {times:.1f} times slower than {'its peers' if compared else 'at first'}: "
            f"a microbatch's passes take {ms(blamed.seconds)}, {ms(blamed.initial_s)} at first{compared}"
        )
    if blamed.fault == "slow data":
        compared = f", {ms(blamed.peer_median_s)} elsewhere" if blamed.peer_median_s else ""
        return (
            f"the data of {where} ({blamed.workers[0]}) are slow: a step waits {ms(blamed.seconds)} for its batches, "
            f"{ms(blamed.initial_s)} at first{compared}"
        )
    took = (
        f"an activation takes {ms(blamed.seconds)}, {ms(blamed.initial_s)} at first, "
        f"{ms(blamed.peer_median_s)} elsewhere"
    )
    match blamed.fault:
        case "slow sender":
            return f"{where} ({blamed.workers[0]}) sends slowly over all its edges: {took}"
        case "slow receiver":
            return f"{where} ({blamed.workers[0]}) receives slowly over all its edges: {took}"
        case "stuck link":
            return (
                f"the link {naming.transit(*blamed.nodes)} delivered nothing for {ms(blamed.seconds)} in this direction"
            )
        case "flaky link":
            source, target = blamed.nodes
            return (
                f"the link {naming.transit(source, target)} is flaky: it breaks, or some activations take "
                f"{ms(blamed.seconds)}; usually {ms(blamed.initial_s)}"
            )
    source, target = blamed.nodes
    return f"the link {naming.transit(source, target)} is slow, in this direction: {took}"


def _cleared(fact: d.Cleared, naming: Naming) -> str:
    """Return the line for a worker or link that is no longer slow."""
    if "link" in fact.fault:
        return f"the link {naming.transit(*fact.nodes)} is no longer {fact.fault.partition(' ')[0]}"
    if fact.fault == "slow host":
        return f"the machine of {naming.name(fact.nodes)} is no longer slow"
    activity = {"slow sender": "its sending", "slow receiver": "its receiving", "slow data": "its data"}
    return f"{naming.name(fact.nodes)}: {activity.get(fact.fault, 'its worker')} is no longer slow"


def differing_replicas(unequal: d.UnequalReplicas) -> str:
    """Return which replicas differ in weights that should be equal."""
    if not unequal.differing:
        return (
            f"{replicas(unequal.replicas)}: their weights of {stages([unequal.stage])} differ but should be equal; no "
            "majority shows which are wrong"
        )
    invalid, others = replicas(unequal.differing), counted(len(unequal.replicas) - len(unequal.differing), "replica")
    machine = "machines compute" if unequal.differing[1:] else "machine computes"
    return (
        f"{invalid}: weights of {stages([unequal.stage])} differ from those of {others} but should be equal; "
        f"the {machine} incorrectly, or differently from the others"
    )


def ms(seconds: float) -> str:
    """Return a duration in ms, or in s from 1 s on."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
