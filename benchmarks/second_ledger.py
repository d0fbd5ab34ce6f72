"""A second ledger, to check the first: was every sample used exactly once in the history that a run ended with?

It shares no line with planaria. It follows what each worker *has*: how many of its replica's steps its state comprises.
A commit counts once all have their gradient, whoever keeps a state must have the one that is spoken of, a rollback
frees what was committed since, a checkpoint holds what its writers had. A block: samples of one replica's step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Fact = dict[str, Any]


@dataclass
class Replica:
    first: int  # steps behind it when this part of the log begins
    blocks: list[int] = field(default_factory=list)  # that it has committed since, in order
    generation: int = -1
    holders: dict[int, str] = field(default_factory=dict)
    block: int | None = None  # under way
    ready: set[str] = field(default_factory=set)
    saved: int | None = None  # its steps when it was last saved, for a checkpoint to be sealed
    written: set[int] = field(default_factory=set)
    recalled: int = -1  # step of the snapshot in memory with which this part of the log begins
    saves: Fact | None = None  # the order to

    @property
    def step(self) -> int:
        return self.first + len(self.blocks)


class Ledger:
    """Folds the facts of a log; ``problems`` says all that is wrong, in words."""

    def __init__(self, log: list[Fact]) -> None:
        self.problems, self.used = list[str](), set[int]()
        self.lost = self.repeated = self.total = 0
        self._history = list[int]()  # of a run of one replica: the block of each step that was not undone
        self._sealed: dict[str, list[tuple[set[int], int, dict[int, int]]]] = {}  # folder → blocks, their size, steps
        large = {"run_started": self._begin, "form": self._form, "commit": self._commit, "seal": self._seal}
        for f in log:
            (self._report if "worker" in f else large.get(f["kind"], self._decision))(f)

    def _begin(self, f: Fact) -> None:
        each, first, stands = f["samples_per_step"], f["first_step"], f["standings"]
        before = first * each if f["first_sample"] is None else f["first_sample"]
        self._size = each // f["replicas"]
        self.total = (before + (f["steps"] - first) * each) // self._size
        self.used = {*range(before // self._size if f["first_block"] is None else f["first_block"]), *f["blocks_ahead"]}
        self._has = dict[str, int]()  # worker → steps that its state comprises
        self._passed = dict[str, set[int]]()  # worker → steps of which it may remember its state
        self._copied = dict[str, object]()  # worker → the order to save for which it writes a copy
        self._coming = dict[str, tuple[int, int]]()  # worker → the generation in which it takes a state of so many
        self._load, self._durable, self._last = set(f["load"].values()), dict[str, dict[int, int]](), set[int]()
        places = range(max(f["replicas"], len(f["columns"])))
        self.replicas = {r: Replica(stands.get(str(r), {"step": first})["step"]) for r in places}
        if f.get("recalled", -1) >= 0:
            self._begin_from_memory(f)
            return
        self._history = self._history[:first]
        alike = (
            used == self.used and all(self.replicas[r].first == step for r, step in steps.items())
            if size == self._size
            else len(used) * size == len(self.used) * self._size  # another number of replicas takes up
            for used, size, steps in self._sealed.get(max(self._load, default=""), [])
        )
        if (self.used or first) and not any(alike):
            self.problems.append(f"taken up at step {first} with samples that are not those of {sorted(self._load)}")

    def _begin_from_memory(self, f: Fact) -> None:
        """The snapshot must be of a step that the history has; a rollback may lead to the checkpoint before it."""
        first, before = f["first_step"], f["durable_step"]
        if len(self._history) < first or self.used != {*self._history[:first]}:
            self.problems.append(f"taken up from memory at step {first}; the history has {len(self._history)} steps")
            self._history += [-1] * (first - len(self._history))
        self._history = self._history[:first]
        self.replicas[0] = Replica(before, self._history[before:], recalled=f["recalled"])

    def _form(self, f: Fact) -> None:
        r, step, generation = self.replicas[f["replica"]], f["step"], f["generation"]
        for m in f["members"]:
            if (has := self._from(f, m["worker"], m["source"])) != step:
                self.problems.append(f"generation {generation}: node {m['node']} has {has} steps, not {step}")
            self._coming[m["worker"]] = generation, step
            self._passed[m["worker"]] = {known for known in self._passed.get(m["worker"], ()) if known <= step}
        if len(self.replicas) == 1:
            self._history = self._history[:step]
        if not r.first <= step <= r.step:
            self.problems.append(f"generation {generation}: step {step} is not one of {r.first} to {r.step}")
        r.blocks, undone = r.blocks[: max(0, step - r.first)], r.blocks[max(0, step - r.first) :]
        self.used -= set(undone)
        for other in self.replicas.values() if undone else ():  # a checkpoint under way had some of it
            other.saved = None
        r.generation, r.holders, r.block = generation, {m["node"]: m["worker"] for m in f["members"]}, None

    def _from(self, f: Fact, worker: str, source: Fact) -> int | None:
        """The steps that a state from there comprises; None if there is none."""
        r, origin = self.replicas[f["replica"]], source["origin"]
        if origin in ("keep", "handover"):
            return self._has.get(source.get("worker", worker))
        if origin in ("fresh", "load"):
            begun = r.first if origin == "fresh" or source["folder"] in self._load else -1
            return self._durable.get(source.get("folder", ""), {}).get(f["replica"], begun)
        if origin == "recall":  # what a worker remembers, or a file that another has left
            there = {r.recalled} if source.get("file") else self._passed.get(worker, ())
            return source["step"] if source["step"] in there else None
        others = {n: w for q in self.replicas.values() if q is not r for n, w in q.holders.items()}
        own = {m["node"]: m["source"]["origin"] for m in f["members"]}
        given = [own.get(n, others.get(n) in self._has) for n in source["donors"]]
        ill = ("rebuild", False) if source["by"] != "peer" else (False,)  # nodes of one stage may pass a state on
        return None if any(one in ill for one in given) else f["step"]

    def _report(self, f: Fact) -> None:
        worker, has = f["worker"], self._has.get(f["worker"])
        of = (r for r in self.replicas.values() if worker in r.holders.values() and r.generation == f.get("generation"))
        r = next(of, None)
        match f["kind"]:
            case "worker_joined" | "worker_lost" | "worker_failed":
                self._has.pop(worker, None)
                self._passed.pop(worker, None)
                self._copied.pop(worker, None)
            case "linked" if r and self._coming[worker][0] == r.generation:
                self._has[worker] = self._coming[worker][1]
                self._passed.setdefault(worker, set()).add(self._has[worker])
            case "stage_ready" if r and r.step == f["step"]:
                r.ready.add(worker)
            case "stage_committed" if r and r.step - 1 == f["step"] == has:
                self._has[worker] += 1
                self._passed[worker].add(self._has[worker])
            case "stage_copied" if r and r.saved is not None and r.saved == has:
                self._copied[worker] = r.saves
            case "stage_saved" if worker in self._copied:  # whoever stands where it stood
                save = self._copied.pop(worker)
                for other in self.replicas.values():
                    other.written |= {f["stage"]} if other.saves is save and f["bytes"] else set()
            case "stage_saved" if r and r.saved is not None and r.saved == has and f["bytes"]:
                r.written.add(f["stage"])
            case "save_failed" if worker in self._copied:
                del self._copied[worker]
            case "save_failed" if worker == "controller":  # it was to be sealed, and could not be
                self._sealed[self._newest].pop()
                self._last, self._durable = self._before

    def _decision(self, f: Fact) -> None:
        r = self.replicas[f.get("replica", 0)]
        match f["kind"]:
            case "run_step":
                r.block, r.ready = f["block"] if f["mode"] == "train" else None, set()
            case "save":
                r.saved, r.written, r.saves = r.step, set(), f
            case "adopt" | "disband":  # its states are void; what it has committed stays used
                self._has = {worker: has for worker, has in self._has.items() if worker not in r.holders.values()}
                r.holders = {} if f["kind"] == "disband" else r.holders
            case "finish" if f["outcome"] == "finished":
                missing = set(range(self.total)) - self.used
                self.lost += len(missing)
                self.problems += [f"blocks {sorted(missing)} are not used"] if missing else []
                self.problems += [] if self._last == self.used else ["the last checkpoint is not of the end"]

    def _commit(self, f: Fact) -> None:
        r, step = self.replicas[f["replica"]], f["step"]
        unfit = [w for w in r.holders.values() if w not in r.ready or self._has.get(w) != step]
        if r.block is None or step != r.step or f["generation"] != r.generation or unfit:
            self.problems.append(f"replica {f['replica']} commits step {step} without {unfit or 'one under way'}")
        block, r.block = -1 if r.block is None else r.block, None
        if block in self.used:
            self.repeated += 1
            self.problems.append(f"block {block} is used again, in step {step} of replica {f['replica']}")
        r.blocks.append(block)
        self._history += [block] if len(self.replicas) == 1 else []
        self.used.add(block)

    def _seal(self, f: Fact) -> None:
        steps, held = {int(r): s["step"] for r, s in f["standings"].items()} or {0: f["step"]}, set(self.used)
        for r, step in ((self.replicas[number], step) for number, step in steps.items()):
            if r.saved != step or not set(f["stages"]) <= r.written:
                self.problems.append(f"{f['folder']}: stages {sorted(r.written)} of step {r.saved} saved, not {step}")
            held -= set(r.blocks[step - r.first :])
        if held != {*range(f["first_block"]), *f["blocks_ahead"]}:
            self.problems.append(f"{f['folder']}: names other samples than its writers had used")
        self._newest, self._before = f["folder"], (self._last, self._durable)
        self._sealed.setdefault(f["folder"], []).append((held, self._size, steps))
        self._last, self._durable = held, self._durable if f["partial"] else {f["folder"]: steps}
