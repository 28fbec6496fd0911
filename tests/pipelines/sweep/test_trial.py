"""A trial is watched until it is measured, asked to end at its timeout, and its end has a cause; without Ray."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.launch.hang.detector import Hang, Hung
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.sweep import trial
from raystride.pipelines.sweep.space import Candidate
from raystride.pipelines.sweep.trial import (
    TrialTimeout,
    TrialWatcher,
    build_result,
    classify_failure,
    refuse_candidate,
    result_without_figures,
)
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.sweep.test_report_page import TOKENS, sweep

THERE = Resources(cpus=4, gpus=0, memory_bytes=8 * 2**30, gpu_memory_bytes=None, node_cpus=(4.0,))
BASE = sweep(warmup_steps=2, window_steps=2, windows=5, min_windows=3, target_precision=0.05)


def candidate(base: SweepJobConfig = BASE, **settings: Any) -> Candidate:
    """Returns a candidate, with one worker by default."""
    return Candidate(base, {"scaling.workers": 1} | {name.replace("__", "."): value for name, value in settings.items()})


SEQUENCE = itertools.count(1)


class WatchedTrial:
    """A trial's journal, which grows by `step`, with its watcher's requests."""

    def __init__(
        self, folder: Folder, of: Candidate, on_window: Callable[[Any], bool] = lambda window: True, attempt: str = "a1"
    ) -> None:
        self.watcher = TrialWatcher(of, folder, on_window)
        self.stops, self._attempt = 0, attempt
        self._journal = Journal(folder, attempt)
        self.write("parameters", {"workers": 1, "device": "cpu", "threads": 2})

    def write(self, kind: str, values: dict[str, Any], number: int | None = None) -> None:
        """Adds an entry to the journal."""
        self._journal.append([_entry(kind, values, number) | {"attempt": self._attempt}])

    def step(self, number: int, speed: float, loss: float = 3.0) -> bool:
        """Returns True if the watcher asks for the end at a step with this speed."""
        values = {"tokens_per_second": speed, "step_seconds_mean": TOKENS / speed, "train_loss": loss}
        self.write("metrics", values, number)
        return self.look(number)

    def look(self, number: int) -> bool:
        """As `step`, without anything new in the journal."""
        before = self.stops
        self.watcher.on_state({"step": number}, self._stop)
        return self.stops > before

    def _stop(self) -> None:
        self.stops += 1


def _entry(kind: str, values: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    entry = {"attempt": "a1", "sender": "rank0", "sequence": next(SEQUENCE)}
    return entry | {"time": 1.0, "kind": kind, "step": step, "values": values}


@pytest.fixture
def folder(tmp_path: Any) -> Folder:
    """The trial's own."""
    return Folder(str(tmp_path))


def test_a_trial_ends_when_its_speed_is_known_and_leaves_out_the_warm_up(folder: Folder) -> None:
    told = []
    followed = WatchedTrial(folder, candidate(), lambda window: told.append(window.end) or True)  # type: ignore[func-returns-value]
    assert [followed.step(number, speed) for number, speed in ((2, 1.0), (4, 100.0), (6, 101.0))] == [False] * 3
    assert not followed.look(6)
    assert followed.step(8, 100.0)
    assert told == [2, 4, 6, 8]
    result = build_result(candidate(), folder, THERE, "measured", seconds=100.0)
    assert (result.status, result.speeds) == ("measured", (100.0, 101.0, 100.0))
    assert (result.workers, result.device, result.threads, result.places_per_node) == (1, "cpu", 2, 2)
    assert (result.tokens_per_step, result.loss) == (TOKENS, 3.0)
    trained = 2 * TOKENS * (1 + 1 / 100 + 1 / 101 + 1 / 100)
    assert result.overhead_s == pytest.approx(max(0.0, 100.0 - trained))


def test_a_trial_that_was_started_again_has_the_figures_of_its_newest_attempt(folder: Folder) -> None:
    """The first ran on one worker, and was killed; the windows of the second begin at its own first step."""
    told: list[int] = []
    for number, attempt in enumerate(("a1", "a2", "a3")):
        parameters = {"workers": number + 1, "device": "cpu", "threads": 4 - number}
        followed = WatchedTrial(folder, candidate(), lambda window: told.append(window.end) or True, attempt)  # type: ignore[func-returns-value]
        followed.write("parameters", parameters)
        for step in (2, 4, 6):
            followed.step(step, 100.0 * (number + 1) + step)
        result = build_result(candidate(), folder, THERE, "measured")
        assert (result.workers, result.threads) == (number + 1, 4 - number)
        assert result.speeds == (100.0 * (number + 1) + 4, 100.0 * (number + 1) + 6)


def test_speeds_that_differ_are_measured_on(folder: Folder) -> None:
    followed = WatchedTrial(folder, candidate())
    assert not any(followed.step(2 * number, 100.0 * number) for number in range(1, 6))


def test_with_time_to_loss_the_loss_alone_ends_it(folder: Folder) -> None:
    aim = candidate(replace(BASE, sweep=replace(BASE.sweep, objective="time_to_loss", target_loss=2.0)))
    followed = WatchedTrial(folder, aim)
    assert [followed.step(2 * n, 100.0, loss) for n, loss in ((1, 4.0), (2, 3.0), (3, 2.5), (4, 1.9))] == [False] * 3 + [
        True
    ]
    assert build_result(aim, folder, THERE, "measured").seconds_to_loss == pytest.approx(8 * TOKENS / 100)


def test_unwanted_trials_are_stopped_once(folder: Folder) -> None:
    told: list[int] = []

    def on_window(window: Any) -> bool:
        told.append(window.end)
        return window.end < 4

    followed = WatchedTrial(folder, candidate(), on_window)
    assert [followed.step(2 * n, 100.0) for n in (1, 2, 3)] == [False, True, False]
    assert told == [2, 4]
    assert followed.watcher.is_unwanted


def test_a_slow_trial_is_asked_to_end_and_keeps_what_it_has(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = replace(BASE, sweep=replace(BASE.sweep, timeout_s=600.0))
    followed = WatchedTrial(folder, candidate(soon))
    assert not followed.step(2, 100.0)
    followed.watcher._deadline = time.monotonic()  # however long the lines above took
    assert followed.look(2)
    monkeypatch.setattr(trial, "GRACE_S", 0.0)
    with pytest.raises(TrialTimeout, match=r"longer than sweep.timeout_s, 600 s"):
        followed.look(2)


def test_a_trial_without_a_window_in_its_time_hangs(folder: Folder) -> None:
    soon = replace(BASE, sweep=replace(BASE.sweep, timeout_s=0.01))
    followed = WatchedTrial(folder, candidate(soon))
    time.sleep(0.02)
    with pytest.raises(TrialTimeout) as caught:
        followed.look(0)
    assert classify_failure(caught.value) == ("hung", "TrialTimeout: it took longer than sweep.timeout_s, 0.01 s")


def test_without_a_window_after_the_warm_up_there_are_no_figures(folder: Folder) -> None:
    WatchedTrial(folder, candidate()).step(2, 100.0)
    result = build_result(candidate(), folder, THERE, "measured", seconds=3.0)
    cause = "it ended before the first window after the warm-up"
    assert result == result_without_figures(candidate(), "failed", cause, seconds=3.0)
    assert build_result(candidate(), folder, THERE, "hung", "why").status == "hung"


def _catch(action: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever a library raises
        action()
    return caught.value


def _worker_group_error(rank: int, error: BaseException) -> BaseException:
    from ray.train import WorkerGroupError

    return WorkerGroupError("...", {rank: error})


@pytest.mark.parametrize(
    "action",
    [
        lambda: torch.empty(2**50),
        lambda: numpy.empty(2**50),
        lambda: [0] * 2**60,
    ],
    ids=["torch", "numpy", "python"],
)
def test_memory_that_is_not_there_is_known_in_each_librarys_words(action: Callable[[], object]) -> None:
    status, cause = classify_failure(_worker_group_error(1, _catch(action)))
    assert status == "out_of_memory", cause
    assert cause.startswith("rank 1: ")
    assert "\n" not in cause


def test_memory_errors_of_gpus_and_ray_are_classified() -> None:
    from ray.exceptions import OutOfMemoryError

    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on the node was 30 GB"),
    ):
        assert classify_failure(_worker_group_error(0, error))[0] == "out_of_memory", error


def test_a_killed_worker_has_failed_though_ray_advises_on_memory() -> None:
    from ray.exceptions import RayActorError

    text = "The actor died unexpectedly before finishing this task.\n\tclass_name: X\n(1) killed by SIGKILL by OOM killer"
    status, cause = classify_failure(_worker_group_error(3, RayActorError(None, text)))
    assert status == "failed"
    assert cause == "rank 3: RayActorError: The actor died unexpectedly before finishing this task."


def test_a_group_that_hung_and_a_network_that_timed_out_are_told_apart() -> None:
    hang = Hang(culprits=(1,), silent=True, heartbeats={}, seconds=60.0, limit_s=60.0)
    assert classify_failure(Hung("it stands still", hang, [])) == ("hung", "rank 1: Hung: it stands still")
    assert classify_failure(TimeoutError("the download timed out"))[0] == "failed"
    assert classify_failure(ValueError())[1] == "ValueError"


def test_impossible_candidates_are_refused_with_a_reason() -> None:
    assert refuse_candidate(candidate(), THERE) is None
    told = {
        "refused": ({"scaling__workers": 8}, "train.slots, 4"),
        "too_large": ({"model__hidden_size": 2**16, "model__heads": 2}, "GiB for 1 worker"),
    }
    for status, (settings, said) in told.items():
        result = refuse_candidate(candidate(**settings), THERE)
        assert result
        assert (result.status, said in result.cause) == (status, True), result.cause
    crowded = refuse_candidate(candidate(scaling__workers=4, scaling__threads=2), THERE)
    assert crowded
    assert crowded.cause == "resources: CPU: 8 asked, 4 there"
    spread = refuse_candidate(candidate(scaling__workers=8, scaling__tensor=2, scaling__threads=1, train__slots=8), THERE)
    assert spread
    assert spread.cause == "resources: CPU: 8 asked, 4 there"
    assert (
        refuse_candidate(candidate(scaling__workers=4, scaling__tensor=2, scaling__pipeline=2, scaling__threads=1), THERE)
        is None
    )
    untyped = refuse_candidate(candidate(train__precision="fp7"), THERE)
    assert untyped
    assert "train.precision is 'fp7': " in untyped.cause
    assert "auto, fp32" in untyped.cause
