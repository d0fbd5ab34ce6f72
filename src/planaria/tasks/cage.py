"""The cage: what a stranger's program runs in. It is started as a script and imports nothing of planaria.

Before the program's first line the process gives up, for good,

- every system call that is not on the list below: there is no way to start a process or another program, to open a
  socket, to signal or trace anything, to open a file for writing, or to make, rename or remove one (``seccomp``);
- reading any file but Python's own library, the system's, and the modules in its folder (``landlock``, where the
  kernel has it);
- time, memory and open files beyond the limits, and all privileges if it had some.

The job comes on standard input: two lengths, the limits, the program, its tests, and then a word that is read only
when the tests have passed and is said back on standard error as proof of it. What the program prints goes to standard
output.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import struct
import sys
import types

HEAD = struct.Struct("<IIIQ")
"""bytes of the program, bytes of its tests, seconds of processor time, bytes of address space"""
WORD = 32
READY = b"ready"

ENOSYS, EACCES = 38, 13
CLONE_THREAD = 0x10000
F_SETFL = 4
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# fmt: off
X86_64 = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63,
    "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186,
    "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "restart_syscall": 219,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262,
    "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "dup3": 292,
    "pipe2": 293, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
}
AARCH64 = {
    "getcwd": 17, "dup": 23, "dup3": 24, "faccessat": 48, "close": 57, "pipe2": 59, "getdents64": 61,
    "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pselect6": 72, "ppoll": 73,
    "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98,
    "set_robust_list": 99, "nanosleep": 101, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115,
    "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134,
    "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "uname": 160, "getrusage": 165, "gettimeofday": 169,
    "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178,
    "sysinfo": 179, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233,
    "getrandom": 278, "statx": 291, "rseq": 293, "faccessat2": 439,
}
# fmt: on


LOAD, EQUAL, ABOVE, ANY_BIT, ANSWER = 0x20, 0x15, 0x25, 0x45, 0x06
"""the few instructions of the kernel's classic BPF that a filter needs"""
ALLOW, REFUSED, ABSENT, KILL = 0x7FFF0000, 0x50000 | EACCES, 0x50000 | ENOSYS, 0x80000000


class Machine:
    """What differs between processors: the audit number, the calls allowed always, and those that depend.

    ``refused`` are (call, argument, test, constant): refused where the test of the argument against the constant holds,
    and allowed elsewhere: opening for writing, and whatever of fcntl could make the kernel send signals. ``clone`` may
    start threads only.
    """

    def __init__(self, audit: int, allowed: dict[str, int], openers: dict[int, int], fcntl: int, clone: int) -> None:
        self.audit = audit
        self.allowed = allowed
        self.refused = [(call, argument, ANY_BIT, WRITES) for call, argument in openers.items()]
        self.refused.append((fcntl, 1, ABOVE, F_SETFL))
        self.clone = clone


MACHINES = {
    "x86_64": Machine(0xC000003E, X86_64, {2: 1, 257: 2}, fcntl=72, clone=56),
    "aarch64": Machine(0xC00000B7, AARCH64, {56: 2}, fcntl=25, clone=220),
}


def program_filter(machine: Machine) -> bytes:
    """The seccomp filter, in classic BPF. What is on no list fails with ENOSYS, as if the kernel knew no such call."""
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine.audit), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for call in machine.allowed.values():
        code += [(EQUAL, 0, 1, call), (ANSWER, 0, 0, ALLOW)]
    depends = [(*rule, REFUSED, ALLOW) for rule in machine.refused]
    for call, argument, test, constant, where_true, where_false in [
        *depends,
        (machine.clone, 0, ANY_BIT, CLONE_THREAD, ALLOW, REFUSED),
    ]:
        code += [(EQUAL, 0, 4, call), (LOAD, 0, 0, 16 + 8 * argument), (test, 0, 1, constant)]
        code += [(ANSWER, 0, 0, where_true), (ANSWER, 0, 0, where_false)]
    code += [(ANSWER, 0, 0, ABSENT)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def lock_up(seconds: int, memory: int, offered: list[str]) -> bytes:
    """Give everything up; the names of the protections that are in force. OSError when one that must be cannot be."""
    libc = ctypes.CDLL(None, use_errno=True)
    limit(seconds, memory)
    checked(libc.prctl(1, 9, 0, 0, 0))  # PR_SET_PDEATHSIG: no cage outlives its keeper
    checked(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    files = hide_files(libc, offered)
    header, nothing = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
    checked(libc.capset(header, nothing))
    machine = MACHINES[os.uname().machine]
    code = program_filter(machine)
    text = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(text))
    checked(libc.prctl(22, 2, ctypes.c_char_p(description), 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    return b"limits privileges seccomp" + (b" landlock" if files else b"")


def limit(seconds: int, memory: int) -> None:
    """Resource limits. A number of processes is not among them: it would not bind root, and none can be started."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # Beyond its time a program gets a signal that says so; one that catches it is killed a second later.
        resource.setrlimit(kind, (soft, soft + 1 if kind == resource.RLIMIT_CPU and soft != hard else soft))


def hide_files(libc: ctypes.CDLL, offered: list[str]) -> bool:
    """Landlock: nothing can be read but the libraries of Python and of the system, and what is ``offered``.

    False where the kernel lacks it.
    """
    create, add_rule, restrict = 444, 445, 446
    abi = libc.syscall(create, None, 0, 1)
    if abi < 1:
        return False
    rights = (1 << (13 if abi == 1 else 14 if abi == 2 else 15 if abi < 5 else 16)) - 1
    ruleset = checked(libc.syscall(create, ctypes.c_char_p(struct.pack("<Q", rights)), 8, 0))
    library = os.__file__.rpartition("/")[0]
    for place in (library, sys.base_prefix + "/lib", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache",
                  "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom", *offered):  # fmt: skip
        try:
            path = os.open(place, os.O_PATH)
        except OSError:
            continue
        reading = 4 | (8 if stat.S_ISDIR(os.fstat(path).st_mode) else 0)
        checked(libc.syscall(add_rule, ruleset, 1, ctypes.c_char_p(struct.pack("<Qi", reading, path)), 0))
        os.close(path)
    checked(libc.syscall(restrict, ruleset, 0))
    os.close(ruleset)
    return True


def checked(result: int) -> int:
    """The result of a system call; OSError when it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def exactly(count: int) -> bytes:
    """So many bytes of standard input."""
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            raise EOFError("the job is cut short")
        data += piece
    return data


def carry_out(program: bytes, tests: bytes) -> str | None:
    """Run a program and then its tests in the same namespace; what went wrong, in one line, or None."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    perform = exec  # taken now: the program could put something else in its place
    step = "tests"
    try:
        checks = compile(tests, "tests", "exec")
        step = "program"
        perform(compile(program, "program", "exec"), module.__dict__)
        step = "tests"
        perform(checks, module.__dict__)
    # A stranger's program may raise whatever there is, SystemExit included, and none of it is a pass.
    except BaseException as error:
        if not tests and isinstance(error, SystemExit) and not error.code:
            return None
        try:
            return f"{step}: {type(error).__name__}: {error}"
        except BaseException:
            return f"{step}: an exception that cannot be told"
    return None


def main() -> None:
    """Lock up, run the job, say how it went."""
    read, write, leave, flush = os.read, os.write, os._exit, sys.stdout.flush  # as above: before the program can
    program_bytes, tests_bytes, seconds, memory = HEAD.unpack(exactly(HEAD.size))
    program, tests = exactly(program_bytes), exactly(tests_bytes)
    word, report, nowhere = os.dup(0), os.dup(2), os.open(os.devnull, os.O_RDWR)
    offered = ["."] if any(os.scandir(".")) else []
    ready = READY + b" " + lock_up(seconds, memory, offered) + b"\n"
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 2)
    os.environ.clear()
    sys.path += offered  # behind Python's own: no module that is offered stands in the way of those
    write(report, ready)
    failure = carry_out(program, tests)
    try:
        flush()
    except BaseException as error:  # standard output is the program's to break
        failure = failure or f"program: {type(error).__name__}"
    write(report, read(word, WORD) if failure is None else failure.encode("utf-8", "replace")[:1000])
    leave(0)


if __name__ == "__main__":
    main()
