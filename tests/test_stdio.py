from __future__ import annotations

import os
import subprocess
import sys

import pytest

LINES = "import sys\nfrom planaria.common.stdio import ensure, tolerate_closed_output, lost\nensure()\n"


def run(body: str, shell: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -c '{LINES}{body}' {shell}"
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)


def test_output_without_a_reader_is_lost_and_the_exit_code_kept() -> None:
    body = """
with tolerate_closed_output():
    for _ in range(20000):
        print("a line", flush=True)
    print(lost(), file=sys.stderr)
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
