"""The failure screen: first rank to fail, exception, line and remedy; with errors of real Ray tasks."""

import errno
from pathlib import Path

import pytest

from raystride.pipelines.launch.console.failure import MAX_FRAMES, TrainingFailed, failure_screen, first_cause
from raystride.pipelines.system.storage.folder import Folder

FOLDER = Folder("/storage/run")


def _boom(depth: int = 0) -> None:
    """Fails below some frames of this file."""
    if depth:
        return _boom(depth - 1)
    raise ValueError("boom at sample 7")


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def _caught(depth: int = 0) -> ValueError:
    with pytest.raises(ValueError, match="boom") as caught:
        _boom(depth)
    return caught.value


def _group(**failures: BaseException) -> BaseException:
    from ray.train import WorkerGroupError

    return WorkerGroupError("...", {int(rank.removeprefix("rank")): cause for rank, cause in failures.items()})


def test_the_screen_names_rank_step_cause_line_and_where_the_record_lies() -> None:
    lines = failure_screen(_group(rank3=_caught()), step=1200, folder=FOLDER).splitlines()
    assert lines[:2] == ["training failed: rank 3, step 1,200", "  ValueError: boom at sample 7"]
    assert lines[-1].endswith("Record: /storage/run")
    frames = [line for line in lines if line.startswith("    ")]
    assert "raise ValueError" in frames[-1]
    assert frames[-1].strip().startswith("tests/pipelines/launch/console/test_failure.py:")
    assert len(lines) <= 3 + MAX_FRAMES + 1


def test_without_a_worker_it_was_the_driver() -> None:
    lines = failure_screen(_caught(), step=None, folder=FOLDER).splitlines()
    assert "the driver" in lines[0]
    assert "step" not in lines[0]
    assert TrainingFailed(_caught(), step=None, folder=FOLDER).rank is None


def test_an_error_has_in_fields_what_the_screen_says() -> None:
    failed = TrainingFailed(_group(rank3=_caught()), step=1200, folder=FOLDER)
    assert (failed.rank, failed.step, failed.folder, type(failed.cause)) == (3, 1200, FOLDER, ValueError)
    assert not failed.remedies


def test_deep_tracebacks_are_cut_to_the_innermost_lines() -> None:
    lines = failure_screen(_caught(depth=30), step=1, folder=FOLDER).splitlines()
    assert len([line for line in lines if line.startswith("    ")]) == MAX_FRAMES
    assert "raise ValueError" in lines[1 + MAX_FRAMES]


@pytest.mark.parametrize(
    "lost",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("NCCL error: remote process exited"),
        ConnectionResetError("Connection reset by peer"),
    ],
    ids=["gloo", "nccl", "socket"],
)
def test_ranks_that_only_lost_their_peer_come_last(lost: BaseException) -> None:
    rank, cause = first_cause(_group(rank0=lost, rank1=lost, rank2=_caught()))
    assert rank == 2
    assert isinstance(cause, ValueError)
    assert first_cause(_group(rank0=_caught(), rank1=lost))[0] == 0
    assert first_cause(_group(rank1=lost, rank2=lost))[0] == 1


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "train.micro_batch_slots"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "train.slot_size"),
        (RuntimeError("std::bad_alloc"), "train.slot_size"),
        (MemoryError(), "train.slot_size"),
        (OSError(12, "Cannot allocate memory"), "train.slot_size"),
        (ArithmeticError("the loss is nan in the steps up to 30"), "optimizer.learning_rate"),
        (OSError(28, "No space left on device"), "checkpoint.keep"),
        (OSError(30, "Read-only file system"), "--storage"),
        (RuntimeError("gloo: Connection closed by peer"), "--launch.max_restarts"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_known_causes_come_with_a_remedy(error: BaseException, remedy: str) -> None:
    tries = [line for line in failure_screen(error, step=1, folder=FOLDER).splitlines() if line.startswith("  try: ")]
    assert len(tries) == 1
    assert remedy in tries[0]


@pytest.mark.parametrize(
    ("error", "mended"),
    [
        (ConnectionError("Connection reset by peer"), ""),
        (OSError(errno.ENOSPC, "No space left on device"), "once the cause is mended, "),
        (RuntimeError("Size mismatch between saved [32] and current [64]"), "once the cause is mended, "),
    ],
)
def test_the_same_command_is_said_to_resume_only_what_it_can(error: Exception, mended: str) -> None:
    last = failure_screen(error, step=1, folder=FOLDER).splitlines()[-1]
    assert last.startswith(f"  everything up to the newest checkpoint is kept; {mended}the same command resumes it.")


def test_an_unknown_cause_has_no_invented_remedy() -> None:
    assert "try:" not in failure_screen(_caught(), step=1, folder=FOLDER)


def test_a_controllers_error_shows_what_went_wrong_inside() -> None:
    from ray.train import ControllerError

    failed = TrainingFailed(ControllerError(_caught()), step=None, folder=FOLDER)
    assert (failed.rank, type(failed.cause), str(failed.cause)) == (None, ValueError, "boom at sample 7")
    assert "  ValueError: boom at sample 7" in str(failed).splitlines()


@pytest.mark.usefixtures("ray_cluster")
class TestRemote:
    """The exceptions that Ray raises for an error in another process."""

    def test_a_remote_error_keeps_its_name_message_and_line(self) -> None:
        import ray

        with pytest.raises(ValueError, match="boom") as caught:
            ray.get(ray.remote(num_cpus=0)(_boom).remote(1))
        lines = failure_screen(_group(rank1=caught.value), step=5, folder=FOLDER).splitlines()
        assert "rank 1, step 5" in lines[0]
        assert lines[1] == "  ValueError: boom at sample 7"
        frames = [line.strip() for line in lines if line.startswith("    ")]
        assert frames
        assert all(frame.startswith("tests/pipelines/launch/console/test_failure.py:") for frame in frames)
        assert "Traceback" not in "".join(lines)

    def test_a_killed_process_comes_with_what_to_try(self, tmp_path: Path) -> None:
        import ray

        with pytest.raises(ray.exceptions.RayError) as caught:
            ray.get(ray.remote(num_cpus=0, max_restarts=0)(_Killed).remote().end.remote())
        lines = failure_screen(_group(rank1=caught.value), step=5, folder=FOLDER).splitlines()
        assert "rank 1, step 5" in lines[0]
        assert "--launch.max_restarts" in "".join(lines)
        assert "Traceback" not in "".join(lines)


class _Killed:
    """An actor that dies as if the machine had no memory left."""

    def end(self) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
