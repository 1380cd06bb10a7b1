"""SkyRL's step-wise `GeneratorOutput`: merge it in its own form, or take it apart into steps and build it from rows."""

from service.interop.skyrl.checks import SkyRLTrajectoryId
from service.interop.skyrl.merge import merge_generator_output
from service.interop.skyrl.steps import rows_to_generator_output, steps_from_generator_output

__all__ = [
    "SkyRLTrajectoryId",
    "merge_generator_output",
    "rows_to_generator_output",
    "steps_from_generator_output",
]
