"""The supervised steps before the first mini-batch, and how often the policy succeeds after them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.evaluation.during_training import Evaluations
from actors.observe.telemetry import RunTelemetry
from actors.trainer.group import TrainerGroup
from actors.weights.delivery import Delivery
from actors.weights.weight_source import TrainerLost
from service.config import Config
from service.run.inputs import Prepared, demonstrations
from service.run.phases import phase
from service.run.progress import Progress


class WarmStart:
    """Takes the steps of `model.warm_start`, if it is configured."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        trainer: TrainerGroup,
        telemetry: RunTelemetry,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._prepared, self._trainer = config, prepared, trainer
        self._telemetry, self._say = telemetry, say

    async def make_base(self, folder: Path, max_restarts: int) -> None:
        """Do the warm start of all weights, and write the model to which trainer and engines add the adapter."""
        load = self._trainer.load
        for restarts_left in reversed(range(max_restarts + 1)):
            try:
                with phase("loading the model: trainer ranks start", self._say):
                    await load(self._prepared.model_folder, adapter=False)
                await self.run()
                return await self._trainer.export(folder)
            except TrainerLost as lost:
                if not restarts_left:
                    raise
                self._say(f"{lost}; the warm start begins anew")
                load = self._trainer.restart

    async def run(self) -> None:
        """Take the supervised steps."""
        if (settings := self._config.model.warm_start) is None:
            return
        self._telemetry.state("warm_start")
        self._telemetry.doing("warm_start")
        with phase(f"warm start: {settings.steps} supervised steps on demonstrations", self._say):
            config, folder = self._config, self._prepared.model_folder
            rows = demonstrations(config.model, config.env, config.generator, config.run.seed, folder)
            loss = await self._trainer.warm_start(rows)
        self._say(f"warm start: cross-entropy {loss:.3f} per token")

    async def probe(self, weights: Delivery, evaluations: Evaluations, progress: Progress) -> None:
        """Measure the success rate, once the engines serve the weights."""
        settings = self._config.model.warm_start
        if settings is None or not settings.probe_prompts:
            return
        samples, rows = self._config.algorithm.n_samples_per_prompt, self._prepared.tasks_file
        with phase("warm start: measuring the success rate", self._say):
            await weights.published()
            probe = await evaluations.of_set("warm_start", rows, samples, settings.probe_prompts)
        if probe is not None:
            progress.probed(probe.avg_score, settings.expected_success)
