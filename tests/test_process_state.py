"""The state of a process: signals, standard streams, and freed memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.cli import entry
from planaria.common.signals import STOPS, interrupt_on_stop
from planaria.runtime.engine.stopping import stop_requested


@pytest.fixture
def hang_up() -> Iterator[None]:
    """Restore the default action of SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", STOPS)
def test_the_first_signal_is_noted_and_the_second_interrupts_except_sighup(number: signal.Signals) -> None:
    with stop_requested() as stop_signal:
        os.kill(os.getpid(), number)
        assert stop_signal() == number.name
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)
        else:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", STOPS)
def test_any_signal_interrupts_and_a_second_sighup_is_ignored(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in STOPS]
    with interrupt_on_stop():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)
    assert [signal.getsignal(n) for n in STOPS] == before


def test_an_interrupt_that_a_library_replaces_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As numpy's and pydantic's imports do."""

    def interrupted_import(arguments: list[str], may_fork: bool) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None
        return 0

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(entry, "run", interrupted_import)
        entry.main(["train"])
    assert ended.value.code == 130 and capsys.readouterr().err == "planaria: interrupted\n"


@pytest.mark.usefixtures("hang_up")
def test_an_ignored_sighup_stays_ignored() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupt_on_stop(), stop_requested() as stop_signal:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop_signal()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


WHILE_IMPORTED = """
import os, signal, sys
from importlib import import_module

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "planaria.cli.entry":
            os.kill(os.getpid(), signal.SIGINT)

module, name = sys.argv[1].split(":")
entry = getattr(import_module(module), name)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["recipes"]
entry()
"""


def test_ctrl_c_during_imports_ends_the_command_silently() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    command = [sys.executable, "-c", WHILE_IMPORTED, project["scripts"]["planaria"]]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


LINES = """
import sys
from planaria.common.stdio import lost_output, open_standard_streams, tolerate_closed_output
open_standard_streams()
"""


def run(body: str, shell: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -c '{LINES}{body}' {shell}"
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)


def test_output_without_a_reader_is_lost_and_the_exit_code_kept() -> None:
    body = """
with tolerate_closed_output():
    for _ in range(20000):
        print("a line", flush=True)
    print(lost_output(), file=sys.stderr)
    print("the end")
sys.exit(7)
"""
    done = run(body, "| head -1")
    assert (done.returncode, done.stdout) == (7, "a line\n")
    assert done.stderr == "standard output: Broken pipe\n"


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-", "2>&-"])
def test_closed_standard_streams_do_not_capture_other_files(closed: str) -> None:
    body = """
with tolerate_closed_output():
    file = open("/dev/null")
    print("into nowhere")
    print("into nowhere", file=sys.stderr)
sys.exit(7 if file.fileno() > 2 else 1)
"""
    assert run(body, closed).returncode == 7


def test_characters_outside_the_terminals_encoding_are_escaped() -> None:
    command = f'{LINES}print("caf\\u00e9 \\udce9 …")'
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stdout) == (0, "caf\\xe9 \\udce9 \\u2026\n"), done.stderr


PROGRAM = """
import resource
from planaria.common.memory_pool import keep_freed_memory
import torch
def passes(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        held = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(24)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = keep_freed_memory()
passes(3)
print(kept, passes(5))
"""


def fresh_pages(**environment: str) -> tuple[bool, int]:
    """Return whether the process keeps freed memory, and the fresh pages it touches after warm-up."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, text=True, check=True
    )
    kept, fresh = done.stdout.split()
    return kept == "True", int(fresh)


@pytest.mark.slow
def test_passes_touch_no_fresh_pages_unless_malloc_is_configured() -> None:
    kept, fresh = fresh_pages()
    if not kept:
        pytest.skip("no glibc")
    # glibc's default behaviour depends on the top of the heap, so compare with a user's threshold: each of 120 tensors
    # then has its own mapping with at least two fresh pages.
    kept_freed, returned = fresh_pages(MALLOC_MMAP_THRESHOLD_="262144")
    assert not kept_freed and returned >= 240
    assert fresh < returned / 20
