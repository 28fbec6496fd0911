"""Tune's parameters, space and callbacks in a sweep, and trials that Tune ends; real Tune trials, without a cluster."""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.sweep.result import MeasuredWindow, Result, load_results, save_result
from raystride.pipelines.sweep.space import Candidate, enumerate_grid
from raystride.pipelines.sweep.trial import SweepPlan, result_without_figures
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.sweep.test_report_page import sweep, trial

THERE = Resources(cpus=4, gpus=0, memory_bytes=8 * 2**30, gpu_memory_bytes=None)
SETTINGS = {"scaling.workers": 1, "train.precision": "fp32"}


@pytest.fixture
def plan(tmp_path: Any) -> SweepPlan:
    """The plan of a sweep with windows of two steps each."""
    base = sweep(warmup_steps=2, window_steps=2, windows=4)
    return SweepPlan(base, Folder(str(tmp_path)), 0.0, THERE)


def tune_trial(config: Mapping[str, Any]) -> Any:
    """Returns a trial of Tune's with these parameters."""
    from ray.tune.experiment import Trial

    return Trial("_trial", config=dict(config), stub=True)


def wrap_candidate(candidate: Candidate) -> dict[str, Any]:
    """Returns the parameters in which grids and random draws pass candidates to Tune."""
    return {"trial": {"settings": dict(candidate.settings), "round": candidate.round}}


def test_both_kinds_of_parameters_stand_for_their_candidate() -> None:
    from raystride.pipelines.sweep import tuning

    base = sweep(repeats=2)
    for candidate in enumerate_grid(base):
        assert tuning.parse_candidate(wrap_candidate(candidate), base).key == candidate.key
    assert tuning.parse_candidate(SETTINGS, base).key == next(enumerate_grid(base)).key


def test_a_trial_that_tune_stopped_is_told_of_when_its_training_has_ended(plan: SweepPlan) -> None:
    """Before that its own result is not there, and is better than what the journal alone says."""
    from raystride.pipelines.sweep import tuning

    told: list[Result] = []
    ends, candidate = tuning._ResultCallback(plan, told.append), Candidate(plan.base, SETTINGS)
    ends.on_trial_complete(1, [], tune_trial(wrap_candidate(candidate)))
    assert not told
    own = result_without_figures(candidate, "failed", "its own words")
    save_result(plan.folder, own)
    ends.on_trial_start(2, [], None)
    ends.on_experiment_end([])
    assert told == [own]


def test_a_trial_ended_with_its_process_is_read_from_its_journal(plan: SweepPlan) -> None:
    from raystride.pipelines.sweep import tuning

    told: list[Result] = []
    ends, candidate = tuning._ResultCallback(plan, told.append), Candidate(plan.base, SETTINGS)
    entry = {"attempt": "a1", "sender": "rank0", "sequence": 1, "time": 1.0, "kind": "metrics"}
    journal = Journal(plan.storage / candidate.run, "a1")
    journal.append(
        [
            entry | {"sequence": step, "step": step, "values": {"tokens_per_second": 50.0 * step, "step_seconds_mean": 1.0}}
            for step in (2, 4, 6)
        ]
    )
    ends.on_trial_complete(1, [], tune_trial(wrap_candidate(candidate)))
    ends.on_experiment_end([])
    (result,) = told
    assert (result.status, result.speeds) == ("stopped_early", (200.0, 300.0))
    assert load_results(plan.folder) == {candidate.key: result}


def test_a_trial_that_ended_is_told_of_at_once(plan: SweepPlan) -> None:
    from raystride.pipelines.sweep import tuning

    told: list[Result] = []
    candidate = Candidate(plan.base, SETTINGS)
    save_result(plan.folder, own := result_without_figures(candidate, "refused", "why"))
    tuning._ResultCallback(plan, told.append).on_trial_complete(1, [], tune_trial(SETTINGS))
    assert told == [own]


def test_a_process_that_died_leaves_a_result_that_says_so(plan: SweepPlan) -> None:
    from raystride.pipelines.sweep import tuning

    told: list[Result] = []
    candidate = Candidate(plan.base, SETTINGS)
    tuning._ResultCallback(plan, told.append).on_trial_error(1, [], tune_trial(wrap_candidate(candidate)))
    (result,) = told
    assert result.status == "failed"
    assert result.cause.startswith("the process that drove the trial ended; its trial.txt")
    assert load_results(plan.folder) == {candidate.key: result}


class _Marker:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


DIED = """Failure # 1 (occurred at 2026-11-22_09-07-38)
The actor died unexpectedly before finishing this task.
\tclass_name: ImplicitFunc
\tpid: 7969
The actor is dead because its worker process has died.

"""
RAISED = """Failure # 1 (occurred at 2026-11-22_09-07-37)
\x1b[36mray::ImplicitFunc.train()\x1b[39m (pid=7970, ip=10.0.0.2, repr=f)
         ~^~
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

  File "trial.py", line 7, in train
    raise ValueError(text)
    ^^^^^^^^^^^^^^^^^^^^^^
ValueError: first line
second line: and more
   indented

"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DIED, "The actor died unexpectedly before finishing this task."),
        (RAISED, "ValueError: first line"),
        (DIED + RAISED, "ValueError: first line"),
        (RAISED + DIED, "The actor died unexpectedly before finishing this task."),
        ("", ""),
        ("Failure # 1 (occurred", ""),
    ],
)
def test_the_cause_stands_in_tunes_text(text: str, cause: str) -> None:
    from raystride.pipelines.sweep import tuning

    assert tuning.parse_cause(text) == cause


def test_a_pickle_in_the_storage_runs_nothing(plan: SweepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.tune.experiment import Trial

    from raystride.pipelines.sweep import tuning

    told: list[Result] = []
    candidate = Candidate(plan.base, SETTINGS)
    failed = tune_trial(wrap_candidate(candidate))
    monkeypatch.setattr(Trial, "local_path", str(tmp_path))  # a stub of Tune's has no place of its own
    failed.run_metadata.error_filename, failed.run_metadata.pickled_error_filename = "error.txt", "error.pkl"
    (tmp_path / "error.txt").write_text(RAISED)
    (tmp_path / "error.pkl").write_bytes(pickle.dumps(_Marker(tmp_path / "was run")))
    tuning._ResultCallback(plan, told.append).on_trial_error(1, [], failed)
    assert told[0].cause.startswith("ValueError: first line; its trial.txt")
    assert not (tmp_path / "was run").exists()


def optuna_base(**settings: Any) -> SweepJobConfig:
    """Returns a sweep over a list, and a range of each kind."""
    space = {
        "train.precision": ["fp32", "bf16"],
        "train.slots": {"integers": [2, 3]},
        "optimizer.eps": {"uniform": [0.0, 1.0]},
        "optimizer.learning_rate": {"log_uniform": [1e-4, 1e-2]},
    }
    return sweep(space=space, search="optuna", **settings)


def test_tune_draws_from_the_space() -> None:
    from raystride.pipelines.sweep import tuning

    domains = tuning._tune_space(optuna_base())
    drawn = [{key: domain.sample() for key, domain in domains.items()} for _ in range(50)]
    assert {settings["train.slots"] for settings in drawn} == {2, 3}
    assert {settings["train.precision"] for settings in drawn} == {"fp32", "bf16"}
    assert all(
        0 <= settings["optimizer.eps"] <= 1 and 1e-4 <= settings["optimizer.learning_rate"] <= 1e-2 for settings in drawn
    )


def test_optuna_started_again_knows_what_was_measured_and_does_not_begin_anew(plan: SweepPlan) -> None:
    from raystride.pipelines.sweep import tuning

    base = optuna_base()
    plan = SweepPlan(base, plan.storage, 0.0, THERE)

    def first(known: list[Result]) -> Any:
        search = tuning._build_optuna(plan, known)
        search.set_search_properties("score", "min", tuning._tune_space(base))
        return search, search.suggest("one")

    before, suggested = first([])
    assert not before._ot_study.trials[:-1]
    candidate = Candidate(base, dict(suggested))
    measured = Result(**vars(trial(100.0)) | {"key": candidate.key, "settings": dict(suggested)})
    failed = result_without_figures(Candidate(base, dict(suggested) | {"train.slots": 3}), "failed", "x")
    again, other = first([measured, failed])
    assert [tried.value for tried in again._ot_study.trials[:-1]] == [pytest.approx(1 / measured.speed)]
    assert other != suggested


def test_unmet_conditions_are_refused_by_name() -> None:
    from raystride.pipelines.sweep import tuning

    base = optuna_base(constraints=("train.slots < 3",))
    good, bad = ({"train.slots": slots} for slots in (2, 3))
    assert tuning._refuse_unmet_conditions(Candidate(base, good)) is None
    refused = tuning._refuse_unmet_conditions(Candidate(base, bad))
    assert refused
    assert (refused.status, refused.cause) == ("refused", "it breaks a condition of sweep.constraints: train.slots < 3")


def window(begin: int, speed: float, loss: float | None) -> MeasuredWindow:
    """Returns a window of two steps."""
    return MeasuredWindow(begin, begin + 2, speed, 1.0, {}, loss)


@pytest.mark.parametrize(
    ("settings", "price", "scores"),
    [
        ({}, 0.0, [1 / 100, 1 / 200]),
        ({"objective": "energy"}, 0.0, [1 / 100, 1 / 200]),
        ({"objective": "cost"}, 36.0, [2 * 0.01 / 100, 2 * 0.01 / 200]),
        ({"objective": "loss", "space": {"optimizer.learning_rate": [0.1, 0.2]}}, 0.0, [3.0, math.nan]),
        ({"objective": "time_to_loss", "target_loss": 1.0}, 0.0, [3.0, math.nan]),
    ],
)
def test_scheduler_gets_each_window_by_the_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], price: float, scores: list[float]
) -> None:
    """It hears of the mean speed until then, or of each loss, and of nothing before the warm-up has ended."""
    from raystride.pipelines.sweep import tuning

    told: list[dict[str, Any]] = []
    monkeypatch.setattr(tuning.tune, "report", told.append)
    price_setting = {"price_per_hour": price} if price else {}
    base = sweep(warmup_steps=2, window_steps=2, windows=4, early_stopping="asha", **price_setting, **settings)
    plan = SweepPlan(base, Folder(str(tmp_path)), price, THERE)
    tell = tuning._WindowReporter(plan, Candidate(base, {"scaling.workers": 2}))
    assert tell(window(1, 1.0, 9.0))
    assert told == []
    assert tell(window(2, 100.0, 3.0))
    assert tell(window(4, 300.0, None))
    assert [report[tuning.WINDOW] for report in told] == [1, 2]
    assert [report[tuning.SCORE] for report in told] == pytest.approx(scores, nan_ok=True)


def test_a_trial_goes_on_unless_tune_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raystride.pipelines.sweep import tuning

    def end(_: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(tuning.tune, "report", end)
    for stop_bad, goes_on in (("none", True), ("asha", False)):
        base = sweep(warmup_steps=2, window_steps=2, early_stopping=stop_bad)
        tell = tuning._WindowReporter(SweepPlan(base, Folder(str(tmp_path)), 0.0, THERE), Candidate(base, SETTINGS))
        assert tell(window(2, 1.0, 1.0)) is goes_on


@pytest.mark.parametrize("given_candidates", [True, False])
@pytest.mark.usefixtures("ray_cluster")
def test_optuna_chooses_if_no_candidates_are_given(
    plan: SweepPlan, monkeypatch: pytest.MonkeyPatch, given_candidates: bool
) -> None:
    """Candidates that are measured from another seed are given, in a search by Optuna, too."""
    from raystride.pipelines.sweep import tuning

    asked: dict[str, Any] = {}

    class Tuner:
        def __init__(self, _: Any, **arguments: Any) -> None:
            asked.update(arguments)

        def fit(self) -> None:
            asked["fitted"] = True

    monkeypatch.setattr(tuning.tune, "Tuner", Tuner)
    base = optuna_base()
    candidates = [Candidate(base, {"train.slots": 2}, 1), Candidate(base, {"train.slots": 3}, 1)] * given_candidates
    tuning.measure_with_tune(SweepPlan(base, plan.storage, 0.0, THERE), candidates, [], 5, lambda _: None)
    assert asked["fitted"]
    space, settings = asked["param_space"], asked["tune_config"]
    if given_candidates:
        trials = [{"settings": dict(candidate.settings), "round": 1} for candidate in candidates]
        assert space == {tuning.TRIAL: {"grid_search": trials}}
        assert (settings.num_samples, settings.search_alg) == (1, None)
    else:
        assert space.keys() == base.sweep.space.keys()
        assert settings.num_samples == 5
        assert settings.search_alg is not None
    assert (settings.mode, settings.metric, settings.reuse_actors) == ("min", tuning.SCORE, True)
