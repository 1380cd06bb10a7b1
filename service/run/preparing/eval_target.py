"""Finds the weights that the path argument of `baton eval` names: a Hugging Face folder, a run, or a checkpoint of a
run.

models/Qwen3-0.6B                      the weights in this folder
runs/quickstart                        final/ of the run, or else its newest checkpoint
runs/quickstart/checkpoints/step_40    this checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.config import ModelConfig
from service.errors import UserError
from service.files import previous_folder, resolved
from service.model_folder import is_adapter_folder, is_model_folder
from service.run.checkpoints import MANIFEST, PREFIX, Checkpoints, Manifest
from service.run.folder import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    FINAL,
    RUNS,
    check_begun,
    initial_model,
    is_run_folder,
    warmed_model,
)


@dataclass(frozen=True)
class EvalTarget:
    """The weights to evaluate, and their run, if they belong to a run."""

    path: Path
    """The path that the user gave."""
    run: Path | None
    """The folder of the run that the weights belong to; None if they belong to no run."""
    model: Path | None
    """The Hugging Face folder of the weights; None if they are an adapter or in a checkpoint."""
    step: int | None = None
    """The step of the checkpoint to evaluate; None: the newest complete checkpoint."""
    adapter: Path | None = None
    """The folder of the run's final adapter; None if the weights are a whole model or in a checkpoint."""

    @property
    def settings(self) -> list[Path]:
        """The configuration file of the run, or no file without a run. Files given on the command line override it."""
        return [] if self.run is None else [self.run / CONFIG]

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return Checkpoints((self.run or self.path) / CHECKPOINTS, keep=1)

    def begun_with(self, model: ModelConfig) -> Path:
        """The folder of the run's initial model. If the run trains an adapter after a warm start, the folder of the
        warm-started model. This model gives the checkpoints their shapes and tokenizer, and is the base model of
        adapters."""
        run = self.run or self.path
        return warmed_model(model, run) or initial_model(model, run)

    def weights(self, manifest: Manifest | None) -> Path:
        """The folder of the weights: the checkpoint of `manifest`. Without a manifest: the Hugging Face folder, or the
        adapter's folder."""
        if manifest is not None:
            return self.checkpoints.path(manifest.step)
        return self.model or self.adapter or self.path

    def manifest(self) -> Manifest:
        """The manifest of the checkpoint to evaluate: the checkpoint of `step`, or else the newest complete checkpoint.
        `UserError` if there is none."""
        if self.step is not None:
            return self.checkpoints.manifest(self.step)
        steps = self.checkpoints.steps()
        if not steps:
            check_begun(self.path)
            raise UserError(
                f"{self.path}: the run has neither final weights nor a checkpoint; wait for one (every "
                "trainer.checkpoint_every steps there is one)"
            )
        return self.checkpoints.newest() or self.checkpoints.manifest(steps[-1])


def eval_target(path: Path) -> EvalTarget:
    """Find the weights to evaluate by a path, or by the name of a run in `runs/`. `UserError` if there is no model, run
    or checkpoint."""
    if is_run_folder(RUNS / path) and not (is_model_folder(path) or is_run_folder(path) or is_adapter_folder(path)):
        path = RUNS / path
    absolute = resolved(path)
    run = absolute.parent
    if is_model_folder(path):
        return EvalTarget(path, run if absolute.name in (FINAL, BEST) and is_run_folder(run) else None, path)
    if is_run_folder(path):
        finals = (path / FINAL, previous_folder(path / FINAL))
        model = next(filter(is_model_folder, finals), None)
        return EvalTarget(path, absolute, model, adapter=next(filter(is_adapter_folder, finals), None))
    if is_adapter_folder(path):
        if absolute.name not in (FINAL, BEST) or not is_run_folder(run):
            raise UserError(
                f"{path}: an adapter without its run, whose model it needs; give the run, RUN or RUN/{FINAL}"
            )
        return EvalTarget(path, run, None, adapter=path)
    if is_run_folder(run) and absolute.name == CHECKPOINTS:
        raise UserError(f"{path}: name the run, {run}, or one of its checkpoints: {_listed(absolute)}")
    step = absolute.name.removeprefix(PREFIX)
    if absolute.name.startswith(PREFIX) and step.isdecimal():
        if run.name != CHECKPOINTS or not is_run_folder(run.parent):
            raise UserError(
                f"{path}: the checkpoint lies in no run folder, whose {CONFIG} and model it needs; give "
                f"RUN/{CHECKPOINTS}/{path.name}"
            )
        if not absolute.is_dir():
            raise UserError(f"{path}: there is no checkpoint of step {step}; nearest: {_listed(run, int(step))}")
        return EvalTarget(path, run.parent, None, int(step))
    if not path.exists():
        raise UserError(f"{path}: there is no such folder; give a model, a run or a checkpoint of one")
    raise UserError(f"{path}: no model (config.json), no run folder (config.yaml) and no checkpoint ({MANIFEST})")


def _listed(folder: Path, step: int | None = None) -> str:
    """The names of the checkpoints in a folder; if a step is given, only those nearest to it."""
    steps = Checkpoints(folder, keep=1).steps()
    if step is not None:
        earlier, later = [one for one in steps if one < step], [one for one in steps if one > step]
        steps = [*earlier[-1:], *later[:1]]
    return ", ".join(f"{PREFIX}{one}" for one in steps) or "none"
