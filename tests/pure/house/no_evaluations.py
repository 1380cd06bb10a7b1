"""Takes the place of a run's evaluations where the room `evaluation` is taken out."""

from typing import Any


class NoEvaluations:
    """No evaluation is ever due."""

    def __init__(self, *settings: Any) -> None:
        pass

    def is_due(self, step: int) -> bool:
        """No."""
        return False

    continue_from = is_due

    def numbers(self, step: int) -> dict[str, float]:
        """None."""
        return {}
