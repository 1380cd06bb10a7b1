"""Chaos runs as the tests see them: a folder, a process, killers beside it, and a verdict."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from actors.watchdog import marked_processes

ROOT = Path(__file__).parents[2]
N_SAMPLES = 2
GROUPS = 2
"""Of a mini-batch."""
TURNS = 3
SEED = int(os.environ.get("BATON_CHAOS_SEED", "1"))
STEPS = 150
"""Optimizer steps of a long run."""


def settings(lookahead: int = 0, steps: int = 40, **buffer: Any) -> dict[str, Any]:
    """A configuration of small groups; with lookahead 0 and strict order every run has the same history."""
    return {
        "run": {"name": "chaos", "max_steps": steps},
        "env": {"max_turns": TURNS},
        "generator": {"max_input_length": 64, "max_generate_length": 16},
        "buffer": {
            "lookahead": lookahead,
            "max_staleness": 1000,
            "order": "strict" if lookahead == 0 else "finished_first",
            "step_deadline": 60.0,
            "lease_deadline": 60.0,
            "max_attempts": 1000,
            "max_lease_attempts": 1000,
            **buffer,
        },
        "algorithm": {"n_samples_per_prompt": N_SAMPLES},
        "trainer": {
            "mini_batch_size": GROUPS,
            "ranks": 1,
            "max_tokens_per_micro_batch": 1024,
            "checkpoint_every": 3,
        },
        "metrics": {"port": 0},
    }


STAGING: dict[str, Any] = {
    "generators": 1,
    "turn_seconds": 0.0,
    "step_seconds": 0.0,
    "concurrency": 1,
    "segment_bytes": 20_000,
    "early": False,
    "ray_seconds": 120.0,
}
"""How a run is played."""


@dataclass
class Play:
    """One chaos run in a folder."""

    folder: Path
    figures: Counter[str]
    told: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    kills: Counter[str] = field(default_factory=Counter)
    """SIGKILLs from outside, by what was killed."""

    def tell(
        self, config: Mapping[str, Any], dooms: Mapping[str, Sequence[tuple[str, int]]] | None = None, **other: Any
    ) -> Play:
        """Write down who plays and who is to die where; `other`: what differs from `STAGING`."""
        (self.folder / "doom").mkdir(parents=True)
        rows = [{"uid": f"p{row}", "prompt": f"prompt {row}"} for row in range(50)]
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for role, plan in (dooms or {}).items():
            (self.folder / "doom" / f"{role}.json").write_text(json.dumps(plan))
        self.told = {"config": config, "journal": str(self.folder / "journal"), **STAGING, **other}
        self.retell()
        return self

    def retell(self) -> None:
        """Write down what changed, for the next start."""
        (self.folder / "play.json").write_text(json.dumps(self.told))

    def start(self, **environment: str) -> Play:
        """Begin, or go on after everything was killed."""
        output = (self.folder / "output.txt").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.stage", str(self.folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.close()
        return self

    def ended(self, seconds: float) -> dict[str, Any]:
        """Wait for the end and judge it; returns the report."""
        assert self.process is not None
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {seconds:.0f} s\n{self.said()}") from None
        assert code == 0, self.said()
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        self.judge(report)
        return report

    def judge(self, report: Mapping[str, Any]) -> None:
        """What has to hold whatever happened."""
        broken = self.folder / "broken.txt"
        assert not broken.exists(), f"{broken.read_text()}\n{self.said()}"
        status, trained = report["status"], [o for entry in report["history"] for o in entry["groups"]]
        assert len(trained) == len(set(trained)), "trained twice"
        assert [entry["step"] for entry in report["history"]] == list(range(1, len(report["history"]) + 1))
        assert status["accepted_tokens"] == sum(status["tokens"].values())
        assert self.scrapes(), "nobody checked the token ledger while the run went on"
        for fate in ("open", "stepped", "rolled_back", "stale", "masked", "refused"):
            assert status["tokens"][fate] == 0, status["tokens"]
        groups = {state: count for state, count in status["groups"].items() if count}
        assert groups.pop("trained") == len(trained)
        assert groups.keys() <= {"expired"} and status["ended"].keys() <= {"trained", "expired/run_end"}, status
        assert sum(status["groups"].values()) == status["issued"]
        self.figures["acknowledged steps"] += len(self.acknowledged())
        self.figures["trained groups"] += len(trained)
        self.figures["scrapes at which the token ledger closed"] += len(self.scrapes())

    def scrapes(self) -> list[int]:
        """The accepted tokens at each scrape at which the token ledger was checked."""
        file = self.folder / "scrapes.txt"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def acknowledged(self) -> list[str]:
        return [line for file in self.folder.glob("acks-*.txt") for line in file.read_text().splitlines()]

    def deaths(self, role: str) -> list[str]:
        """The seams at which a role died by itself."""
        file = self.folder / "doom" / f"{role}.deaths"
        found = file.read_text().split() if file.exists() else []
        return found

    def count(self) -> int:
        """All kills of this run, added to the session's figures."""
        for role in [path.stem for path in (self.folder / "doom").glob("*.deaths")]:
            for seam in self.deaths(role):
                self.kills[f"{role.split('-')[0]} at {seam}"] += 1
        self.figures.update({f"kill {what}": count for what, count in self.kills.items()})
        self.figures["kills"] += sum(self.kills.values())
        broken = self.folder / "broken.txt"
        found = [line.partition(":")[0] for line in broken.read_text().splitlines()] if broken.exists() else []
        for promise in ("lost", "trained twice", "scored twice", "another score"):
            self.figures[promise] += found.count(promise)
        return sum(self.kills.values())

    def said(self) -> str:
        """The end of what the run printed."""
        return (self.folder / "output.txt").read_text(errors="replace")[-4000:]

    # -- killers ------------------------------------------------------------------------------------------------------

    def pid(self, role: str) -> int:
        """Who plays a role now."""
        return int((self.folder / "pids" / role).read_text())

    def until(self, done: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait for something that the run does."""
        deadline = time.monotonic() + seconds
        while not done():
            assert self.process is not None and self.process.poll() is None, f"the run ended\n{self.said()}"
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s\n{self.said()}"
            time.sleep(0.02)

    def until_up(self, role: str, after: int = 0) -> int:
        """Wait until a role is played, by another process than `after`; returns the process's id."""
        self.until(lambda: (self.folder / "pids" / role).exists() and self.pid(role) != after)
        return self.pid(role)

    def step(self) -> int:
        """The step that the trainer published last."""
        return int(json.loads((self.folder / "weights.json").read_text())[1])

    def until_step(self, step: int, seconds: float = 120.0) -> None:
        """Wait until the trainer published a step."""
        self.until(lambda: (self.folder / "weights.json").exists() and self.step() >= step, seconds)

    def kill(self, role: str) -> None:
        """kill -9 whoever plays a role, and wait until somebody plays it again."""
        victim = self.until_up(role)
        os.kill(victim, signal.SIGKILL)
        self.kills[f"{role.split('-')[0]} at random"] += 1
        self.until_up(role, after=victim)

    def kill_at_random(self, seed: int, count: int, roles: Sequence[str]) -> None:
        """Kill so often, whoever it hits, at any moment."""
        rng = random.Random(seed)
        for _ in range(count):
            time.sleep(rng.uniform(0.0, 0.6))
            self.kill(rng.choice(roles))

    def freeze(self, role: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        process = self.until_up(role)
        os.kill(process, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)
        self.figures[f"freeze of the {role.split('-')[0]}"] += 1

    def kill_everything(self) -> None:
        """kill -9 the driver and all that it started, at once."""
        assert self.process is not None
        victims = [*marked_processes((self.folder / "mark").read_text()), (self.process.pid, "")]
        for victim, _ in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        self.kills["whole run"] += 1

    def kill_daemon(self, name: str) -> None:
        """kill -9 one of Ray's own processes."""
        for process, _ in marked_processes((self.folder / "mark").read_text()):
            if psutil.Process(process).name().startswith(name[:15]):
                os.kill(process, signal.SIGKILL)
                self.kills[name] += 1
                return
        raise AssertionError(f"the run has no process {name}")

    def stop(self) -> None:
        """Let the trainer end after the step at hand."""
        (self.folder / "stop").touch()

    def end(self) -> None:
        """End what a failed test left running."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
