"""One chaos run: Ray, the cast, and whoever dies brought back, until the trainer has trained its steps.

    python -m tests.chaos.stage FOLDER

reads FOLDER/play.json and writes FOLDER/report.json at the end; started again in the same folder, it goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

from actors.watchdog import MARK, start_watchdog  # first: Ray reads the environment that `actors` sets

# isort: split
import ray
import ray.exceptions

from actors.generator.outbox import Unreachable
from actors.observe.actor_logs import log_env
from actors.scorers.actor import place_scorers
from service.config import Config
from service.files import write_atomic
from service.rollout.chat.tokenizer import make_tokenizer
from tests.chaos.cast import VOCABULARY, AnsweringEarly, DoomedBuffer, FakeGenerator, FakeTrainer, Scraper

RETRY_SECONDS = 0.05
MAX_ERRORS = 20


async def kept_alive(actor: Any, comings: Path, ray_seconds: float) -> Any:
    """What the actor's `run` returns, however often the actor dies, and though it gave up now and then.

    After `ray_seconds` without the actor Ray itself is taken to be gone. `comings` grows whenever somebody plays the
    role again: one who dies as soon as he is there says that Ray is there.
    """
    errors, alive, came = 0, time.monotonic(), 0
    while True:
        began = time.monotonic()
        try:
            return await actor.run.remote()
        except ray.exceptions.RayActorError:
            size = comings.stat().st_size if comings.exists() else 0
            if size > came or time.monotonic() - began > ray_seconds / 10:
                alive, came = time.monotonic(), size
            if time.monotonic() - alive > ray_seconds:
                raise
            await asyncio.sleep(RETRY_SECONDS)
        except ray.exceptions.RayTaskError as error:
            errors += 1
            if errors > MAX_ERRORS or not isinstance(error.cause, Unreachable | BaseExceptionGroup):
                raise
            print(f"{actor} gave up: {error}", flush=True)


async def play(folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Put the cast on the stage, and let it play to the end."""
    config = Config.model_validate(told["config"])
    config_json, where = config.model_dump_json(), str(folder)
    lasting: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 1000}
    hub = ray.remote(Scraper).options(name="hub", **lasting).remote(where)
    await hub.push.options(max_task_retries=-1).remote("stage", b"")
    if config.scorers:
        make_tokenizer(folder / "model", [f"w{i}" for i in range(VOCABULARY)])
    scorers = place_scorers(config.scorers, config_json, folder / "model", folder / "tasks.jsonl", {}, has_gpu=False)
    buffer = (
        ray.remote(AnsweringEarly if told["early"] else DoomedBuffer)
        .options(name="buffer", max_task_retries=-1, **lasting)
        .remote(config_json, where, told["journal"], told["segment_bytes"], "hub")
    )
    generators = [
        ray.remote(FakeGenerator)
        .options(name=f"generator-{i}", **lasting)
        .remote(f"generator-{i}", config_json, where, told["turn_seconds"], told["concurrency"])
        for i in range(told["generators"])
    ]
    trainer = (
        ray.remote(FakeTrainer).options(name="trainer", **lasting).remote(config_json, where, told["step_seconds"])
    )
    patience = told["ray_seconds"]
    generating = [
        asyncio.ensure_future(kept_alive(generator, folder / f"up-generator-{i}.txt", patience))
        for i, generator in enumerate(generators)
    ]
    training = asyncio.ensure_future(kept_alive(trainer, folder / "up-trainer.txt", patience))
    await asyncio.wait([training, *generating], return_when=asyncio.FIRST_EXCEPTION)
    history = await training
    slow = sorted(seconds for answers in await asyncio.gather(*generating) for seconds in answers)
    report: dict[str, Any] = await buffer.report.remote()
    del scorers  # an actor ends with its last handle
    return {**report, "history": history, "ack_seconds": slow}


def start_ray(folder: Path) -> None:
    """A Ray of the run's own; whoever dies, the watchdog cleans up."""
    mark = uuid.uuid4().hex[:12]
    write_atomic(folder / "mark", mark)
    os.environ[MARK] = mark
    ray_folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    start_watchdog(mark, ray_folder)
    ray.init(
        address="local",
        namespace="chaos",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {MARK: mark} | log_env(folder / "logs")},
        _temp_dir=str(ray_folder),
    )


def main() -> int:
    """Play what the folder says."""
    folder = Path(sys.argv[1])
    told = json.loads((folder / "play.json").read_text())
    (folder / "logs").mkdir(exist_ok=True)
    start_ray(folder)
    try:
        report = asyncio.run(play(folder, told))
    except BaseException:  # noqa: BLE001 - told, and the exit code says it
        traceback.print_exc()
        sys.stderr.flush()
        # Ray would wait for calls that nobody answers any more; the watchdog ends what is left.
        os._exit(1)
    write_atomic(folder / "report.json", json.dumps(report, default=str))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
