"""Every setting, one dataclass a section, read from YAML, flags and Python.

`Config` has all sections of a training; `parse` reads YAML and flags.

    config = Config(train=TrainConfig(steps=500), model=ModelConfig(hidden_size=256))
    config.train.samples_per_step                             # 32
"""

from raystride.pipelines.config.config import Config
from raystride.pipelines.config.data import DataConfig, TokenizerConfig
from raystride.pipelines.config.lora import LoraConfig
from raystride.pipelines.config.model import ModelConfig
from raystride.pipelines.config.run import (
    DecodingConfig,
    FinishedRunConfig,
    FitConfig,
    LaunchConfig,
    PredictorConfig,
    ProfileConfig,
    RecordConfig,
    ResumeConfig,
    SampleConfig,
    ScalingConfig,
)
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.config.train import (
    CheckpointConfig,
    GuardConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.system.errors import SettingError

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DecodingConfig",
    "FinishedRunConfig",
    "FitConfig",
    "GuardConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PredictorConfig",
    "ProfileConfig",
    "RecordConfig",
    "ResumeConfig",
    "SampleConfig",
    "ScalingConfig",
    "Section",
    "SettingError",
    "TokenizerConfig",
    "TrainConfig",
    "ValidationConfig",
    "setting",
]
