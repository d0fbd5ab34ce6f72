"""S3 as moto's server in this process; s3fs finds it by environment variables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def bucket(name: str) -> Iterator[str]:
    """Yield the URL of a new bucket; skip the test if s3fs or moto is not installed.

    Requests are answered one at a time: moto's own conditional writes are not atomic.
    """
    s3fs, server = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    application = pytest.importorskip("moto.moto_server.werkzeug_app").DomainDispatcherApplication
    answer, lock = application.__call__, threading.Lock()

    def answer_alone(*request: Any) -> Any:
        with lock:
            return answer(*request)

    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(application, "__call__", answer_alone)
        for variable, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(variable, value)
        s3fs.S3FileSystem().mkdir(name)
        yield f"s3://{name}"
    running.stop()
