"""The learner: mini-batches in, optimizer steps and weights out, without Ray (see docs/library.md).

The names below are imported when they are asked for, because torch and transformers take seconds to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.learn.learner import Learner, StepReport
    from service.learn.losses.loss import LossInputs, LossTerms, policy_loss
    from service.learn.model.tiny_model import make_model

_MODULE_OF = {
    "Learner": "learner",
    "LossInputs": "losses.loss",
    "LossTerms": "losses.loss",
    "StepReport": "learner",
    "make_model": "model.tiny_model",
    "policy_loss": "losses.loss",
}

__all__ = ["Learner", "LossInputs", "LossTerms", "StepReport", "make_model", "policy_loss"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
