"""The smallest settings that train something, shared by tests.

config = tiny(train=TrainConfig(steps=3, slots=4, slot_size=2), text=path)
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RecordConfig,
    SampleConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)


def write_text(folder: Path, size: int = 20_000) -> Path:
    """A text file of at least `size` bytes with structure enough for a loss to fall."""
    path = folder / "text.txt"
    lines, number = [], 0
    while sum(map(len, lines)) < size:
        lines.append(f"line {number}: the quick brown fox jumps over the lazy dog {number * 7919 % 1000} times\n")
        number += 1
    path.write_text("".join(lines))
    return path


def tiny(text: Path, **changes: Any) -> Config:
    """Settings of a two-layer model on a text file; `changes` replace whole sections or top-level settings."""
    base = Config(
        data=DataConfig(source=str(text), kind="text", validation="tail", validation_fraction=0.1),
        tokenizer=TokenizerConfig(kind="bytes"),
        model=ModelConfig(layers=2, heads=2, hidden_size=16, context=16),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        train=TrainConfig(steps=6, slots=4, slot_size=2, log_every=2),
        validation=ValidationConfig(every=3, samples=16),
        checkpoint=CheckpointConfig(every=3),
        record=RecordConfig(mlflow=False),
        sample=SampleConfig(tokens=0),
    )
    return replace(base, **changes)
