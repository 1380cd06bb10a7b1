"""The configuration of a run: one tree of settings, read from YAML files and dotted overrides. Unknown keys are
refused."""

from service.config.checks import check
from service.config.learn import AlgorithmConfig, LoraConfig, TrainerConfig, WeightsConfig
from service.config.load import load, load_config, resolved_yaml
from service.config.paths import check_paths
from service.config.rollout import AgentsConfig, DataConfig, EnvConfig, GeneratorConfig
from service.config.tree import BufferConfig, Config, MetricsConfig, ModelConfig, RunConfig, WandbConfig

__all__ = [
    "AgentsConfig",
    "AlgorithmConfig",
    "BufferConfig",
    "Config",
    "DataConfig",
    "EnvConfig",
    "GeneratorConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "RunConfig",
    "TrainerConfig",
    "WandbConfig",
    "WeightsConfig",
    "check",
    "check_paths",
    "load",
    "load_config",
    "resolved_yaml",
]
