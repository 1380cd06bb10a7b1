"""Processes that need not import anything."""

import os
import sys
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, Self


class Forked:
    """A process that begins with all that this one has imported: loading Ray and torch anew takes seconds."""

    def __init__(self, function: Callable[..., int], *arguments: Any) -> None:
        given, stdin = os.pipe()
        stdout, printed = os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self.process = get_context("fork").Process(target=self._play, args=(given, printed, function, arguments))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            self.process.start()
        os.close(given)
        os.close(printed)

    def read_to(self, words: str) -> str:
        """The next line with these words."""
        return next(line for line in self.stdout if words in line)

    def go_on(self) -> None:
        """Let it read a line."""
        self.stdin.write("\n")
        self.stdin.flush()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int | None:
        """Its exit code."""
        self.process.join(60)
        return self.process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.stdin.close()
        self.stdout.close()

    def _play(self, given: int, printed: int, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
        self.stdin.close()  # else it would not see that the test has ended
        self.stdout.close()
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        os.dup2(given, 0)
        os.dup2(printed, 1)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.exit(function(*arguments))
