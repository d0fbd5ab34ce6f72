"""Entry point of a worker process."""

from __future__ import annotations

import time
from typing import NoReturn

import torch

from planaria.common import logs
from planaria.common.memory_pool import keep_freed_memory
from planaria.runtime.fleet.base import WorkerConnection
from planaria.runtime.fleet.control_connections import BlockingConnection
from planaria.runtime.fleet.failover_connection import FailoverConnection
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.edge import SocketTransport
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.worker.control_link import ControlLink
from planaria.runtime.worker.log_file import begin_log
from planaria.runtime.worker.setup import Setup
from planaria.runtime.worker.sleeping_runner import layer_seconds, warm_runner
from planaria.runtime.worker.worker import Worker


def main(setup: Setup, connection: WorkerConnection, name: str, incarnation: int) -> NoReturn:
    """Work until the controller dismisses this process."""
    begin_log(setup.folder, setup.config.name, name, setup.log)
    torch.set_num_threads(setup.config.fleet.threads)
    keep_freed_memory()
    inbox = Inbox()
    control_link = ControlLink(connection, setup.config.fleet.heartbeat_s, inbox=inbox)
    host = connection.own_address if isinstance(connection, BlockingConnection | FailoverConnection) else setup.host
    transport = SocketTransport(inbox, host, setup.key, setup.reach)
    control_link.trouble = lambda: transport.trouble
    began = time.monotonic()
    # No variable here may refer to the runner: this function never returns, so its memory would stay occupied.
    worker = Worker(setup, ResolvedRun(setup.config), name, control_link, transport, warm_runner(setup.config))
    worker.messages.wait_timeout.warm_s = time.monotonic() - began
    if isinstance(connection, FailoverConnection):
        worker.follow_controller(connection.address)
        connection.on_move = worker.follow_controller
    layer_s = layer_seconds(setup.config, worker.runner) if setup.config.pipeline.has_uneven_stages else 0.0
    with logs.add_context(worker.log_fields):
        worker.run(incarnation, layer_s)
