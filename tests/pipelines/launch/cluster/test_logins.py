"""MLflow's logins: out of the way while Ray starts, back afterwards, and left to who needs them."""

import json
import os

import pytest

from raystride.pipelines.launch.cluster.internals import JOB_CONFIG_VARIABLE
from raystride.pipelines.launch.cluster.recorder_handle import mlflow_environment, scrubbed_environment

LOGIN = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "secret", "MLFLOW_TRACKING_TOKEN": "other"}


def _mlflow() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """MLflow's variables of this process."""
    for name in _mlflow():
        monkeypatch.delenv(name)
    mine = {"MLFLOW_TRACKING_INSECURE_TLS": "true", **LOGIN}
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    return mine


def test_logins_are_away_in_the_block_and_back_after_it(given: dict[str, str]) -> None:
    seen = {}

    def start() -> None:
        with scrubbed_environment():
            seen.update(_mlflow())
            raise RuntimeError("no cluster")

    with pytest.raises(RuntimeError, match="no cluster"):
        start()
    assert seen == {"MLFLOW_TRACKING_INSECURE_TLS": "true"}
    assert _mlflow() == mlflow_environment() == given


@pytest.mark.parametrize(
    ("told", "left"),
    [
        (
            {"runtime_env": {"env_vars": {**LOGIN, "A": "b"}, "working_dir": "gcs://x"}, "metadata": {"n": "1"}},
            {"runtime_env": {"env_vars": {"A": "b"}, "working_dir": "gcs://x"}, "metadata": {"n": "1"}},
        ),
        ({"runtime_env": {}, "metadata": {}}, {"runtime_env": {}, "metadata": {}}),
        ({"runtime_env": None}, {"runtime_env": None}),
        ([1], [1]),
    ],
)
def test_a_submitted_jobs_workers_do_without(told: object, left: object, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(told)
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, text)
    with scrubbed_environment():
        assert json.loads(os.environ[JOB_CONFIG_VARIABLE]) == left
    assert os.environ[JOB_CONFIG_VARIABLE] == text
