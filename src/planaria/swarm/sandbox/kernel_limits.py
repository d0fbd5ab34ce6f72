"""Kernel restrictions of the sandbox. Part of ``process.py``; imports nothing of planaria.

Before a program's first line its process permanently loses

- files other than the libraries of Python and the system and the offered modules: by ``landlock`` or, if the kernel
  lacks it, by a private file system that contains nothing else (``namespace``);
- system calls not listed below, so it cannot start processes or programs, open sockets, signal or trace, or write,
  create, rename or remove files (``seccomp``);
- time, memory and open files beyond the limits, and all privileges.
"""

# ruff: noqa: PTH103, PTH109, PTH110, PTH114, PTH115, PTH120, PTH123, PTH211
# pathlib takes longer to import than the whole sandbox
from __future__ import annotations

import ctypes
import os
import resource
import stat
import struct
import sys

ENOSYS, EACCES = 38, 13
CLONE_THREAD = 0x10000
F_SETFL = 4
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# fmt: off
X86_64 = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getpid": 39, "exit": 60, "wait4": 61,
    "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100,
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
    "getrandom": 278, "wait4": 260, "statx": 291, "rseq": 293, "faccessat2": 439,
}
# fmt: on


LOAD, EQUAL, ABOVE, ANY_BIT, ANSWER = 0x20, 0x15, 0x25, 0x45, 0x06
"""the BPF instructions that a filter needs"""
ALLOW, REFUSED, ABSENT, KILL = 0x7FFF0000, 0x50000 | EACCES, 0x50000 | ENOSYS, 0x80000000


class SyscallTable:
    """Processor-specific data: audit number, calls always allowed, and calls allowed by argument.

    ``refused`` holds (call, argument, test, constant): a call is refused if the test of its argument against the
    constant is true. It covers opening for writing and the fcntl commands that could send signals. ``clone`` may start
    threads only.
    """

    def __init__(
        self, audit: int, allowed: dict[str, int], openers: dict[int, int], fcntl: int, clone: int, pivot_root: int
    ) -> None:
        self.audit = audit
        self.allowed = allowed
        self.refused = [(call, argument, ANY_BIT, WRITES) for call, argument in openers.items()]
        self.refused.append((fcntl, 1, ABOVE, F_SETFL))
        self.clone = clone
        self.pivot_root = pivot_root


MACHINES = {
    "x86_64": SyscallTable(0xC000003E, X86_64, {2: 1, 257: 2}, fcntl=72, clone=56, pivot_root=155),
    "aarch64": SyscallTable(0xC00000B7, AARCH64, {56: 2}, fcntl=25, clone=220, pivot_root=41),
}


def seccomp_filter(machine: SyscallTable) -> bytes:
    """Return the seccomp filter in classic BPF. Unlisted calls fail with ENOSYS."""
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


def confine(seconds: int, memory: int, modules: list[str]) -> list[str]:
    """Restrict files and resources permanently; return what is in force. OSError if a required part is unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    mechanism = "namespace" if not (abi := landlock_abi(libc)) and enter_private_file_system(libc, modules) else ""
    set_resource_limits(seconds, memory)
    check_call(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    if abi:
        landlock(libc, abi, modules)
        mechanism = "landlock"
    return ["limits", "privileges", "seccomp", *filter(None, [mechanism])]


def seal(parent_pid: int) -> None:
    """Drop privileges and system calls, and die with the parent process ``parent_pid``."""
    libc = ctypes.CDLL(None, use_errno=True)
    check_call(libc.prctl(1, 9, 0, 0, 0))  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:
        raise OSError("its parent process has exited")
    header, nothing = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
    check_call(libc.capset(header, nothing))
    code = seccomp_filter(MACHINES[os.uname().machine])
    text = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(text))
    check_call(libc.prctl(22, 2, ctypes.c_char_p(description), 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def set_resource_limits(seconds: int, memory: int) -> None:
    """Set resource limits. RLIMIT_NPROC is not among them: it does not bind root, and seccomp blocks new processes."""
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # SIGXCPU at the soft limit; SIGKILL a second later for a program that catches it.
        resource.setrlimit(kind, (soft, soft + 1 if kind == resource.RLIMIT_CPU and soft != hard else soft))


def readable(modules: list[str]) -> list[str]:
    """Return the readable paths: the libraries of Python and of the system, and the offered modules."""
    library = os.__file__.rpartition("/")[0]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom"]
    return [library, sys.base_prefix + "/lib", *system, *modules]


def landlock_abi(libc: ctypes.CDLL) -> int:
    """Return the kernel's Landlock version; 0 if unsupported."""
    return max(0, int(libc.syscall(444, None, 0, 1)))


def landlock(libc: ctypes.CDLL, abi: int, modules: list[str]) -> None:
    """Restrict reading to :func:`readable` paths."""
    create = 444
    add_rule = 445
    restrict = 446
    rights = (1 << (13 if abi == 1 else 14 if abi == 2 else 15 if abi < 5 else 16)) - 1
    ruleset = check_call(libc.syscall(create, ctypes.c_char_p(struct.pack("<Q", rights)), 8, 0))
    for location in readable(modules):
        try:
            path = os.open(location, os.O_PATH)
        except OSError:
            continue
        reading = 4 | (8 if stat.S_ISDIR(os.fstat(path).st_mode) else 0)
        check_call(libc.syscall(add_rule, ruleset, 1, ctypes.c_char_p(struct.pack("<Qi", reading, path)), 0))
        os.close(path)
    check_call(libc.syscall(restrict, ruleset, 0))
    os.close(ruleset)


NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000
NO_SUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 0x1000, 0x4000, 0x40000, 2


def enter_private_file_system(libc: ctypes.CDLL, modules: list[str]) -> bool:
    """Move into a file system with only the :func:`readable` paths. False if the kernel does not allow it."""
    # Mount over the parent: a mount over the folder itself would hide the offered modules in it.
    user = os.getuid()
    group = os.getgid()
    root = os.path.dirname(os.getcwd())
    opened: list[tuple[str, int]] = []
    try:
        check_call(libc.unshare(NEW_USER | NEW_MOUNTS))
        for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        check_call(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
        opened += [
            (location, os.open(location, os.O_PATH)) for location in readable(modules) if os.path.exists(location)
        ]
        check_call(libc.mount(b"none", root.encode(), b"tmpfs", NO_SUID | NO_DEVICES, b"size=1m,mode=755"))
        for location, path in opened:
            bind_mount(libc, location, path, root + location)
        os.chdir(root)
        check_call(libc.syscall(MACHINES[os.uname().machine].pivot_root, b".", b"."))
        check_call(libc.umount2(b".", DETACH))
        os.chdir("/")
    except OSError:
        return False
    finally:
        for _, path in opened:  # open folders would still lead to the old files
            os.close(path)
    return True


def bind_mount(libc: ctypes.CDLL, location: str, path: int, target: str) -> None:
    """Make the open file ``path`` appear at ``target``; a symbolic link remains a link."""
    link, folder = os.path.islink(location), stat.S_ISDIR(os.fstat(path).st_mode)
    os.makedirs(target if folder and not link else os.path.dirname(target), exist_ok=True)
    if link:
        os.symlink(os.readlink(location), target)
        return
    if not folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    check_call(libc.mount(f"/proc/self/fd/{path}".encode(), target.encode(), None, BIND | RECURSIVE, None))


def check_call(result: int) -> int:
    """Return the result of a system call; OSError if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
