"""A sweep's settings: what a space may hold, and conditions between settings."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import parse, parse_value
from raystride.pipelines.config.sweep import OF_TRIALS, Condition, SweepConfig, SweepJobConfig
from tests.errors import refused

KNOWN = Config().flat()
RATE = "optimizer.learning_rate"
LOG = {RATE: {"log_uniform": [0, 1]}}


def test_a_space_comes_from_yaml_by_full_names(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("sweep:\n  space:\n    scaling.workers: [1, 2]\n  where: [scaling.workers <= train.slots]\n")
    settings = parse(SweepJobConfig, ["--config", str(file), "--sweep.windows", "4"], program="sweep.py").settings
    assert settings.sweep.space == {"scaling.workers": [1, 2]}
    assert (settings.sweep.windows, settings.training()) == (4, Config())


@pytest.mark.parametrize(
    ("sweep", "setting", "value", "names"),
    [
        ({"space": {"train.slots": []}}, "sweep.space", {"train.slots": []}, ("list", "uniform")),
        ({"space": LOG, "search": "random"}, "sweep.space", LOG, (f"give {RATE}", "log_uniform")),
        ({"space": {RATE: {"uniform": [0, 1]}}}, "sweep.search", "grid", ("`random`", "`optuna`", "sweep.space", RATE)),
        ({"objective": "time_to_loss"}, "sweep.target_loss", 0.0, ("sweep.objective",)),
        ({"objective": "cost"}, "sweep.price_per_hour", 0.0, ("sweep.cluster", "sweep.objective")),
        ({"windows": 2}, "sweep.min_windows", 3, ("sweep.windows, 2",)),
    ],
)
def test_what_cannot_work_is_refused(sweep: dict[str, object], setting: str, value: object, names: tuple[str, ...]) -> None:
    with refused(setting, value, names=names):
        SweepConfig(**sweep)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", OF_TRIALS)
def test_what_a_trial_sets_by_itself_cannot_be_tried(key: str) -> None:
    assert key in KNOWN
    with refused("sweep.space", {key: [1]}, names=["each trial"]):
        SweepJobConfig(sweep=SweepConfig(space={key: [1]}))


def test_a_condition_is_read_before_anything_starts_whatever_searches() -> None:
    with refused("sweep.constraints", "train.slot < 3", names=["train.slots"]):
        SweepJobConfig(sweep=SweepConfig(space={"train.slots": [1]}, search="optuna", constraints=("train.slot < 3",)))


def test_a_space_names_settings_that_there_are() -> None:
    with refused("sweep.space", {"train.slot": [1]}, names=["names train.slot,", "no setting"]):
        SweepJobConfig(sweep=SweepConfig(space={"train.slot": [1]}))


@pytest.mark.parametrize(("key", "value"), [("train.slots", "two"), ("train.precision", "fp8"), ("scaling.reshard", 3)])
def test_values_of_another_type_are_refused(key: str, value: object) -> None:
    with refused(key, value, names=[repr(value)]):
        parse_value(Config, key, value)


@given(workers=st.integers(1, 64), slots=st.integers(1, 64))
def test_conditions_say_what_python_says(workers: int, slots: int) -> None:
    values = KNOWN | {"scaling.workers": workers, "train.slots": slots}
    texts = {
        "scaling.workers * 2 <= train.slots": workers * 2 <= slots,
        "1 < scaling.workers <= train.slots or train.slots % 3 == 0": 1 < workers <= slots or slots % 3 == 0,
        "not (scaling.workers - train.slots > -4)": not (workers - slots > -4),
        "train.precision in ('fp32', 'bf16') and scaling.workers != 7": workers != 7,
    }
    for text, true in texts.items():
        assert Condition(text, KNOWN).holds(values) is true


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os')", "only compare"),
        ("train.slot < 3", "train.slots"),
        ("1 <", "no condition"),
        ("scaling.workers < 2", "cannot be told"),  # it is `auto`
        ("train.slots / 0 > 1", "cannot be told"),
    ],
)
def test_other_conditions_are_refused(text: str, said: str) -> None:
    with refused("sweep.constraints", text, names=[said]):
        Condition(text, KNOWN).holds(KNOWN)
