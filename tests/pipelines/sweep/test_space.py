"""The candidates of a sweep: every combination once a round, in an order that a second start repeats."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import ModelConfig, OptimizerConfig, ScalingConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.sweep.result import load_candidate_result, save_result
from raystride.pipelines.sweep.space import (
    Candidate,
    describe_mesh,
    draw_random,
    enumerate_grid,
    format_mesh_flags,
    meets_conditions,
    refuse_endless_warmup,
    shorten_schedule,
)
from raystride.pipelines.sweep.trial import result_without_figures
from raystride.pipelines.system.storage.folder import Folder

SPACE = {"scaling.workers": [1, 2, 8], "train.precision": ["fp32", "bf16"]}


def sweep(**settings: object) -> SweepJobConfig:
    return SweepJobConfig(run="s", train=TrainConfig(slots=4, slot_size=2), sweep=SweepConfig(space=SPACE, **settings))  # type: ignore[arg-type]


def meshes(space: dict[str, list[int]], *, workers: Any = 4, **settings: Any) -> SweepJobConfig:
    """Returns a sweep over meshes of a model of two layers and two heads."""
    return SweepJobConfig(
        run="s",
        tokenizer=TokenizerConfig(kind="bytes"),
        model=ModelConfig(layers=2, heads=2, hidden_size=32, context=32),
        train=TrainConfig(slots=4, slot_size=2),
        scaling=ScalingConfig(workers=workers, threads=1),
        sweep=SweepConfig(space=space, **settings),
    )


def test_a_grid_is_every_combination_and_says_which_rules_refuse() -> None:
    found = list(enumerate_grid(sweep()))
    assert [candidate.label for candidate in found][:2] == ["workers 1, precision fp32", "workers 1, precision bf16"]
    assert len({candidate.key for candidate in found}) == 6
    assert ["train.slots, 4" in candidate.refusal for candidate in found] == [False] * 4 + [True] * 2


def test_rounds_alternate_their_direction() -> None:
    found = list(enumerate_grid(sweep(repeats=2, constraints=("scaling.workers < 8",))))
    assert [candidate.settings for candidate in found[4:]] == [candidate.settings for candidate in reversed(found[:4])]
    assert len({candidate.key for candidate in found}) == 8


def test_a_trial_is_short_and_measures_nothing_but_steps() -> None:
    first = next(enumerate_grid(sweep(warmup_steps=5, window_steps=4, windows=3)))
    config = first.config
    assert config
    assert (config.train.steps, config.train.log_every, config.run) == (17, 4, f"s-{first.key}")
    assert (config.validation.every, config.checkpoint.every, config.sample.tokens, config.record.mlflow) == (0, 0, 0, False)


def test_weak_scaling_keeps_the_work_of_a_worker() -> None:
    found = enumerate_grid(sweep(scaling="weak"))
    slots = {candidate.config.scaling.workers: candidate.config.train.slots for candidate in found if candidate.config}
    assert slots == {1: 4, 2: 8, 8: 32}


def test_keys_tell_trials_apart_that_measure_something_else_and_no_others() -> None:
    first = next(enumerate_grid(sweep())).key
    assert next(enumerate_grid(sweep(window_steps=3))).key != first
    other = SweepJobConfig(
        run="t", storage="/elsewhere", train=TrainConfig(slots=4, slot_size=2), sweep=SweepConfig(space=SPACE)
    )
    assert next(enumerate_grid(other)).key == first


def test_a_mesh_may_vary_and_what_cannot_be_says_why() -> None:
    space = {"scaling.tensor": [1, 2, 3], "scaling.pipeline": [1, 2, 4], "scaling.context": [1, 2]}
    found = list(enumerate_grid(meshes(space)))
    left_out = {candidate.label: candidate.refusal for candidate in found if candidate.refusal}
    assert len(found) == 18
    assert sorted(candidate.label for candidate in found if candidate.config) == [
        "tensor 1, pipeline 1, context 1",
        "tensor 1, pipeline 1, context 2",
        "tensor 1, pipeline 2, context 1",
        "tensor 1, pipeline 2, context 2",
        "tensor 2, pipeline 1, context 1",
        "tensor 2, pipeline 1, context 2",
        "tensor 2, pipeline 2, context 1",
    ]
    stages, groups = left_out["tensor 1, pipeline 4, context 1"], left_out["tensor 2, pipeline 2, context 2"]
    assert stages.startswith("scaling.pipeline is 4: ")
    assert "model.layers 2" in stages
    assert groups.startswith("scaling.workers is 4: ")
    assert "scaling.pipeline x expert x context x tensor, 8" in groups
    uneven = next(
        candidate for candidate in enumerate_grid(meshes(space, workers="auto")) if candidate.settings["scaling.tensor"] == 3
    ).refusal
    assert uneven.startswith("scaling.tensor is 3: ")
    assert "model.heads, 2" in uneven


def test_weak_scaling_keeps_the_work_of_a_worker_in_every_mesh() -> None:
    found = enumerate_grid(meshes({"scaling.workers": [2, 4], "scaling.tensor": [1, 2]}, scaling="weak"))
    assert [candidate.config.train.slots for candidate in found if candidate.config] == [8, 8, 16, 16]


def test_a_mesh_is_named_in_words_and_flags() -> None:
    assert describe_mesh(ScalingConfig(workers=4), SPACE) == ""
    assert describe_mesh(ScalingConfig(workers=2, context=2, context_exchange="keys"), {}) == "groups of 2 (context 2 keys)"
    whole = ScalingConfig(workers=8, pipeline=2, schedule="zbv", tensor=2)
    assert describe_mesh(whole, {"scaling.tensor": 4}) == "groups of 8 (pipeline 2 zbv, tensor 4)"
    assert format_mesh_flags({"scaling.workers": 4, "scaling.pipeline": 2, "scaling.tensor": 1}) == (
        "--scaling.tensor 1 --scaling.pipeline 2"
    )
    assert format_mesh_flags(SPACE) == ""


@given(seed=st.integers(0, 2**32), trials=st.integers(1, 8))
def test_draws_repeat_stay_in_their_ranges_and_meet_the_conditions(seed: int, trials: int) -> None:
    space = {"train.slots": {"integers": [1, 8]}, "optimizer.learning_rate": {"log_uniform": [1e-4, 1e-2]}, "seed": [0, 1]}
    where = ("train.slots * 2 <= 12",)
    config = SweepJobConfig(
        seed=seed,
        scaling=ScalingConfig(workers=1),
        sweep=SweepConfig(space=space, search="random", trials=trials, constraints=where),
    )
    found = list(draw_random(config))
    assert [candidate.key for candidate in found] == [candidate.key for candidate in draw_random(config)]
    assert len(found) == len({candidate.key for candidate in found}) == trials
    for candidate in found:
        assert 1 <= candidate.settings["train.slots"] <= 6
        assert 1e-4 <= candidate.settings["optimizer.learning_rate"] <= 1e-2
        assert meets_conditions(config, candidate.settings)
        assert candidate.config


def test_keys_are_those_of_earlier_versions() -> None:
    """As commit 395d810 has it, so that a sweep that was begun then goes on."""
    preset = replace(load_settings(SweepJobConfig, "sweep_scaling").settings, run="s")
    first = next(iter(enumerate_grid(preset)))
    assert (len(first.key), first.keys) == (16, (first.key, "fa79f946"))


def test_a_result_under_half_a_key_is_that_of_its_settings_and_round_alone(tmp_path: Path) -> None:
    """Two candidates may share half a key, as earlier versions had it."""
    folder, (first, other, *_) = Folder(str(tmp_path)), list(enumerate_grid(sweep(repeats=2)))
    again = replace(first, round=1)
    for owner in (other, again, first):
        stored = replace(result_without_figures(owner, "refused", "a cause"), key=first.key[:8])
        save_result(folder, stored)
        assert load_candidate_result(folder, first) == (stored if owner is first else None)
    own = result_without_figures(first, "refused", "another cause")
    save_result(folder, own)
    assert load_candidate_result(folder, first) == own


@given(st.sampled_from([3, 8, None]), st.integers(0, 3), st.integers(0, 5))
def test_by_quality_each_round_of_each_seed_has_one_of_its_own(seed: int | None, number: int, base: int) -> None:
    by_loss = replace(sweep(objective="loss"), seed=base)
    settings = {} if seed is None else {"seed": seed}
    found = Candidate(by_loss, settings, number)._trial_settings()
    assert found.get("seed", base) == (base if seed is None else seed) + number


@given(st.integers(2, 500), st.integers(2, 10_000), st.data())
def test_a_schedule_in_small_ends_its_warm_up_within_the_trial(trial: int, training: int, data: st.DataObject) -> None:
    warmup, decay = data.draw(st.integers(0, training - 1)), data.draw(st.integers(0, training))
    given_schedule = OptimizerConfig(warmup_steps=warmup, decay_steps=decay)
    found = shorten_schedule(given_schedule, trial, training)
    if trial >= training:
        assert found == given_schedule
        return
    assert 0 <= found.warmup_steps < trial
    assert found.warmup_steps == max(min(1, warmup), int(Fraction(warmup * trial, training)))
    assert (found.decay_steps == 0) == (decay == 0)
    assert found.decay_steps <= trial
    assert shorten_schedule(replace(given_schedule, warmup_steps=0), trial, training).warmup_steps == 0
    refuse_endless_warmup(found, SweepConfig(warmup_steps=1, window_steps=1, windows=trial - 1, min_windows=1))


def by_loss(warmup_steps: int, steps: int, space: dict[str, Any], **settings: Any) -> SweepJobConfig:
    """Returns a sweep of trials of 40 steps, three windows of ten after ten steps."""
    base = sweep(objective="loss", windows=3)
    return replace(
        base,
        optimizer=OptimizerConfig(warmup_steps=warmup_steps),
        train=replace(base.train, **{"steps": steps} | settings),
        sweep=replace(base.sweep, space=space),
    )


RATES = {"optimizer.learning_rate": [0.001, 0.004, 0.016]}


def test_trials_by_loss_are_trainings_in_small_and_what_is_recommended_is_not() -> None:
    """Of 600 steps the first 50 are the warm-up, so three of a trial's 40."""
    for candidate in enumerate_grid(by_loss(50, 600, RATES)):
        assert candidate.config
        assert (candidate.config.train.steps, candidate.config.optimizer.warmup_steps) == (40, 3)
        assert (candidate.recommended.train.steps, candidate.recommended.optimizer.warmup_steps) == (600, 50)


def test_a_warm_up_that_is_tried_is_kept_and_refused_if_the_trial_ends_inside() -> None:
    tried = list(enumerate_grid(by_loss(50, 600, {"optimizer.warmup_steps": [5, 39, 40]})))
    assert [candidate.config and candidate.config.optimizer.warmup_steps for candidate in tried] == [5, 39, None]
    assert "must be less than the 40 steps of a trial" in tried[2].refusal


def test_results_of_a_warm_up_that_was_not_in_small_are_not_found_again() -> None:
    """An earlier version gave each trial the whole warm-up. Where nothing is shorter, keys are as they were."""
    keys = [next(enumerate_grid(by_loss(warmup, 600, RATES))).key for warmup in (0, 50)]
    assert keys[0] == next(enumerate_grid(by_loss(0, 600, RATES, hours=0.0))).key
    whole = next(enumerate_grid(by_loss(50, 40, RATES)))
    assert not whole._has_short_schedule()
    assert next(enumerate_grid(by_loss(50, 600, RATES)))._has_short_schedule()
    fast = replace(by_loss(50, 600, RATES), sweep=SweepConfig(space=SPACE, objective="throughput"))
    assert not next(enumerate_grid(fast))._has_short_schedule()
