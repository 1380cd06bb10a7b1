"""A worker whose next updates fail, or leave out a tensor, where a test says."""

from collections.abc import Sequence
from typing import Any

from actors.engine.worker_extension import WorkerExtension
from service.errors import WeightsGone


class FailingWorker(WorkerExtension):
    """What an engine gets as `worker_extension_cls`."""

    def fail_at(self: Any, part: str, ranks: Sequence[int], times: int) -> None:
        """Let a part of an update of these workers fail, as if the weights had been replaced meanwhile."""
        if self.rank in ranks:
            engine, left = self.weight_transfer_engine, iter(range(times))

            def fails(*arguments: Any) -> None:
                if next(left, None) is not None:
                    raise WeightsGone(f"{part} of {self.rank}")
                getattr(type(engine), part)(engine, *arguments)

            setattr(engine, part, fails)

    def leave_out(self: Any, name: str, ranks: Sequence[int]) -> None:
        """Let the model's loader of these workers pass over a tensor without a word."""
        if self.rank in ranks:
            model = self.get_model()
            load = type(model).load_weights
            model.load_weights = lambda weights: load(model, (each for each in weights if each[0] != name))
