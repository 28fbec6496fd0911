"""The fast start trains as the stock TorchTrainer does; without any of its names the latter is made, and it is said."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import RecordConfig, TrainConfig
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.fast_start import GROUP_MODULE, GROUP_STATE_MODULE
from raystride.pipelines.launch.cluster.internals import RAY_TRAIN
from raystride.pipelines.launch.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.launch.cluster.resources import Allocation
from raystride.pipelines.launch.cluster.trainer import make_trainer, train_on_ray
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.pipelines.train.worker.run import run_worker
from tests.processes import make_job
from tests.receipts import accept
from tests.tiny import tiny, write_text
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster", "ray_train_is_imported", "nothing_warned")


def _trained(job: Job, fast_start: bool) -> dict[str, Any]:
    storage = Folder(job.folder.uri.rpartition("/")[0])
    recorder = RecorderHandle.start(
        job.folder, job.run, job.attempt, RecordConfig(mlflow=False), storage, parameters={}, tags={}
    )
    return recorder.finish("finished", train_on_ray(job, Allocation(2, "cpu", 1), recorder, fast_start=fast_start))


def test_two_workers_of_the_stock_trainer_train_as_one_does_without_ray(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), train=TrainConfig(steps=6, slots=4, slot_size=2, exact=True))
    summary = _trained(make_job(config, tmp_path, "stock"), fast_start=False)
    assert (summary["steps"], summary["workers"], summary["ending"]) == (6, 2, "done")
    without = run_worker(make_job(config, tmp_path, "without"), WorkerInfo(), accept, lambda: False)
    assert summary["parameters_sha256"] == without["parameters_sha256"]


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.weekly
def test_lean_and_stock_trainer_give_the_same(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path))
    fast_start, stock = (
        _trained(make_job(config, tmp_path, name), name == "fast_start") for name in ("fast_start", "stock")
    )
    assert (fast_start["steps"], fast_start["workers"], fast_start["ending"]) == (6, 2, "done")
    measured = {key for key in fast_start if "seconds" in key or key.endswith(("_per_second", "_bytes", "_share", "_rank"))}
    assert set(fast_start) == set(stock)
    for key in set(fast_start) - measured - {"run"}:
        assert fast_start[key] == stock[key], key
    assert fast_start["parameters_sha256"]


def _settings() -> dict[str, Any]:
    from ray.train import RunConfig, ScalingConfig

    return {"scaling_config": ScalingConfig(num_workers=1), "run_config": RunConfig(name="name")}


def _count_starts(place: Path, error: Exception) -> int:
    """Trains with two restarts by a function that ends with the error; returns how often it began."""
    from ray.train import FailureConfig, RunConfig, TrainingFailedError

    def fail(config: dict[str, Any]) -> None:
        with (place / "starts").open("a") as starts:
            starts.write("started\n")
        raise error

    settings = _settings() | {"run_config": RunConfig(name="name", failure_config=FailureConfig(max_failures=2))}
    trainer = make_trainer(fail, settings, fast_start=True, warn=print)
    with pytest.raises(TrainingFailedError):
        trainer.fit()
    return len((place / "starts").read_text().splitlines())


def test_a_group_starts_again_after_an_error_unless_the_next_would_meet_it_as_well(tmp_path: Path) -> None:
    (tmp_path / "passing").mkdir()
    assert _count_starts(tmp_path, DataError("shard 3 has changed")) == 1
    assert _count_starts(tmp_path / "passing", RuntimeError("NCCL: connection reset")) == 3


def _kind(warned: list[str], *, fast_start: bool = True) -> str:
    return type(make_trainer(lambda config: None, _settings(), fast_start=fast_start, warn=warned.append)).__name__


def _falls_back(*words: str) -> None:
    """The stock trainer is made, and one warning names what is missing, and the version of Ray."""
    import ray

    warned: list[str] = []
    assert _kind(warned) == "TorchTrainer"
    (text,) = warned
    assert all(word in text for word in (f"Ray {ray.__version__}", *words)), text


@pytest.mark.long
def test_each_is_made_where_it_is_asked_for() -> None:
    warned: list[str] = []
    assert _kind(warned) == "FastStartTrainer"
    assert _kind(warned, fast_start=False) == "TorchTrainer"
    assert not warned


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (f"{RAY_TRAIN}.callbacks", "AcceleratorSetupCallback"),
        (f"{RAY_TRAIN}.callbacks", "BackendSetupCallback"),
        (f"{RAY_TRAIN}.callbacks.user_callback", "UserCallbackHandler"),
        (f"{RAY_TRAIN}.constants", "ENV_VARS_TO_PROPAGATE"),
        (f"{RAY_TRAIN}.constants", "ENABLE_PREEMPTION_WATCHER_ENV_VAR"),
        (f"{RAY_TRAIN}.constants", "get_env_vars_to_propagate"),
        (f"{RAY_TRAIN}.execution.controller.TrainController", "worker_group_cls"),
        (f"{RAY_TRAIN}.execution.worker_group.WorkerGroup", "_get_worker_runtime_env"),
        (f"{RAY_TRAIN}.execution.worker_group.WorkerGroup", "_worker_cls"),
        (f"{RAY_TRAIN}.execution.controller", "TrainController"),
        (f"{RAY_TRAIN}.execution.failure_handling", "DefaultFailurePolicy"),
        (f"{RAY_TRAIN}.execution.scaling_policy.fixed", "FixedScalingPolicy"),
        (f"{RAY_TRAIN}.execution.worker_group", "WorkerGroup"),
        (GROUP_MODULE, "SynchronizationActor"),
        (GROUP_STATE_MODULE, "_shutdown_sync_actor"),
        (f"{RAY_TRAIN}.util", "ObjectRefWrapper"),
        ("ray.train.v2.api.data_parallel_trainer.DataParallelTrainer", "_get_train_func"),
        (f"{RAY_TRAIN}.execution.controller.TrainController", "get_result"),
        (f"{RAY_TRAIN}.execution.scaling_policy.scaling_policy.ScalingPolicy", "_maybe_send_resource_request"),
        ("ray.train.backend.Backend", "share_cuda_visible_devices"),
    ],
)
def test_without_a_name_the_stock_trainer_is_made(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    module, _, owner = module.rpartition(".") if module.rpartition(".")[2][0].isupper() else (module, "", "")
    found = import_module(module)
    monkeypatch.delattr(getattr(found, owner) if owner else found, name)
    _falls_back(name, "Ray Train's own trainer starts the workers")


def _change_controller(monkeypatch: pytest.MonkeyPatch, changed: type) -> None:
    """Puts it where the fast start finds Ray Train's; the stock trainer has its own by another name."""
    monkeypatch.setattr(f"{RAY_TRAIN}.execution.controller.TrainController", changed)


def _controller() -> Any:
    return import_module(f"{RAY_TRAIN}.execution.controller").TrainController


@pytest.mark.weekly
@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_controller_of_other_keywords_trains_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They were met in fit() alone, when the record had begun and there was no way back."""

    import ray

    class Changed(_controller()):  # type: ignore[misc]
        def __init__(self, train_fn: Any, train_run_context: Any, policies: Any, callbacks: Any) -> None:
            raise AssertionError

    _change_controller(monkeypatch, Changed)
    config = tiny(write_text(tmp_path))
    summary = _trained(make_job(config, tmp_path, "changed"), fast_start=True)
    assert (summary["steps"], summary["workers"], summary["ending"]) == (6, 2, "done")
    told = [entry for entry in read_entries(Folder(str(tmp_path)) / "changed") if entry["values"].get("name") == "warning"]
    assert [("train_fn" in entry["values"]["text"], ray.__version__ in entry["values"]["text"]) for entry in told] == [
        (True, True)
    ]


def test_a_controller_that_wants_more_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(_controller()):  # type: ignore[misc]
        def __init__(self, placement: Any, **others: Any) -> None:
            raise AssertionError

    _change_controller(monkeypatch, Changed)
    _falls_back("placement")


def test_a_controller_that_fails_in_its_own_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(_controller()):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            raise TypeError("it is made of other parts now")

    _change_controller(monkeypatch, Changed)
    _falls_back("it is made of other parts now")


def test_a_hook_that_is_called_otherwise_is_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = import_module(f"{RAY_TRAIN}.execution.scaling_policy.fixed").FixedScalingPolicy
    monkeypatch.setattr(policy, "after_controller_start", lambda self, context, cluster: None, raising=False)
    _falls_back("after_controller_start", "cluster")


def test_a_group_that_is_called_otherwise_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    group = import_module(f"{RAY_TRAIN}.execution.worker_group").WorkerGroup
    monkeypatch.setattr(group, "execute_single", lambda self, function, *, rank: None)
    _falls_back("positional")


@pytest.mark.long
def test_a_single_node_has_no_process_that_synchronizes_for_ray_train() -> None:
    import ray.train

    def report(config: dict[str, Any]) -> None:
        ray.train.report({})

    before = {*import_module("ray._private.state").actors()}  # those of a stock trainer in the same session
    trainer = make_trainer(report, _settings(), fast_start=True, warn=print)
    with pytest.raises(ray.train.TrainingFailedError, match=r"ray\.train\.report .* need --launch\.fast_start false"):
        trainer.fit()
    new = [actor for name, actor in import_module("ray._private.state").actors().items() if name not in before]
    classes = [actor["ActorClassName"].rpartition(".")[2] for actor in new]
    assert "RayTrainWorker" in classes
    assert "SynchronizationActor" not in classes
    wait_until(lambda: ray.available_resources().get("CPU") == 2.0, "the place of its worker")
