"""The configuration: one strict tree, read from YAML files and dotted overrides."""

from service.config.checks import check
from service.config.load import load, load_config, resolved_yaml
from service.config.paths import check_paths
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
    WandbConfig,
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
    "WandbConfig",
    "WarmStartConfig",
    "WeightsConfig",
    "check",
    "check_paths",
    "load",
    "load_config",
    "resolved_yaml",
]
