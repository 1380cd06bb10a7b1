"""A real run of `baton run` in which pair after pair of its processes is killed: real Ray, vLLM, FSDP and buffer.

A moment is read from the title of trainer-0's process, which Ray sets to the method that runs; a process's id from the
first line of each of its logs.
"""

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.e2e.ledger_watch import LedgerWatch
from tests.e2e.verdict import judged, step_of
from tests.sim.pairs import DELAYS, Pair, Told
from tests.waiting import free_port

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
STOP_SECONDS = 60.0
HEAL_SECONDS = 300.0
"""In which a run goes on after two deaths, on a loaded machine too."""
WORKER_SECONDS = 1.0
"""After which a new agent worker is started."""
MORE_STEPS = 2
"""Optimizer steps after which a run has healed."""

STATEFUL = ("buffer", "trainer-0", "trainer-1", "generator-0", "engine")
OTHERS = ("scorer-judge-0", "agent worker", "metrics-hub", "connection")
PARTNERS = ("buffer", "trainer-0", "generator-0")
TITLES = {"step": (".step",), "publication": (".weights",), "checkpoint": (".save", ".save_progress")}
"""What the title of a rank's process has at a moment; at others it has none of them."""

LOGS = {"scorer-judge-0": "scorer-judge"}
"""Logs that have another name than their actor."""

STARTS = (
    Pair("generator-0", "trainer-0", "start", 1.0),
    Pair("buffer", "generator-0", "start", 0.0),
    Pair("trainer-1", "buffer", "start", 4.0),
    Pair("metrics-hub", "scorer-judge-0", "start", 0.0),
    Pair("engine", "agent worker", "start", 15.0),
    Pair("scorer-judge-0", "trainer-0", "start", 1.0),
)
"""Those whose work is to load or to be asked first; a run is in its start only once."""
ENDS = (
    Pair("trainer-0", "buffer", "end", 0.0),
    Pair("buffer", "trainer-1", "end", 1.0),
    Pair("generator-0", "trainer-0", "end", 0.0),
    Pair("engine", "connection", "end", 1.0),
    Pair("metrics-hub", "scorer-judge-0", "end", 0.0),
    Pair("agent worker", "generator-0", "end", 4.0),
)


class Scenario(NamedTuple):
    """A pair, and how the first goes."""

    pair: Pair
    stops: bool = False
    """SIGSTOP for `STOP_SECONDS` in the place of a kill."""

    def __str__(self) -> str:
        return f"{self.pair}{', the first stands still' if self.stops else ''}"


def middle() -> list[Scenario]:
    """The 48 pairs while a run goes on.

    All 25 of those that hold state and wait for one another (but one of the same rank twice), and each of the others
    before and after the three that all the rest depends on. Moments and delays go round, so that each moment has each
    delay three times. The first stands still in ten, whose victims are all that can: twice those that all wait for.
    """
    pairs = [(first, second) for first in STATEFUL for second in STATEFUL if (first, second) != ("trainer-1",) * 2]
    pairs += [of for other in OTHERS for partner in PARTNERS for of in ((other, partner), (partner, other))]
    random.Random(31).shuffle(pairs)
    left = dict.fromkeys((*STATEFUL, *OTHERS[:-1]), 1) | dict.fromkeys(("buffer", "generator-0"), 2)
    found = []
    for number, (first, second) in enumerate(pairs):
        pair = Pair(first, second, ("lease", *TITLES)[number % 4], DELAYS[number // 4 % 4])
        left[first] = left.get(first, 0) - 1
        found.append(Scenario(pair, stops=left[first] >= 0))
    return found


def runs(number: int = 6) -> list[list[Scenario]]:
    """All 60, as runs of one at the start, eight on the way, and one at the end."""
    way = middle()
    return [[Scenario(STARTS[n]), *way[n::number], Scenario(ENDS[n])] for n in range(number)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class PairRun:
    """A run under way, with an agent worker beside it that is started again whenever it dies."""

    folder: Path
    model: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the run."""
    settings: Sequence[str] = ()
    told: Told = field(default_factory=Told)
    figures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._mark, self._port, self._began = secrets.token_hex(8), free_port(), time.monotonic()
        self._handed = self.folder / "handed"
        self._handed.mkdir()
        rows = [{"uid": f"p{row}", "prompt": f"prompt {row}"} for row in range(200)]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.run_folder = self.folder / "quickstart"
        self._env = {**os.environ, "BATON_TEST_RUN": self._mark, **self.variables}
        self._over, self._ledger = threading.Event(), LedgerWatch(self.run_folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service", "run", "--config", "configs/quickstart.yaml", *self._settings()],
            cwd=ROOT,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._worker: subprocess.Popen[bytes] | None = None
        self._threads = [threading.Thread(target=each) for each in (self._read, self._keep_worker, self._look)]
        for thread in self._threads:
            thread.start()

    def _settings(self) -> list[str]:
        return [
            f"run.dir={self.folder}",
            "run.max_steps=100000",
            "model.make=null",
            f"model.path={self.model}",
            "model.warm_start=null",
            "data.make_rows=null",
            f"data.train={self.folder / 'rows.jsonl'}",
            "env={name: 'tests.chaos.outside:HandsOn', trusted_modules: [tests.chaos.outside]}",
            f"env.options={{folder: {self._handed}}}",
            f"agents={{port: {self._port}, max_calls: 2, max_tokens: 128}}",
            "buffer.merge=tree",
            "generator.concurrent_groups=4",
            "algorithm.n_samples_per_prompt=2",
            "algorithm.filter_zero_variance=false",
            "trainer.mini_batch_size=2",
            "trainer.checkpoint_every=2",
            "scorers={judge: {use: 'tests.chaos.outside:judge', workers: 1, attempts: 100}}",
            "metrics.port=0",
            *self.settings,
        ]

    # -- what it does -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.said.append((self.now(), line.rstrip("\n")))

    def _keep_worker(self) -> None:
        while not self._over.is_set():
            words = [sys.executable, "-m", "tests.chaos.outside", str(self._handed)]
            self._worker = subprocess.Popen(words, cwd=ROOT, env=self._env, stdin=subprocess.DEVNULL)
            while self._worker.poll() is None and not self._over.is_set():
                time.sleep(0.05)
            self._over.wait(WORKER_SECONDS)

    def _look(self) -> None:
        """Note when each step is taken."""
        last = 0
        while not self._over.wait(0.1):
            if (step := self.step()) != last:
                last = step
                self.told.progress.append(self.now())

    def step(self) -> int:
        """The optimizer step that was taken last."""
        return step_of(self.run_folder)

    def until(self, look: Callable[[], object], seconds: float, what: str) -> None:
        """Wait while it goes on.

        Raises:
            AssertionError: it ended, or the time is up.
        """
        deadline = time.monotonic() + seconds
        while not look():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{seconds:.0f} s without {what}; the run said:\n{self.tail()}"
            time.sleep(0.02)

    def tail(self) -> str:
        """The last that it said."""
        return "\n".join(f"{at:7.1f} {line}" for at, line in self.told.said[-60:])

    # -- its processes ------------------------------------------------------------------------------------------------

    def pid(self, victim: str) -> int:
        """The newest process of a part; 0: there is none."""
        if victim == "agent worker":
            return self._worker.pid if self._worker is not None and self._worker.poll() is None else 0
        if victim == "engine":
            cores = (child for child in self._children("generator-0") if "EngineCore" in child.name())
            return next((child.pid for child in cores), 0)
        file = self.run_folder / "logs" / f"{LOGS.get(victim, victim)}.log"
        found = re.findall(r"begins: process (\d+) ", file.read_text()) if file.exists() else []
        return int(found[-1]) if found and _lives(int(found[-1])) else 0

    def _children(self, part: str) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid(part)).children(recursive=True) if self.pid(part) else []
        return []

    def title(self) -> str:
        """What trainer-0 does, in Ray's words."""
        with suppress(OSError):
            return (Path("/proc") / str(self.pid("trainer-0")) / "cmdline").read_text()
        return ""

    def until_moment(self, moment: str) -> None:
        """Wait for a moment, or for 30 s."""
        idle, deadline, words = 0, time.monotonic() + 30.0, TITLES.get(moment, ())
        others = [word for known in TITLES.values() for word in known]
        while time.monotonic() < deadline:
            title = self.title()
            if words and any(word in title for word in words):
                return
            idle = 0 if any(word in title for word in others) else idle + 1
            if moment == "lease" and idle > 50:
                return
            time.sleep(0.002)

    def strike(self, victim: str, stops: bool = False) -> None:
        """End a process, or let it stand still for a minute, or cut the driver's connections with its actors.

        A process that an earlier fault ended is awaited, unless the run ends before.
        """
        if victim == "connection":
            self.told.deaths.append((self.now(), victim))
            return self._cut()
        deadline = time.monotonic() + HEAL_SECONDS
        while not (pid := self.pid(victim)):
            if self.process.poll() is not None:
                return
            assert time.monotonic() < deadline, f"{victim} is not back:\n{self.tail()}"
            time.sleep(0.02)
        os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        self.told.deaths.append((self.now(), victim))
        if stops:
            threading.Timer(STOP_SECONDS, self._go_on, (pid,)).start()

    def _go_on(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _cut(self) -> None:
        for open_ in psutil.Process(self.process.pid).net_connections("tcp"):
            if open_.status == psutil.CONN_ESTABLISHED:
                ends = f"src {open_.laddr.ip}:{open_.laddr.port} dst {open_.raddr.ip}:{open_.raddr.port}"
                subprocess.run(["ss", "-K", *ends.split()], check=False, capture_output=True, timeout=10)

    # -- pairs --------------------------------------------------------------------------------------------------------

    def heal(self, scenario: Scenario) -> None:
        """Strike both at the moment, and wait until the run has healed."""
        pair, before, ended = scenario.pair, len(self.told.deaths), "healed"
        if pair.moment != "start":
            self.until_moment(pair.moment)
        self.strike(pair.first, scenario.stops)
        time.sleep(pair.delay)
        self.strike(pair.second)
        try:
            goal = self.step() + MORE_STEPS
            self.until(lambda: self.step() >= goal and all(map(self._is_up, pair.victims)), HEAL_SECONDS, "healing")
        except AssertionError:
            ended = "hung" if self.process.poll() is None else "ended"
            raise
        finally:
            self.note(ended, before)

    def _is_up(self, victim: str) -> bool:
        return victim == "connection" or self.pid(victim) > 0

    def note(self, ended: str, before: int) -> None:
        """Count the deaths after the first `before`, and say when they were named."""
        deaths = self.told.deaths[before:]
        told = Told(ended, self.now(), [*self.told.said], deaths, [*self.told.progress])
        print(f"{ended}: {deaths}, named after {told.naming()}, at most {told.silence():.1f} s without a line")
        self.figures.update({"kills": len(deaths), f"pairs and triples, {ended}": 1})

    def finish(self, scenario: Scenario | None = None) -> None:
        """Stop the run, strike both victims while it writes its final weights, and judge it."""
        before = len(self.told.deaths)
        self.process.send_signal(signal.SIGTERM)
        if scenario is not None:
            self.until(lambda: any("writing the final weights" in line for _, line in self.told.said), 60, "its end")
            self.strike(scenario.pair.first)
            time.sleep(scenario.pair.delay)
            self.strike(scenario.pair.second)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(HEAL_SECONDS)
        ended = f"code {self.process.poll()}"
        self.note(ended, before)
        assert self.process.poll() == 128 + signal.SIGTERM, f"{ended}\n{self.tail()}"
        judged(self.run_folder, self.step(), stopped=True)
        assert (self._ledger.open, self._ledger.lost) == ([], [])

    def resume(self, more: int) -> None:
        """Resume the run, which has ended, for so many optimizer steps, and judge it."""
        steps = self.step() + more
        words = [sys.executable, "-m", "service", "run", "--resume", str(self.run_folder), f"run.max_steps={steps}"]
        done = subprocess.run(words, cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=START_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        judged(self.run_folder, steps)

    def close(self) -> None:
        """End what is left of it."""
        self._over.set()
        self._ledger.stop()
        for process in (self.process, self._worker):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(30)
        for thread in self._threads:
            thread.join(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
