"""One line of English per verdict of slowness and per action against it."""

from __future__ import annotations

from planaria.config.names import replicas, stages
from planaria.control.facts import decisions as d
from planaria.report.phrases import format_count, format_seconds
from planaria.report.run.naming import Naming


def slowness_line(fact: d.SlowPartFound | d.HandOverSlowStage | d.Reroute | d.Cleared, naming: Naming) -> str:
    """Return the line of a decision about slowness."""
    match fact:
        case d.SlowPartFound():
            return slow_part_sentence(fact, naming)
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
            return _cleared_line(fact, naming)


def slow_part_sentence(slow: d.SlowPartFound, naming: Naming) -> str:
    """Return a sentence about a slow part, with the evidence after a colon."""
    where = naming.name(slow.nodes)
    if slow.fault in ("slow worker", "slow host"):
        workers = ", ".join(slow.workers)
        machine = "the machine of " if slow.fault == "slow host" else ""
        compared = f", {format_seconds(slow.peer_median_s)} at its peers" if slow.peer_median_s else ""
        times = slow.seconds / (slow.peer_median_s or slow.initial_s)
        return (
            f"{machine}{where} ({workers}) is {times:.1f} times slower than {'its peers' if compared else 'at first'}: "
            f"a microbatch's passes take {format_seconds(slow.seconds)}, {format_seconds(slow.initial_s)} at "
            f"first{compared}"
        )
    if slow.fault == "slow data":
        compared = f", {format_seconds(slow.peer_median_s)} elsewhere" if slow.peer_median_s else ""
        return (
            f"the data of {where} ({slow.workers[0]}) are slow: a step waits {format_seconds(slow.seconds)} for its "
            f"batches, {format_seconds(slow.initial_s)} at first{compared}"
        )
    took = (
        f"an activation takes {format_seconds(slow.seconds)}, {format_seconds(slow.initial_s)} at first, "
        f"{format_seconds(slow.peer_median_s)} elsewhere"
    )
    match slow.fault:
        case "slow sender":
            return f"{where} ({slow.workers[0]}) sends slowly over all its edges: {took}"
        case "slow receiver":
            return f"{where} ({slow.workers[0]}) receives slowly over all its edges: {took}"
        case "stuck link":
            link = naming.transit(*slow.nodes)
            return f"the link {link} delivered nothing for {format_seconds(slow.seconds)} in this direction"
        case "flaky link":
            source, target = slow.nodes
            return (
                f"the link {naming.transit(source, target)} is flaky: it breaks, or some activations take "
                f"{format_seconds(slow.seconds)}; usually {format_seconds(slow.initial_s)}"
            )
    source, target = slow.nodes
    return f"the link {naming.transit(source, target)} is slow, in this direction: {took}"


def _cleared_line(fact: d.Cleared, naming: Naming) -> str:
    """Return the line for a worker or link that is no longer slow."""
    if "link" in fact.fault:
        return f"the link {naming.transit(*fact.nodes)} is no longer {fact.fault.partition(' ')[0]}"
    if fact.fault == "slow host":
        return f"the machine of {naming.name(fact.nodes)} is no longer slow"
    activity = {"slow sender": "its sending", "slow receiver": "its receiving", "slow data": "its data"}
    return f"{naming.name(fact.nodes)}: {activity.get(fact.fault, 'its worker')} is no longer slow"


def differing_replicas(unequal: d.UnequalReplicas) -> str:
    """Return a line about replicas whose weights should be equal but differ."""
    if not unequal.differing:
        return (
            f"{replicas(unequal.replicas)}: their weights of {stages([unequal.stage])} differ but should be equal; "
            "without a majority, it is unknown which are wrong"
        )
    invalid, others = (
        replicas(unequal.differing),
        format_count(len(unequal.replicas) - len(unequal.differing), "replica"),
    )
    machine = "machines compute" if unequal.differing[1:] else "machine computes"
    return (
        f"{invalid}: weights of {stages([unequal.stage])} differ from those of {others} but should be equal; "
        f"the {machine} incorrectly, or differently from the others"
    )
