"""The last step of a run by its steps and epochs."""

from dataclasses import replace
from pathlib import Path

from raystride.pipelines.config import OptimizerConfig, TrainConfig
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.launch.train_job import total_steps
from tests.processes import make_job
from tests.tiny import tiny, write_text

PLACE = Path("text.txt")


def test_the_end_of_a_run_is_that_of_its_steps_or_of_its_epochs_whichever_comes_first(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), optimizer=OptimizerConfig(schedule="constant"))
    job = make_job(config, tmp_path / "runs", "a")
    tokens = Manifest.load(job.prepared).tokens("train")
    windows = (tokens - 1) // 16
    a_pass = -(-windows // 8)  # steps of four slots of two windows each
    for steps, epochs, hours, expected in (
        (6, 0, 0, 6),
        (0, 1, 0, a_pass),
        (6, 1, 0, 6),
        (10**6, 1, 0, a_pass),
        (0, 0, 1.0, None),
    ):
        train = TrainConfig(steps=steps, epochs=epochs, hours=hours, slots=4, slot_size=2)
        assert total_steps(replace(job, config=replace(config, train=train))) == expected
