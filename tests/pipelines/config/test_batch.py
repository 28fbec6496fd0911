"""A batch is cut into slots by its number alone, wherever it is given, and overrides the slots of what it is given over."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, SettingError, TrainConfig
from raystride.pipelines.config.batch import MAX_BATCH_SLOTS
from raystride.pipelines.config.parse import from_yaml, load_settings, parse, to_yaml, with_settings
from tests.errors import refused


def _slots(config: Config) -> tuple[int, int]:
    return config.train.slots, config.train.slot_size


@given(batch=st.integers(1, 10_000))
def test_slots_are_the_largest_divisor_up_to_sixteen(batch: int) -> None:
    train = TrainConfig(batch=batch)
    assert train.slots * train.slot_size == batch == train.samples_per_step
    assert not any(batch % slots == 0 for slots in range(train.slots + 1, MAX_BATCH_SLOTS + 1))
    assert train.batch == 0, "slots and slot size alone are stored"


@given(batch=st.integers(1, 500), slots=st.integers(1, 20), size=st.integers(1, 40))
def test_given_slots_or_sizes_are_kept_or_refused(batch: int, slots: int, size: int) -> None:
    for flags, fits in (
        ((f"--train.slots={slots}",), batch % slots == 0),
        ((f"--train.slot_size={size}",), batch % size == 0),
        ((f"--train.slots={slots}", f"--train.slot_size={size}"), slots * size == batch),
    ):
        arguments = [f"--train.batch={batch}", *flags]
        if not fits:
            with refused("train.batch", batch):
                parse(Config, arguments, program="train")
            continue
        train = parse(Config, arguments, program="train").settings.train
        assert train.samples_per_step == batch
        assert all(
            f"--train.slots={train.slots}" == flag or f"--train.slot_size={train.slot_size}" == flag for flag in flags
        )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["batch", "slots"]), st.sampled_from([6, 12, 24]), st.booleans()), min_size=1, max_size=4
    )
)
def test_of_several_equal_flags_the_last_counts(flags: list[tuple[str, int, bool]]) -> None:
    given_last = {name: value for name, value, _ in flags}
    arguments = [
        part
        for name, value, is_joined in flags
        for part in ([f"--train.{name}={value}"] if is_joined else [f"--train.{name}", str(value)])
    ]
    if given_last.get("batch", 24) < given_last.get("slots", 0):
        return
    train = parse(Config, arguments, program="train").settings.train
    assert "slots" not in given_last or train.slots == given_last["slots"]
    assert "batch" not in given_last or train.samples_per_step == given_last["batch"]


def test_it_overrides_a_presets_slots(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {slots: 2, slot_size: 3, steps: 5}\n")
    assert _slots(parse(Config, ["--config", str(file), "--train.batch", "64"], program="train").settings) == (16, 4)
    assert _slots(load_settings(Config, str(file), {"train.batch": 24}).settings) == (12, 2)
    file.write_text("train: {batch: 30}\n")
    assert _slots(parse(Config, ["--config", str(file)], program="train").settings) == (15, 2)
    assert _slots(parse(Config, ["--config", str(file), "--train.slots", "3"], program="train").settings) == (3, 2)
    assert _slots(load_settings(Config, {"train": {"batch": 7}}).settings) == (7, 1)
    assert _slots(with_settings(Config(train=TrainConfig(slots=3, slot_size=5)), {"train.batch": 32})) == (16, 2)


def test_it_is_the_same_run_as_by_slots() -> None:
    by_batch, by_slots = Config(train=TrainConfig(batch=48)), Config(train=TrainConfig(slots=16, slot_size=3))
    assert by_batch == by_slots
    assert by_batch.default_run("p") == by_slots.default_run("p")
    assert from_yaml(Config, to_yaml(by_batch)) == by_slots


def test_beside_tokens_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("train: {slot_tokens: 512, slots: 8}\n")
    with refused("train.batch", names=("slot_tokens",)):
        parse(Config, ["--config", str(file), "--train.batch", "32"], program="train")
    with refused("train.batch", 32, names=("slot_tokens",)):
        TrainConfig(batch=32, slot_tokens=512)
    with refused("train.batch", 32, names=("slot_tokens",)):
        with_settings(Config(train=TrainConfig(slot_tokens=512)), {"train.batch": 32})


def test_a_stored_run_of_bundles_is_read_again(tmp_path: Path) -> None:
    config = Config(train=TrainConfig(slot_tokens=512, slots=3, slot_size=8))
    file = tmp_path / "stored.yaml"
    file.write_text(to_yaml(config))
    assert parse(Config, ["--config", str(file), "--train.steps", "1000"], program="train").settings == config
    assert load_settings(Config, str(file)).settings == load_settings(Config, config, {"seed": 0}).settings == config
    with refused("train.batch", names=("slot_tokens",)):
        parse(Config, ["--config", str(file), "--train.batch", "32"], program="train")


@pytest.mark.parametrize("value", ["many", "-3", "2.5"])
def test_what_is_no_number_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(SettingError, match=r"train\.batch"):
        parse(Config, [f"--train.batch={value}"], program="train")
