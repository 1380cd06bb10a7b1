"""The configuration: one strict tree, read from YAML files and dotted overrides."""

from service.config.tree import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    DataConfig,
    EnvConfig,
    GeneratorConfig,
    MakeModelConfig,
    MetricsConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
    WarmStartConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "Config",
    "DataConfig",
    "EnvConfig",
    "GeneratorConfig",
    "MakeModelConfig",
    "MetricsConfig",
    "ModelConfig",
    "RunConfig",
    "TrainerConfig",
    "WarmStartConfig",
    "WeightsConfig",
]
