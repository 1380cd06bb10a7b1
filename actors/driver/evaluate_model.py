"""`baton eval`: evaluates a model, a run or a checkpoint on the configured evaluation sets, without training."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.exceptions

from actors.calls import call, in_a_line
from actors.driver.authentication import keep_token_private
from actors.driver.node_check import RunFiles, check_nodes
from actors.driver.placement import engine_bundle, engine_options, gpus_each, reserve
from actors.driver.ray_session import ray_session
from actors.driver.signals import exit_on_stop_signals, on_stop_signal
from actors.evaluation.evaluator import Evaluator, evaluate_on
from service.config import Config
from service.config.paths import with_absolute_paths
from service.errors import BatonError, RunFailed
from service.evaluation.scores import Evaluation
from service.run.phases import phase
from service.run.preparing.eval_target import EvalTarget
from service.run.preparing.inputs import prepare_evaluation, prepare_weights
from service.run.preparing.weights_export import export


class PreparedEvaluation(NamedTuple):
    """The inputs of an evaluation, checked before Ray or an engine starts."""

    config: Config
    weights: Path
    """The folder or checkpoint of the weights."""
    model: Path
    """The Hugging Face folder that the engines load."""
    files: Mapping[str, Path]
    """The rows of each evaluation set, by the set's name."""


@contextmanager
def prepared_evaluation(config: Config, target: EvalTarget, say: Callable[[str], None]) -> Iterator[PreparedEvaluation]:
    """Check the sets and the weights of the target. Write synthetic sets and exported weights to a temporary folder.
    `UserError` if a set or the weights are missing or malformed. A stop signal in the `with` block raises `SystemExit`
    with 128 + its number."""
    keep_token_private(os.environ, Path.home())
    config = with_absolute_paths(beside_a_run(config))
    with exit_on_stop_signals(), tempfile.TemporaryDirectory(prefix="baton-eval-") as temporary:
        folder = Path(temporary)
        files = prepare_evaluation(config.data, config.env, config.run.seed, folder)
        manifest = prepare_weights(config.model, target)
        weights = target.weights(manifest)
        say(f"weights: {weights}")
        model = weights
        if target.model is None:
            model = folder / "exported"
            with phase("reading the weights" if target.adapter is None else "merging the adapter", say):
                export(config.model, target, manifest, model)
        yield PreparedEvaluation(config.without_adapter, weights, model.absolute(), files)


def evaluate(prepared: PreparedEvaluation, say: Callable[[str], None]) -> list[Evaluation]:
    """Evaluate the weights on every evaluation set.

    Raises:
        RunFailed: an engine did not start, or died.
        Starved: an engine did not start in time.
        SystemExit: a stop signal came; the exit code is 128 + the number of the signal.
    """
    with ExitStack() as held:
        logs = held.enter_context(logs_kept_on_failure(say))
        with phase("starting Ray", say):
            held.enter_context(ray_session(prepared.config, uuid.uuid4().hex[:12], logs))
        try:
            return asyncio.run(_until_stopped(_evaluate(prepared.config, prepared.model, prepared.files, say)))
        except ray.exceptions.RayError as error:
            raise RunFailed(f"an engine failed: {in_a_line(error)}") from error


@contextmanager
def logs_kept_on_failure(say: Callable[[str], None]) -> Iterator[Path]:
    """Create a temporary folder for the engines' logs. It is kept if the evaluation fails after an engine started."""
    logs, stays = Path(tempfile.mkdtemp(prefix="baton-eval-logs-")), False
    try:
        yield logs
    except BatonError:
        if stays := any(logs.iterdir()):
            say(f"what the engines printed is in {logs}")
        raise
    finally:
        if not stays:
            shutil.rmtree(logs, ignore_errors=True)


def beside_a_run(config: Config) -> Config:
    """Return a run's configuration, changed for an evaluation at the same time as the run: engines share no GPU with
    ranks (no weights are sent), and endpoints for agents use free ports."""
    weights = config.weights.model_copy(update={"transport": "memory"})
    agents = config.agents and config.agents.model_copy(update={"port": 0})
    return config.model_copy(update={"weights": weights, "agents": agents})


async def _until_stopped(evaluating: Coroutine[Any, Any, list[Evaluation]]) -> list[Evaluation]:
    """Return the evaluations; raises `SystemExit` if a stop signal came."""
    stopped: list[int] = []
    task = asyncio.ensure_future(evaluating)

    def stop(number: int) -> None:
        stopped.append(number)
        task.cancel()

    with on_stop_signal(stop, lambda number: os._exit(128 + number)):
        await asyncio.wait([task])
    if stopped and task.cancelled():
        raise SystemExit(128 + stopped[0])
    return task.result()


async def _evaluate(
    config: Config, model: Path, files: Mapping[str, Path], say: Callable[[str], None]
) -> list[Evaluation]:
    gpus = gpus_each()
    bundles = [engine_bundle(config, gpus)] * config.generator.min_engines
    room = await reserve(bundles, config.run.start_deadline, say)
    await asyncio.to_thread(check_nodes, room, bundles, RunFiles.of(model, files.values()))
    engines: list[Any] = [
        ray.remote(Evaluator)
        .options(**engine_options(config, gpus, room, bundle))
        .remote(config.model_dump_json(), str(model), f"engine-{bundle}")
        for bundle in range(len(bundles))
    ]
    with phase("loading the model: engines start", say):
        await asyncio.gather(
            *(call(engine.start, who="an engine", within=config.run.start_deadline) for engine in engines),
        )
    results = []
    for name, path in files.items():
        with phase(f"evaluating {name}", say):
            try:
                async with asyncio.timeout(config.data.eval_deadline):
                    results.append(await evaluate_on(engines, name, path, config.data.eval_samples))
            except TimeoutError as error:
                deadline = f"data.eval_deadline ({config.data.eval_deadline:g} s)"
                raise RunFailed(f"the evaluation took longer than {deadline}") from error
    await asyncio.gather(*(call(engine.stop, who="an engine") for engine in engines))
    return results
