"""`baton eval`: a model, a run or one of its checkpoints on the configured evaluation sets, without training."""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from actors.authentication import refuse_open_ray
from actors.calls import call, in_a_line
from actors.cluster import engine_options, gpus_each, place_trainer, ray_session
from actors.evaluation import Evaluator, evaluate_on
from actors.keeper import TRAINER
from actors.placement import place_ranks
from actors.retrieval import with_retrieval
from service.checkpoints import Checkpoints
from service.config import Config
from service.errors import RunFailed, UserError
from service.evaluated import Evaluated
from service.phases import phase
from service.prepare import prepare_evaluation
from service.rollout.evaluate import Evaluation


def evaluate(config: Config, evaluated: Evaluated, say: Callable[[str], None]) -> list[Evaluation]:
    """Play every evaluation set on the model.

    Raises:
        UserError: there is no such model or set.
        RunFailed: an engine did not start, or died.
    """
    refuse_open_ray(os.environ, config.run.insecure_local)
    # No weights travel here, and engines share no GPU with ranks.
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": "memory"})})
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="baton-eval-")))
        files = prepare_evaluation(config, folder)
        if not files:
            raise UserError("data.eval: there is no evaluation set; give data.eval or data.eval_make_rows")
        (folder / "logs").mkdir()
        with phase("starting Ray", say):
            held.enter_context(ray_session(config, uuid.uuid4().hex[:12], folder / "logs"))
        try:
            return asyncio.run(_evaluate(config, evaluated, files, folder / "exported", say))
        except ray.exceptions.RayError as error:
            raise RunFailed(f"an engine failed: {in_a_line(error)}") from error


async def _evaluate(
    config: Config, evaluated: Evaluated, files: Mapping[str, Path], exported: Path, say: Callable[[str], None]
) -> list[Evaluation]:
    model = evaluated.model or await _exported(config, evaluated, exported, say)
    gpus = gpus_each()
    config, _retrieval = with_retrieval(config, has_gpu=bool(gpus))
    engines: list[Any] = [
        ray.remote(Evaluator).options(**engine_options(config, gpus)).remote(config.model_dump_json(), str(model))
        for _ in range(config.generator.engines)
    ]
    with phase("loading the model: engines start", say):
        await asyncio.gather(
            *(call(engine.start, who="an engine", within=config.generator.start_deadline) for engine in engines)
        )
    found = []
    for name, path in files.items():
        with phase(f"evaluating {name}", say):
            found.append(await _in_time(config, evaluate_on(engines, name, path, config.data.eval_samples)))
    await asyncio.gather(*(call(engine.stop, who="an engine") for engine in engines))
    return found


async def _in_time(config: Config, evaluating: Awaitable[Evaluation]) -> Evaluation:
    try:
        async with asyncio.timeout(config.data.eval_deadline):
            return await evaluating
    except TimeoutError as error:
        raise RunFailed(
            f"the evaluation took longer than data.eval_deadline ({config.data.eval_deadline:g} s)"
        ) from error


async def _exported(config: Config, evaluated: Evaluated, folder: Path, say: Callable[[str], None]) -> Path:
    """A checkpoint's weights as a Hugging Face folder."""
    checkpoints = Checkpoints(evaluated.checkpoints, config.trainer.keep_checkpoints)
    manifest = checkpoints.newest(evaluated.step)
    if manifest is None or evaluated.step not in (None, manifest.step):
        raise UserError(f"{evaluated.path}: there is no whole checkpoint to evaluate")
    gpus = gpus_each()
    with phase(f"reading the weights of step {manifest.step}", say):
        trainer = place_trainer(config, gpus, place_ranks(config, gpus))
        await trainer.load(evaluated.begun_with)
        await trainer.restore(checkpoints.path(manifest.step) / TRAINER)
        await trainer.export(folder)
    trainer.end()
    return folder
