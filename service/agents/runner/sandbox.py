"""Starts a command with limits in a session of its own and, where the machine allows it, in namespaces (a sandbox).

    command process --fork--> outer: user, network, IPC and mount namespaces
                           --fork--> init: process 1 of a PID namespace; its end ends all other processes in there
                                       --fork--> the command

In its namespaces a command reaches no other processes and, with `Launch.port`, no network: the one socket that listens
there is handed to the command process, which forwards the command's connections. Without namespaces the command is a
child of the command process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import ioctl
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from service.rollout.child_main import PR_SET_PDEATHSIG

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
MS_NOSUID, MS_NODEV = 2, 4
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

MAX_MESSAGE = 4096
OUR_PROCESSES = 3
"""Number of Baton's processes in a user namespace, in addition to the command's own."""
ROOM = 2
"""The operating system refuses a command more processes than this multiple of `limits.processes`. Baton ends a command
with more than `limits.processes` processes, with the limit as the reason."""
RESERVED_IDS = 301
"""Added to the maximum process id of a namespace, because the kernel does not use ids below 300 a second time."""
PID_MAX_OF_NAMESPACES = (6, 14)
"""The first kernel version in which each PID namespace has a maximum process id of its own; older kernels have one
maximum for the whole machine."""
KERNEL = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


class NotStarted(Exception):
    """The command cannot be started; the message gives the reason."""


@dataclass(frozen=True)
class Launch:
    """A command to start, and its limits."""

    command: Sequence[str]
    folder: Path
    """The command's current folder."""
    stdin: Path
    variables: Mapping[str, str]
    """All environment variables of the command."""
    limits: Mapping[str, Any]
    """The limits of `CommandLimits`, as plain values."""
    port: int | None
    """Port of loopback that is forwarded; None: the command has the machine's network."""


class Started(NamedTuple):
    """A command that runs, with access to its network connections and to its processes."""

    process: subprocess.Popen[bytes]
    """The command. With namespaces: the outer process, which ends together with the command and has the command's exit
    code. `stdout` is the command's stdout and stderr."""
    listener: socket.socket | None
    """Accepts the command's connections to `Launch.port`."""
    proc: int | None
    """The open /proc of the command's PID namespace; None if there is no namespace, or this machine refuses the
    mount."""


def namespaces_refused() -> str:
    """Why this process may not create namespaces on this machine; empty if it may."""
    limits = {"memory_bytes": 1 << 40, "file_bytes": 1 << 40, "processes": 1}
    probe = Launch(("true",), Path("/"), Path(os.devnull), {}, limits, port=0)
    try:
        process, listener, proc = start(probe, namespaces=True)
    except NotStarted as refused:
        return str(refused).removeprefix("true: ")
    if listener is not None:
        listener.close()
    if proc is not None:
        os.close(proc)
    with process:
        return ""


def start(launch: Launch, namespaces: bool) -> Started:
    """Start a command; the caller must have only one thread.

    Raises:
        NotStarted: the command cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, launch.stdin.open("rb") as stdin:
        try:
            process = subprocess.Popen(
                launch.command,
                bufsize=0,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=launch.folder,
                env=launch.variables,
                start_new_session=True,
                preexec_fn=partial(_confine, launch, namespaces, theirs),
            )
        except subprocess.SubprocessError as error:  # `_confine` failed; the last message says why
            theirs.close()
            *_, why = iter(partial(ours.recv, MAX_MESSAGE), b"")
            raise NotStarted(f"{launch.command[0]}: {why.decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise NotStarted(f"{launch.command[0]}: {_why(error)}") from error
        if not namespaces:
            return Started(process, None, None)
        listener = None if launch.port is None else socket.socket(fileno=socket.recv_fds(ours, MAX_MESSAGE, 1)[1][0])
        proc = socket.recv_fds(ours, MAX_MESSAGE, 1)[1]
        return Started(process, listener, proc[0] if proc else None)


def _confine(launch: Launch, namespaces: bool, report: socket.socket) -> None:
    """Enter namespaces and set limits, in the process that becomes the command; report the reason of a failure."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if namespaces:
            _enter_namespaces(libc, launch, report)
        # Set after entering the namespaces, because a change of credentials clears this setting.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if namespaces:
            # Hides /proc of the command's parents, and so Baton's environment variables, from the command.
            libc.prctl(PR_SET_DUMPABLE, 0)
            _fork_and_end_as_child()
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _mount_proc(libc, launch.limits["processes"], report)
            _fork_and_end_as_child()
            os.setsid()
            libc.prctl(PR_SET_DUMPABLE, 1)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _limit(launch.limits, namespaces)
    except BaseException as error:
        report.send(_why(error).encode()[: MAX_MESSAGE // 2])
        raise


def _enter_namespaces(libc: ctypes.CDLL, launch: Launch, report: socket.socket) -> None:
    """Enter namespaces with the same user and group and an empty /dev/shm; with a port, send a socket that listens on
    it."""
    port, most = launch.port, launch.limits["memory_bytes"]
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | (0 if port is None else CLONE_NEWNET)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), f"no namespaces: {os.strerror(ctypes.get_errno())}")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)
    # Containers may forbid the mount and the limit; memory that is mapped is counted in any case.
    libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=1777,size=%d" % most)
    with suppress(OSError):
        Path("/proc/sys/kernel/shmall").write_text(str(most // resource.getpagesize()))
    if port is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
        with socket.create_server(("127.0.0.1", port)) as listener:
            socket.send_fds(report, [b"listening"], [listener.fileno()])


def _mount_proc(libc: ctypes.CDLL, processes: int, report: socket.socket) -> None:
    """Mount and send the /proc of this PID namespace, and bound the number of its processes, also for the user root.

    Containers may forbid the mount; the command then sees process ids that are meaningless to it.
    """
    if libc.mount(b"proc", b"/proc", b"proc", 0, None):
        report.send(b"no /proc")
        return
    if KERNEL >= PID_MAX_OF_NAMESPACES:
        Path("/proc/sys/kernel/pid_max").write_text(str(ROOM * processes + RESERVED_IDS))
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    socket.send_fds(report, [b"/proc"], [proc])
    os.close(proc)


def _fork_and_end_as_child() -> None:
    """Fork and return in the child; the parent reaps ended processes, and exits with the child's exit code or 128 + its
    signal."""
    last_file = max(map(int, os.listdir("/proc/self/fd")))  # read before the child mounts another /proc
    child = os.fork()
    if not child:
        return
    os.closerange(0, last_file + 1)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _limit(limits: Mapping[str, Any], namespaces: bool) -> None:
    """Set the limits that the operating system enforces; `bounded.py` watches the others."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")  # without memory, the kernel ends the command first
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EROFS):
            raise
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: limits["file_bytes"]}
    if namespaces:  # outside of a user namespace the limit counts all processes of the user
        bounds[resource.RLIMIT_NPROC] = ROOM * limits["processes"] + OUR_PROCESSES
    for which, most in bounds.items():
        hard = resource.getrlimit(which)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (allowed, allowed))


def _why(error: BaseException) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)
