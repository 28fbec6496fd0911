"""The answer of a sweep: the counted trials, when a model is fitted, and the figures in its sentences and summary."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.sweep.answer import MIN_TRIALS, Answer, _describe_answer, _predict, build_answer
from raystride.pipelines.sweep.choice import Selection
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.described import ClusterDescription
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.model import HoldOut, Prediction, ScalingModel
from tests.pipelines.sweep.test_report_page import CLUSTER, EVERY, failed_trial, sweep, trial


def answer_to(*results: Result, **settings: Any) -> Answer:
    """Returns the answer of a sweep with these results."""
    return build_answer(sweep(**settings), results, None)


@pytest.mark.long
def test_a_model_takes_four_measured_trials() -> None:
    workers = [(n, word) for word in ("fp32", "bf16") for n in (1, 2)]
    every = [trial(1e4 * n**0.8, n, word) for n, word in workers]
    assert len(every) == MIN_TRIALS
    whole = answer_to(*every, failed_trial("failed", "", 4))
    assert whole.model
    assert whole.held_out
    assert not whole.remarks
    assert whole.observations.keys() == {one.key for one in every}
    few = answer_to(*every[1:], failed_trial("failed", "", 4))
    assert (few.model, few.held_out, few.predictions) == (None, None, [])
    assert any("4 measured trials" in remark and remark.endswith("here are 3.") for remark in few.remarks)


def test_a_trial_that_the_model_cannot_describe_is_named_and_the_others_count() -> None:
    """Three workers do not fill nodes of two."""
    odd = replace(trial(100, 3), places_per_node=2)
    found = answer_to(trial(100, 1), odd, trial(200, 2))
    assert len(found.observations) == 2
    assert [remark.split(":")[0] for remark in found.remarks] == [odd.label, "No scaling model was fitted"]


def test_summary_has_the_best_its_ties_and_counts() -> None:
    best, close, far = trial(1000, 2), trial(999.9, 4), trial(10, 1)
    found = answer_to(far, best, close, failed_trial("hung", "", 8))
    assert found.summary == {
        "run": "s",
        "status": "finished",
        "objective": "throughput",
        "trials": 4,
        "measured": 3,
        "best": {"run": best.run, "settings": best.settings, "tokens_per_second": best.speed, "spread": best.spread},
        "as_good": [best.run, close.run],
        "front": [],
        "held_back_median_error": None,
    }
    known = replace(found, held_out=HoldOut(((Any, Interval(1.0, 1.25, 2.0), 1.0),), ()))  # type: ignore[arg-type]
    assert known.summary["held_back_median_error"] == 0.25
    assert replace(found, held_out=HoldOut((), ())).summary["held_back_median_error"] is None
    none = answer_to(failed_trial("hung", "", 8), failed_trial("failed", "", 4))
    assert (none.summary["status"], none.summary["best"], none.summary["measured"], none.recommended) == (
        "failed",
        None,
        0,
        None,
    )
    assert none.text.startswith("None of 2 combinations has a figure for throughput")


def test_the_recommended_settings_are_those_of_the_best_under_the_reason() -> None:
    found = answer_to(trial(1000, 2, "bf16"), trial(10, 1))
    assert found.recommended
    comment, *lines = found.recommended.splitlines()
    assert comment == f"# {found.text}"
    assert {"  workers: 2", "  precision: bf16"} <= set(lines)


def test_the_slowest_is_the_worst_of_those_that_are_not_as_good() -> None:
    best, close, slow = trial(1000, 4), trial(999.9, 2), trial(250, 1)
    failed = failed_trial("failed", "", 8)
    early = replace(trial(1, 1, "bf16"), status="stopped_early", step_seconds=())
    selection = Selection([slow, best, close, failed, early], best, [best, close], confirmed=False)
    found = replace(answer_to(), text=_describe_answer(sweep(), selection, 0.0))
    share = f"{slow.speed / best.speed:.0%}"
    assert f"As good within the spread: {close.label}." in found.text
    assert f"The slowest that ran, {slow.label}, reaches {share} of its speed." in found.text
    assert "on 4 workers." in found.text
    assert "1 of 5 combinations have no figure" in found.text
    alone = answer_to(best)
    assert "As good" not in alone.text
    assert "The slowest" not in alone.text
    assert "have no figure" not in alone.text


def test_three_at_most_are_named_that_are_as_good() -> None:
    every = [trial(1000 - 0.01 * n, 4, optimizer__eps=(n + 1) * 1e-8) for n in range(6)]
    text = _describe_answer(sweep(), Selection(every, every[0], every, confirmed=False), 0.0)
    assert f"spread: {'; '.join(one.label for one in every[1:4])}." in text
    assert every[4].label not in text


@pytest.mark.parametrize(("figures", "said"), [({"joules_per_token": 0.5}, "0.5"), ({}, "no such figure")])
def test_another_objective_has_its_score_and_that_of_the_worst(figures: dict[str, Any], said: str) -> None:
    best = replace(trial(100, 1), figures={"joules_per_token": 0.25})
    worst = replace(trial(1000, 2), figures=figures)
    found = answer_to(worst, best, objective="energy")
    assert found.best == best
    assert "Of all trials it has the best score for energy: 0.25 joules a token." in found.text
    assert f"The worst that ran, {worst.label}, has {said}." in found.text


def test_losses_of_several_seeds_are_said_to_be_a_mean() -> None:
    rates = (0.1, 0.2)
    rounds = [
        replace(trial(100, optimizer__learning_rate=rate), round=number, val_loss=2 + rate + 0.02 * number)
        for rate in rates
        for number in range(2)
    ]
    base = sweep(objective="loss", space={"optimizer.learning_rate": list(rates)})
    found = build_answer(base, rounds, None)
    assert found.text.startswith(f"Use {rounds[0].label}. Its loss after ")
    assert (
        "after 90 steps is 2.11 (the mean of 2 seeds), the lowest of all trials. A trial is a training in small: "
        in found.text
    )
    assert "It trains 100 ± " in found.text
    assert f"The worst that ran, {rounds[2].label}, has 2.21." in found.text
    assert "mean of" not in build_answer(base, rounds[::2], None).text


@pytest.mark.parametrize(
    ("steps", "epochs", "words"),
    [
        (600, 0, "A trial is a training in small: 90 steps and not 600, its warm-up 7 and not 50."),
        (90, 0, "A trial trains all 90 steps."),
        (60, 0, "A trial trains 90 steps, more than the 60 of yours: give fewer sweep.windows."),
        (600, 2, "A trial trains 90 steps: how many yours has is not known, as epochs or hours end it."),
    ],
)
def test_the_answer_says_how_long_a_trial_trains_beside_the_training(steps: int, epochs: int, words: str) -> None:
    base = sweep(objective="loss", space={"optimizer.learning_rate": [0.1, 0.2]})
    train = replace(base.train, steps=steps, epochs=epochs)
    base = replace(base, train=train, optimizer=replace(base.optimizer, warmup_steps=50))
    every = [replace(trial(100, optimizer__learning_rate=rate), val_loss=rate) for rate in (0.1, 0.2)]
    assert words in build_answer(base, every, None).text


def test_a_machine_that_was_not_quiet_is_said_beside_the_winner() -> None:
    text = answer_to(replace(trial(200), busy_share=0.63), trial(100, 2)).text
    assert "others used 63% of its processors" in text
    assert "was not quiet" not in answer_to(trial(200), replace(trial(100, 2), busy_share=0.63)).text


def test_the_learning_rate_may_not_fit_another_batch() -> None:
    same, other = trial(100, 1), trial(200, 1, train__slots=8)
    base = sweep()
    text = answer_to(same, other).text
    assert f"Its batch is 32 samples a step, not the configured {base.train.samples_per_step}:" in text
    assert "Its batch" not in answer_to(same).text


@pytest.mark.parametrize("settings", [{}, {"target_tokens": 1e9}])
def test_predictions_are_for_the_target_or_else_for_the_trainings_steps(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    described, base = ClusterDescription.load(tmp_path / "cluster.yaml"), sweep(**settings)
    found = build_answer(base, EVERY[::2], described)
    assert found.best
    model = ScalingModel.fit(list(found.observations.values()), described, steps=100)
    made = [
        prediction
        for prediction in _predict(base, model, found.best, found.observations)
        if isinstance(prediction, Prediction)
    ]
    tokens = base.sweep.target_tokens or base.train.steps * found.best.tokens_per_step
    assert made
    for prediction in made:
        assert prediction.seconds.middle * prediction.tokens_per_second.middle == pytest.approx(tokens, rel=0.02)
    assert found.price_per_hour == 0.5
    assert _predict(base, model, found.best, {}) == _predict(base, None, found.best, found.observations) == []
    assert _predict(base, model, None, found.observations) == []
