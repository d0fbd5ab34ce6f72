"""Programs that try to pass tests without solving the problem: none is rewarded."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.sandbox import channel
from planaria.swarm.sandbox.sandbox import Limits, ProgramTests, run
from planaria.swarm.tasks.programs import Programs
from support.swarm.task_builders import needs_sandbox

pytestmark = needs_sandbox
TESTS = "assert f(3) == 6\nassert abs(f(2) - 4) < 1e-6\nassert sorted(f(n) for n in range(3)) == [0, 2, 4]"
FRAMES = """
import sys
frame, seen = sys._getframe(), {}
while frame:
    seen |= {**frame.f_globals, **frame.f_locals}
    frame = frame.f_back
"""
YES = """
class {name}({base}):
    def __eq__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __lt__(self, other): return True
    def __hash__(self): return 0
f = lambda n: {name}()
"""
HACKS = {
    "equal to everything": YES.format(name="E", base="object"),
    "a number equal to everything": YES.format(name="E", base="int"),
    "a list equal to everything": YES.format(name="E", base="list"),
    "compared from the right": "class E:\n  def __req__(s, o): return True\n  __rsub__ = __eq__ = __abs__ = __req__\n"
    "f = lambda n: E()",
    "a number equal to none": "f = lambda n: float('nan')",
    "a class of another name": "class F(type):\n  def __instancecheck__(s, o): return True\n"
    "class E(metaclass=F):\n  __eq__ = lambda s, o: True\n  __class__ = int\nf = lambda n: E()",
    "exit 0": "import sys; sys.exit(0)",
    "exit 0 at once": "import os; os._exit(0)",
    "exit when asked": "import os\ndef f(n): os._exit(0)",
    "SystemExit when asked": "def f(n): raise SystemExit(0)",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)",
    "no assertions": "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\nf = lambda n: 0",
    "other builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.sorted = lambda x: [0, 2, 4]\n"
    "builtins.range = lambda n: []\nf = lambda n: 6",
    "custom builtins": "abs = lambda x: 0\nsorted = lambda x: [0, 2, 4]\nf = lambda n: 6",
    "another exec": "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None",
    "another import": "import builtins\nbuiltins.__import__ = lambda *a: None\nf = lambda n: 0",
    "assertions off": "import sys\nsys.argv = ['-O']\nsys.flags = None\nf = lambda n: 0",
    "prints that it passed": "import sys\nfor out in sys.stdout, sys.stderr:\n"
    "  print('ready\\nok\\nPASSED', file=out, flush=True)",
    "writes to every pipe": "import os\nfor n in range(64):\n  try: os.write(n, b'0' * 32)\n  except OSError: pass",
    "closes every pipe": "import os\nfor n in range(64):\n  try: os.close(n)\n  except OSError: pass\nf = int",
    "says that it loaded, then leaves": "import os\nfor n in range(3, 64):\n  try: os.write(n, b'm' + bytes(4))\n"
    "  except OSError: pass\nos._exit(0)",
    "reads the token": "import os\nfound = b''\nfor n in range(64):\n  try:\n    os.set_blocking(n, False)\n"
    "    found += os.read(n, 99)\n  except OSError: pass\nfor n in range(3, 64):\n  try: os.write(n, found)\n"
    "  except OSError: pass\nos._exit(0)",
    "tests in the frames": FRAMES + "text = b' '.join(x for x in seen.values() if isinstance(x, bytes))\n"
    "f = {3: 6, 2: 4, 0: 0, 1: 2}.get if b'assert f(%d)' % 3 in text else None",
    "tests in memory": "import gc\ntexts = [x for x in gc.get_objects() if isinstance(x, (str, bytes))]\n"
    "texts += [x for o in gc.get_objects() for x in gc.get_referents(o) if isinstance(x, (str, bytes))]\n"
    "f = (lambda n: 2 * n) if any('assert f(%d)' % 3 in str(x)[:99] for x in texts if len(x) < 999) else None",
    "another main": FRAMES + "for name in ('judge', 'described', 'live', 'run_program'):\n"
    "  if name in seen: seen[name].__code__ = (lambda *a: '').__code__\nf = lambda n: 0",
    "another channel": "import sys\nchannel = sys.modules.get('sandbox_channel')\nchannel.pack = lambda *a: b''\n"
    "channel.serve = print",
    "another struct": "import struct\nstruct.Struct.unpack = struct.pack = lambda *a: (0, 0)",
    "the token, when the tests run": "import os\ndef f(n):\n  os.write(2, os.read(0, 32))\n  os._exit(0)",
    "the tests, as they run": "import sys\ndef f(n):\n  frame = sys._getframe().f_back\n"
    "  if frame.f_code.co_filename == 'tests': return {3: 6, 2: 4, 0: 0, 1: 2}[n]",
    "the names of the tests": "def f(n):\n  import sys\n  places = sys._getframe().f_back.f_globals\n"
    "  places['abs'], places['sorted'] = (lambda x: 0), (lambda x: [0, 2, 4])\n  return 6",
    "other answers to what it is": "f = type('F', (), {'__call__': lambda s, n: s, '__eq__': lambda s, o: True})()",
    "its arguments changed": "def f(n):\n  globals()['n'] = 6\n  return 0",
    "traces its tests": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nf = lambda n: 0",
    "raises what a loop ends by": "def f(n): raise StopIteration",
    "a generator of everything": "def f(n):\n  while True: yield 6",
    "writes a result": "open('result.json', 'w').write('{\"passed\": true}')",
    "a file of hooks": "import os\nos.makedirs('sitecustomize')",
    "a pickle": "class P:\n  def __reduce__(s): return (print, ('ok',))\nf = lambda n: P()",
    "another thread": "import threading, os\nthreading.Thread(target=os._exit, args=[0]).start()\nf = lambda n: 0",
    "signals": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: None)\nos.kill(os.getppid(), 9)",
    "a name that is none": "globals()['f'] = None",
    "C": "import ctypes\nctypes.pythonapi",
    "C by another way": "import sys\nsys.modules.pop('_ctypes')\nimport _ctypes\nf = lambda n: 0",
    "garbage for an answer": "import os, sys\ndef f(n):\n  for p in range(3, 64):\n"
    "    try: os.write(p, b'm\\xff\\xff\\xff\\xff')\n    except OSError: pass\n  return 0",
}
ENDLESS = {
    "output": "while True: print('PASSED' * 1000)",
    "answers": "f = lambda n: 'x' * 10**8",
    "depth": "def f(n):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
    "a circle": "x = []\nx.append(x)\nf = lambda n: x",
    "a long way through": "def f(n):\n  while True: pass",
}


def test_the_tests_can_be_passed() -> None:
    assert run("def f(n):\n  return 2 * n", TESTS).kind == "ok"


@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_earns_nothing(hack: str) -> None:
    assert run(HACKS[hack], TESTS).kind == "failed"


@pytest.mark.parametrize("hack", ENDLESS)
def test_an_endless_program_earns_nothing(hack: str) -> None:
    assert run(ENDLESS[hack], TESTS, Limits(seconds=1.0)).kind != "ok"


def test_a_program_cannot_change_the_tests_arguments() -> None:
    program = "def f(given):\n  given.clear()\n  return []"
    assert run(program, "given = [3, 1]\nassert f(given) == sorted(given)").kind == "failed"


def test_a_program_cannot_replace_the_tests_helpers() -> None:
    exam = ProgramTests("assert near(f(3), 6)", ("f",), first="def near(a, b): return abs(a - b) < 1e-9")
    assert run("f = lambda n: 0\nnear = lambda a, b: True", exam).kind == "failed"
    assert run("f = lambda n: 2.0 * n", exam).kind == "ok"


def test_tests_can_use_objects_of_the_program() -> None:
    program = """
class Node:
    def __init__(self, value, after=None):
        self.value, self.after = value, after
    def __len__(self):
        return 1 + (len(self.after) if self.after else 0)
    def __getitem__(self, n):
        return self.value + n
def values(node):
    while node:
        yield node.value
        node = node.after
"""
    tests = """
one = Node(1)
two = Node(2, after=one)
assert list(values(two)) == [2, 1] and two.after.value == 1 and len(two) == 2 and two[5] == 7
assert two.after == one and two != one
try:
    two.nothing
except AttributeError:
    pass
else:
    assert False
"""
    assert run(program, tests).kind == "ok"


def test_an_object_of_the_program_has_no_truth_value() -> None:
    assert run("f = lambda n: object()", "assert f(1)").reason.startswith("tests: TypeError")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.fractions()
    | st.sampled_from([*channel.TYPES.values(), range(3, 9, 2)]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner)
    | st.frozensets(st.integers()) | st.sets(st.text()),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.slow
@given(PLAIN)
def test_a_plain_value_is_transmitted_unchanged(value: object) -> None:
    found = channel.unpack(channel.pack(value, channel.reject_object), channel.reject_object)
    assert found == value and type(found) is type(value)


@given(st.binary())
def test_any_bytes_are_a_value_or_raise_an_expected_error(data: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError, LookupError, ArithmeticError):
        channel.unpack(data, lambda number: number)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "count"), [("mbpp/mbpp.jsonl", 974), ("humaneval/HumanEval.jsonl.gz", 164)])
def test_every_reference_program_of_a_data_set_passes(shared_data: Path, name: str, count: int) -> None:
    task = Programs(path=str(shared_data / name), seconds=60)
    solved = [task.solution(task.problem(n), random.Random(0)) for n in range(count)]
    failed = [n for n, text in enumerate(solved) if text is None or task.score(task.problem(n), text) != 1]
    assert task.training + task.held_out == count and failed == []
