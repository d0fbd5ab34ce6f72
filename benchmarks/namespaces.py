"""Pipelines between network namespaces, whose packets pass shaped links, beside the simulated step."""

from __future__ import annotations

import secrets
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from tests.support.netns import Host, Weather, network

from benchmarks.fleet_run import require_finished, sleeping, small_run, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Result, Row, benchmark, milliseconds, start
from benchmarks.home_links import wire_of
from benchmarks.processes import cli
from benchmarks.standby import named, written
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.pipeline.network.costs import MBIT, Costs, message_bytes
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.resolved_run import ResolvedRun

SKIP = 3
"""steps of each run that warm it up: connections open and fill their windows"""
WIDTH, CONTEXT = 256, 256


@benchmark(
    "namespaces",
    steps=Flag(8, "of each run, warm-up apart"),
    stages=Flag(3, "block stages, one per host"),
    mbit=Flag(100.0, "of each host's link, each way"),
    latency=Flag(0.03, "seconds from one host to another"),
    wires=Flag(["fp32", "bf16", "8/8", "6/4", "D/4:8/4"], "codecs; D/4:8/4: a subspace"),
)
def run_namespaces(args: Namespace) -> Measurement:
    """Train over TCP between hosts that are network namespaces; a process shapes the links of each, both ways.

    Stages sleep; messages have the codec's bytes. The controller, the ends and each stage are alone on a host. Needs
    root and iproute2. Claim: steps are within 10 % of the simulated ones, in which messages to a host queue for its
    link, plus half a link's latency for the controller's order and for the answer.
    """
    rows = []
    weather = Weather(latency_s=args.latency / 2, rate=args.mbit * MBIT)
    for wire, microbatch in product(args.wires, (1, 4)):
        config = _config(f"namespaces-{len(rows)}", wire, microbatch, args)
        with network(args.stages + 2) as hosts:
            for host in hosts[1:]:
                host.link(weather)
            measured = step_seconds(_trained(config, hosts), SKIP)
            lost = sum(host.link(weather) for host in hosts)
        links = config.network.model_copy(
            update={"latency_s": args.latency, "bandwidth": weather.rate, "inbound": "shared"}
        )
        size = message_bytes(config.model, config.pipeline)
        step_s = simulate(ResolvedRun(config).training(0), Costs(links), size).step_s + args.latency
        columns = {"measured": milliseconds(measured), "simulated": milliseconds([step_s]), "lost": lost,
                   "message, KB": size.forward / 1e3}  # fmt: skip
        what = f"{wire}, microbatches of {microbatch}"
        rows.append(Row(what, [s / step_s for s in measured], "1: the simulated step", Claim(0.9, 1.1), columns))
    return Result(rows, [f"{args.mbit:g} Mbit/s, {args.latency:g} s; measured: step / simulated step"])


def _config(name: str, wire: str, microbatch: int, args: Namespace) -> RunConfig:
    return small_run(
        name,
        args.steps + SKIP,
        args.stages,
        model={"vocab": 260, "dim": WIDTH, "heads": 4, "hidden": 64, "context": CONTEXT, "tied": False},
        pipeline={
            "stages": args.stages, "microbatches": 32 // microbatch, "microbatch_size": microbatch,
            "wire": wire_of(wire, WIDTH),
        },
        network=sleeping(0.005 * microbatch),
    )  # fmt: skip


def _trained(config: RunConfig, hosts: Sequence[Host]) -> RunRecord:
    """Train with the controller on the first host and one worker on each other; return the record."""
    name, port = config.name, 7010
    key = RUNS / f"{name}.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    fleet = {"local_workers": 0, "spares": 0, "host": hosts[0].address, "port": port, "key": str(key)}
    config = named(config.model_copy(update={"fleet": type(config.fleet).model_validate(fleet)}), name)
    with ExitStack() as running:

        def begin(host: Host, *words: object) -> subprocess.Popen[bytes]:
            log = running.enter_context((RUNS / f"{name}-{host.name}.log").open("wb"))
            process = subprocess.Popen([*host.prefix, *cli(*words)], stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.kill)
            return process

        leader = begin(hosts[0], "train", written(config), "--quiet")
        for host in hosts[1:]:
            begin(host, "join", f"{hosts[0].address}:{port}", "--workers", 1, "--key-file", key, "--patience", 60)
        leader.wait(600)
    record = read_run(Path(config.out) / name)
    require_finished(record)
    return record


if __name__ == "__main__":
    start(run_namespaces)
