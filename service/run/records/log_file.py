"""Writes the log file of one process of a run, `logs/<process>.log`, which is bounded in size. Each line begins with
the time.

Run as a script, this module copies its standard input into a log file. It is a separate process, so a log is complete
even if the logged process is killed. The children of the logged process, such as vLLM's engine core, write into the
same log. The script needs only the standard library, and ends after the last writer.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES = 16 << 20
"""Size in bytes at which a log is renamed to `<process>.log.1` and a new log begins."""
OLDER_FILES = 3
"""Number of renamed logs that are kept; older logs are deleted."""
LINE_BYTES = 64 << 10
"""Maximum bytes of a line; a longer line is split."""
MESSAGE = "%(levelname)s %(name)s: %(message)s"
"""Format of a message of Python's logging, without the time."""
LEFT_OUT = re.compile(rb":actor_name:|.*(?:Successfully reset prefix cache|setting pause state to)")
"""Lines that are left out: lines for Ray's own log reader, and vLLM's lines at each weight update."""
SUFFIX = ".log"

CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class _LogHandler(RotatingFileHandler):
    """A log file that drops messages if the disk is full. It neither stops the writer nor fills the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a failure to write a message."""


def log_handler(file: Path, message: str = "%(message)s") -> RotatingFileHandler:
    """A logging handler that appends to a log file; each message begins with the time in UTC, as
    2026-05-04T03:02:01.000Z."""
    handler = _LogHandler(file, maxBytes=LOG_BYTES, backupCount=OLDER_FILES, encoding="utf-8", errors="replace")
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ {message}", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    return handler


def plain(line: bytes) -> str:
    r"""A line as text: control characters become escapes, and only the last state of a progress bar stays.

    >>> plain(b"10 %\r20 %\n"), plain(b"\x1b[31mred\n")
    ('20 %', '\\x1b[31mred')
    """
    text = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextmanager
def log_into(file: Path) -> Iterator[None]:
    """Within the block, also write this process's log messages to a file, and the error that ends the block, if any."""
    root, in_file, on_terminal = logging.getLogger(), log_handler(file, MESSAGE), logging.StreamHandler()
    on_terminal.setLevel(logging.WARNING)
    for handler in (in_file, on_terminal):
        root.addHandler(handler)
    try:
        yield
    except Exception as error:  # log any error that ends the run, then raise it again
        told = {"name": file.stem, "levelname": "ERROR", "msg": str(error), "exc_info": sys.exc_info()}
        in_file.emit(logging.makeLogRecord(told))
        raise
    finally:
        for handler in (in_file, on_terminal):
            root.removeHandler(handler)
        in_file.close()


def main() -> None:
    """Copy the standard input to a log file. The arguments on the command line are the path of the file, and the first
    line to write into it."""
    handler = log_handler(Path(sys.argv[1]))
    handler.emit(logging.makeLogRecord({"msg": sys.argv[2]}))
    if os.fork():
        # The parent returns once the file exists. Ray ends an actor's children together with the actor; the copying
        # process is orphaned, so it is not among them.
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while line := sys.stdin.buffer.readline(LINE_BYTES):
        if not LEFT_OUT.match(line):
            handler.emit(logging.makeLogRecord({"msg": plain(line)}))


if __name__ == "__main__":
    main()
