"""Starts a command with limits in a session of its own and, where the machine allows it, in namespaces.

    supervisor --fork--> outer: user, network, IPC and mount namespaces
                           --fork--> init: process 1 of a PID namespace; with it the kernel ends all others in there
                                       --fork--> the command

In its namespaces a command reaches neither other processes nor a network: the one socket that listens there is handed
to the supervisor, which forwards its connections. Without namespaces the supervisor's child is the command itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple, NoReturn

from service.rollout.child_main import PR_SET_PDEATHSIG

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

START_SECONDS = 20.0
"""Seconds in which a command must have started."""
MAX_MESSAGE = 4096
OUR_PROCESSES = 3
"""Processes of a user namespace beside the command's own."""


class NotStarted(Exception):
    """The command cannot be started; says why."""


@dataclass(frozen=True)
class Launch:
    """What to start, and its limits."""

    command: Sequence[str]
    folder: Path
    """The current folder."""
    stdin: Path
    variables: Mapping[str, str]
    """The whole environment."""
    memory_bytes: int
    file_bytes: int
    processes: int
    port: int | None
    """Port of loopback that is forwarded; None: the command reaches the network as it is."""


class Started(NamedTuple):
    """A command that runs."""

    pid: int
    """Its process, or the outer one of its namespaces, which ends with it and has its exit code."""
    output: int
    """File to read stdout and stderr from."""
    listener: socket.socket | None
    """Accepts the command's connections to `Launch.port`."""


def namespaces_refused() -> str:
    """Why this machine allows this process no namespaces; empty where it does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        try:
            _enter_namespaces(ctypes.CDLL(None, use_errno=True), 0, theirs)
        except BaseException as error:  # noqa: BLE001 - this process is a copy: nothing may go on in it
            theirs.send(_why(error))
        finally:
            os._exit(0)
    theirs.close()
    try:
        with ours:
            listener = _report(ours)
    except NotStarted as error:
        return str(error)
    finally:
        os.waitpid(pid, 0)
    if listener is not None:
        listener.close()
    return ""


def start(launch: Launch, namespaces: bool) -> Started:
    """Start a command; the caller has only one thread.

    Raises:
        NotStarted: the command cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, written = os.pipe()
    pid = os.fork()
    if not pid:
        _in_child(launch, namespaces, theirs, written)
    theirs.close()
    os.close(written)
    try:
        with ours:
            listener = _report(ours)
    except (NotStarted, OSError):
        os.close(output)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return Started(pid, output, listener)


def _report(ours: socket.socket) -> socket.socket | None:
    """Read what the child reports until the command runs."""
    ours.settimeout(START_SECONDS)
    listener = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(ours, MAX_MESSAGE, 1)
        if not message:
            return listener
        if descriptors:
            listener = socket.socket(fileno=descriptors[0])
            continue
        if listener is not None:
            listener.close()
        raise NotStarted(message.decode(errors="replace"))


def _in_child(launch: Launch, namespaces: bool, report: socket.socket, output: int) -> NoReturn:
    """Become the command, or the parents of the command in its namespaces."""
    try:
        _close_all_but(0, 1, 2, report.fileno(), output)
        os.setsid()
        libc = ctypes.CDLL(None, use_errno=True)
        if namespaces:
            _enter_namespaces(libc, launch.port, report)
        # After the namespaces: a change of credentials clears it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if namespaces:
            _hide_from_command(libc)
            _fork_and_end_as_child(report.fileno(), output)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # Containers may forbid it; the command then reads numbers of processes that mean nothing to it.
            libc.mount(b"proc", b"/proc", b"proc", 0, None)
            _fork_and_end_as_child(report.fileno(), output)
            os.setsid()
            libc.prctl(PR_SET_DUMPABLE, 1)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _execute(launch, namespaces, output)
    except BaseException as error:  # noqa: BLE001 - this process is a copy of the supervisor: nothing may go on in it
        report.send(launch.command[0].encode()[: MAX_MESSAGE // 2] + b": " + _why(error))
    finally:
        os._exit(127)


def _enter_namespaces(libc: ctypes.CDLL, port: int | None, report: socket.socket) -> None:
    """Enter namespaces with the same user and group; with a port, send the socket that listens on it."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | (0 if port is None else CLONE_NEWNET)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), f"no namespaces: {os.strerror(ctypes.get_errno())}")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)
    if port is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
        with socket.create_server(("127.0.0.1", port)) as listener:
            socket.send_fds(report, [b"listening"], [listener.fileno()])


def _hide_from_command(libc: ctypes.CDLL) -> None:
    """Close to the command what it could find in /proc of its parents: Baton's environment variables and files."""
    libc.prctl(PR_SET_DUMPABLE, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nothing, file)
    os.close(nothing)


def _fork_and_end_as_child(*files: int) -> None:
    """Return in a child; the parent reaps whatever ends, and ends with the child's exit code, 128 + a signal's."""
    child = os.fork()
    if not child:
        return
    for file in files:
        os.close(file)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _execute(launch: Launch, namespaces: bool, output: int) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program inherits that
        signal.signal(number, signal.SIG_DFL)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")  # before a generator, when the machine has no memory left
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EROFS):
            raise
    stdin = os.open(launch.stdin, os.O_RDONLY)
    for source, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.chdir(launch.folder)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: launch.memory_bytes,
        resource.RLIMIT_FSIZE: launch.file_bytes,
    }
    if namespaces:  # outside of a user namespace the limit counts all processes of the user
        limits[resource.RLIMIT_NPROC] = launch.processes + OUR_PROCESSES
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (allowed, allowed))
    os.execvpe(launch.command[0], list(launch.command), dict(launch.variables))


def _why(error: BaseException) -> bytes:
    return str(error.strerror if isinstance(error, OSError) else error).encode()[: MAX_MESSAGE // 2]


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError as error:
                if error.errno != errno.EBADF:  # the file of this very listing
                    raise
