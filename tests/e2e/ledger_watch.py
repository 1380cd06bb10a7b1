"""Scrapes a run each second, as Prometheus does, and keeps the pages on which the token ledger does not close."""

import http.client
import json
import re
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

FATE = re.compile(r"^baton_tokens\{.*\} (\S+)$", re.MULTILINE)
ACCEPTED = re.compile(r"^baton_accepted_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


def difference(page: str) -> float:
    """Accepted tokens less the tokens of every fate, on one page of `/metrics`.

    While the buffer is silent a page has no fates: the hub goes on with its counters, but not with its gauges.
    """
    return sum(map(float, ACCEPTED.findall(page))) - sum(map(float, FATE.findall(page)))


class LedgerWatch:
    """Watches the run whose folder this is, from when it serves its metrics until `stop`."""

    def __init__(self, folder: Path, enter: Callable[[], None] = lambda: None) -> None:
        """`enter` is called first in the thread that scrapes, which may have to enter the network of the run."""
        self._enter = enter
        self._folder = folder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.scrapes = 0
        """Pages that showed accepted tokens."""
        self.open: list[float] = []
        """The difference of each page that did not close."""
        self.lost: list[float] = []
        """By how many accepted tokens a page fell behind an earlier one."""
        self._thread.start()

    def stop(self) -> None:
        """Scrape no more."""
        self._stopped.set()
        self._thread.join(30)

    def _watch(self) -> None:
        self._enter()
        most = 0.0
        while not self._stopped.wait(1.0):
            page = page_of(self._folder)
            if ACCEPTED.search(page):
                self.scrapes += 1
                accepted = sum(map(float, ACCEPTED.findall(page)))
                if accepted < most:
                    self.lost.append(most - accepted)
                most = max(most, accepted)
                if FATE.search(page) and difference(page):
                    self.open.append(difference(page))


def page_of(folder: Path) -> str:
    """What a run's `/metrics` shows; nothing while the run does not serve it."""
    try:
        url = json.loads((folder / "address.json").read_text())["url"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            page: str = answer.read().decode()
    except (OSError, ValueError, http.client.HTTPException):  # not begun to serve, or just ended
        return ""
    return page
