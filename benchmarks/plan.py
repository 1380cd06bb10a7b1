"""The predictions of `baton plan --gpu measured`, compared with runs on this machine.

    python -m benchmarks.plan                       # the quick start, the three small recipes, and three splits
    python -m benchmarks.plan --part recipes --only quickstart --steps 40

The plan uses the lengths and the times of the environment of each run, so that its model is compared and not a guess of
these inputs. The speed of the machine is measured before and after each run, and the plan uses the mean. Run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from service.config import Config, load
from service.plan.forecast import Plan
from service.plan.live_binding import WAITING
from service.plan.machine.device import Device
from service.plan.machine.measure import measured, pace
from service.plan.planning import planned_model
from service.plan.settings import PlanSettings
from service.plan.work import OPTIONS, work_of
from service.run.folder import METRICS, read_lines
from service.run.lengths import lengths_of_run
from service.run.timeline import timeline_events

ROOT = Path(__file__).parents[1]
RECIPES = ("quickstart", "gsm8k_tiny", "text_to_sql_tiny", "search_r1_tiny")
SPLITS = ((1, 3), (2, 2), (3, 1))
"""Numbers of engines and ranks of the quick start, with four processes in total."""
SETTINGS = ("data.eval_every=0", "trainer.checkpoint_every=0", "metrics.port=0")
PART_OF = {"VLLM::": "engine", "EngineCore": "engine", "ray::Generator": "engine", "ray::TrainerRank": "rank"}
"""The part to which a process belongs, by the beginning of its title."""
LOOK_SECONDS = 1.0


def run(recipe: str, steps: int, parent: Path, *settings: str) -> tuple[Path, dict[str, float]]:
    """Run a recipe; returns its folder, and the peak bytes of a rank and of an engine's processes."""
    name = f"{recipe}-{len(list(parent.iterdir()))}"
    words = ["run", "--config", str(ROOT / f"configs/{recipe}.yaml"), f"run.max_steps={steps}", f"run.dir={parent}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "service", *words, f"run.name={name}", *SETTINGS, *settings],
        stdout=subprocess.DEVNULL,
    )
    most: dict[str, float] = defaultdict(float)
    while process.poll() is None:
        for part, held in _held(process.pid).items():
            most[part] = max(most[part], held)
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise SystemExit(f"{recipe}: baton run ended with exit code {process.returncode}")
    return parent / name, dict(most)


def _held(pid: int) -> dict[str, float]:
    """Resident bytes of the largest rank, and mean resident bytes per engine core of all processes of engines."""
    held: dict[str, list[float]] = defaultdict(list)
    cores = 0
    for process in psutil.Process(pid).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            part = next((part for begin, part in PART_OF.items() if title.startswith(begin)), None)
            if part is not None:
                held[part].append(float(process.memory_info().rss))
                cores += title.startswith("ray::Generator")
        except psutil.Error:  # it has ended meanwhile
            continue
    return {"rank": max(held["rank"], default=0.0), "engine": sum(held["engine"]) / max(1, cores)}


def planned(config: Config, folder: Path, device: Device) -> Plan:
    """The plan of a run that has ended, with its lengths and times."""
    settings = PlanSettings.of(config)
    work = work_of(settings, lengths_of_run(str(folder)), dict.fromkeys(OPTIONS))
    with planned_model(config.model, config.env, config.run.seed, str(folder)) as model:
        return Plan(settings, model, device, work, None)


def seconds_and_waits(folder: Path) -> tuple[float, float, float]:
    """Mean seconds of a step, and the fractions of time for which trainer and engines waited, over the second half of a
    run's steps."""
    lines = list(read_lines(folder / METRICS))
    lines = lines[len(lines) // 2 :]
    seconds = statistics.fmean(line["timing/step"] for line in lines)
    waited = statistics.fmean(line["timing/wait_for_generation_buffer"] for line in lines) / seconds
    return seconds, waited, _engines_idle(timeline_events(folder), sum(line["timing/step"] for line in lines))


def _engines_idle(events: Iterator[bytes], last: float) -> float:
    """Fraction of the engines' time without a group, in the `last` seconds before the trainer's last step ended."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for event in map(json.loads, events):
        rows.setdefault(event.get("cat", ""), []).append(event)
    until = max(span["ts"] + span["dur"] for span in rows["trainer"] if span["name"] == "step") / 1e6
    idle = sum(
        max(0.0, min((span["ts"] + span["dur"]) / 1e6, until) - max(span["ts"] / 1e6, until - last))
        for span in rows["engine"]
        if span["name"] == WAITING
    )
    return idle / (len({span["pid"] for span in rows["engine"]}) * last)


def recipes(names: tuple[str, ...], steps: int, parent: Path) -> Iterator[str]:
    """Yield a line for each figure of each recipe: predicted, measured, predicted over measured."""
    for name in names:
        device = measured()
        folder, held = run(name, steps, parent)
        before, after = device.pace, pace()
        device = replace(device, pace=(before + after) / 2)
        yield f"rates: {device}"
        plan = planned(load([ROOT / f"configs/{name}.yaml"], list(SETTINGS)).config, folder, device)
        seconds, trainer, engines = seconds_and_waits(folder)
        flow = plan.chosen.flow
        for what, predicted, found in (
            ("pace before and after", before, after),
            ("bytes of a rank", sum(plan.chosen.rank_bytes.values()), held["rank"]),
            ("bytes of an engine", sum(plan.engine_bytes.values()), held["engine"]),
            ("seconds a step", flow.step_seconds, seconds),
            ("trainer waits", flow.trainer_waits, trainer),
            ("engines idle", flow.engines_idle, engines),
        ):
            ratio = predicted / found if found else float("nan")
            yield f"| {name} | {what} | {predicted:.4g} | {found:.4g} | {ratio:.2f} |"


def splits(steps: int, parent: Path) -> Iterator[str]:
    """Yield a line for each split of the quick start, and whether the plan names the fastest."""
    predicted, found = {}, {}
    for engines, ranks in SPLITS:
        setting = (f"generator.engines={engines}", f"trainer.ranks={ranks}")
        device = measured()
        folder, _ = run("quickstart", steps, parent, *setting)
        device = replace(device, pace=(device.pace + pace()) / 2)
        config = load([ROOT / "configs/quickstart.yaml"], [*SETTINGS, *setting]).config
        predicted[engines, ranks] = planned(config, folder, device).chosen.step_seconds
        found[engines, ranks] = seconds_and_waits(folder)[0]
        yield f"| {engines} + {ranks} | {predicted[engines, ranks]:.3g} | {found[engines, ranks]:.3g} |"
    named, best = min(predicted, key=predicted.__getitem__), min(found, key=found.__getitem__)
    yield f"best named {named}, best measured {best}: {'right' if named == best else 'WRONG'}"


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("recipes", "splits"), help="default: both")
    parser.add_argument("--only", choices=RECIPES, help="one recipe")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan") as made:
        if arguments.part != "splits":
            print("| recipe | figure | predicted | measured | ratio |\n|---|---|---|---|---|", flush=True)
            names = RECIPES if arguments.only is None else (arguments.only,)
            for line in recipes(names, arguments.steps, Path(made)):
                print(line, flush=True)
        if arguments.part != "recipes":
            print("| engines + ranks | predicted s | measured s |\n|---|---|---|", flush=True)
            for line in splits(arguments.steps, Path(made)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
