"""Every setting of Raystride, one dataclass a section, and `Config`, which holds them all.

Settings are made in Python, or read from YAML and flags by `raystride.pipelines.config.parse`:

    config = Config(train=Train(steps=500), model=Model(width=256))
    config.train.batch                                        # samples a step
"""

from raystride.pipelines.config.config import Config
from raystride.pipelines.config.data import Data, Tokenizer
from raystride.pipelines.config.lora import Lora
from raystride.pipelines.config.model import Model
from raystride.pipelines.config.profile import Profile
from raystride.pipelines.config.run import Answering, Decoding, Finished, Launch, Record, Sample, Scaling
from raystride.pipelines.config.section import Section, SettingError, setting
from raystride.pipelines.config.train import Checkpoint, Guard, Objective, Optimizer, Train, Validation

__all__ = [
    "Answering",
    "Checkpoint",
    "Config",
    "Data",
    "Decoding",
    "Finished",
    "Guard",
    "Launch",
    "Lora",
    "Model",
    "Objective",
    "Optimizer",
    "Profile",
    "Record",
    "Sample",
    "Scaling",
    "Section",
    "SettingError",
    "Tokenizer",
    "Train",
    "Validation",
    "setting",
]
