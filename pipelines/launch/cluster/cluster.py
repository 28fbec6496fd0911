"""Ray cluster of a job: joins a running one, or starts a local one for the duration of the job.

with cluster(config.launch) as dashboard:                 # ray.init ... ray.shutdown
    print(dashboard)                                      # http://127.0.0.1:8265; None for a local cluster
"""

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from typing import Any, TypeVar

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster.internals import is_submitted_job, listen_on_loopback, send_token
from raystride.pipelines.launch.cluster.recorder_handle import scrubbed_environment
from raystride.pipelines.launch.cluster.versions import find_version_mismatch, parse_ray_mismatch
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.limits import local_ray_resources
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.signals import signal_exception
from raystride.project_folder import job_metadata

T = TypeVar("T")
RAY_ENVIRONMENT = {
    # Otherwise each worker's print appears twice, and usage statistics need a network.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Interval at which the controller polls its workers; the default of 2 s delays start and end.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Keeps Ray from setting up uv environments in workers if `uv` is on the path.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
NOTICE_S, MAX_LOOKUP_S = 2.0, 10.0
"""Seconds before a message says that the cluster is awaited; seconds for which an unknown host name is looked up again."""
MAX_SOCKET_PATH_BYTES, SESSION_PATH_BYTES = 107, 70
"""Longest path of a Unix socket, and length of Ray's own part of it: /session_<time>_<pid>/sockets/plasma_store."""
MAX_STARTS, STARTUP_TIMEOUT_TEXT = 3, "timed out during startup"
"""Attempts to start Ray on this machine if it fails with this text: Ray allows itself half a minute to start."""


class CannotRun(RuntimeError):
    """The cluster cannot run this configuration; the message has a line for each failed check.

    `problems` are the failed checks by name, each with the request and the resources. `setting` and `value` are the exceeded
    limit, and `host` is the failing host, if known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        problems: Sequence[tuple[str, str]] = (),
        setting: str = "",
        value: Any = None,
        host: str = "",
    ) -> None:
        super().__init__(redact(message))
        self.problems = tuple((name, redact(found)) for name, found in problems)
        self.setting, self.value, self.host = setting, value, host


class NoCluster(CannotRun):
    """The requested Ray cluster cannot be joined or started."""


@contextmanager
def cluster(settings: LaunchConfig, metadata: Mapping[str, str] | None = None) -> Iterator[str | None]:
    """Joins or starts Ray for the block, unless the launch is inline; yields the address of its dashboard, if any.

    A running cluster's dashboard shows `metadata` for the driver; for a submitted job see `console.ray_job_status`.
    Raises NoCluster with suggestions, and CannotRun if versions or code of driver and workers differ.
    """
    if settings.mode == "inline":
        yield None
        return
    with _preserve_signal_handlers() as restore, _connect_ray(settings, metadata) as dashboard:
        restore()  # the handlers of ray.init would end the process at any point
        yield dashboard


@contextmanager
def _preserve_signal_handlers() -> Iterator[Callable[[], None]]:
    """Restores the signal handlers at the end of the block: ray.init and Ray Tune set their own and never remove them.

    Yields a function that restores them earlier. Until it is called, processes that Ray starts inherit an ignored SIGHUP:
    if a terminal is closed, all its processes get one, and the driver needs Ray to save. A SIGTERM during ray.init raises
    Terminated, as one before and after it does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread can set handlers
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGBREAK")
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def restore() -> None:
        for number, handler in before.items():
            if handler is not None:  # None: set by native code, which Python cannot restore
                signal.signal(number, handler)

    try:
        yield restore
    except SystemExit as left:  # how the handler of ray.init ends
        if left.code == signal.SIGTERM:
            signal.alarm(0)  # Ray's native handler has set it, to abort a process that does not end within three seconds
            raise signal_exception(signal.SIGTERM) from None
        raise
    finally:
        restore()


_has_started_head = False
_kept_dashboards: dict[str, str | None] = {}
"""Dashboards of connections that stay until a submitted job's process ends, by Ray's name of the driver.

Ray's dashboard knows one driver of each submitted job, and its page of trainings fails for all users of a cluster on which a
job had two, as a script that trains and then predicts.
"""


@contextmanager
def _connect_ray(settings: LaunchConfig, metadata: Mapping[str, str] | None) -> Iterator[str | None]:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = _cluster_address(settings)
    if address and address.startswith(("http://", "https://")):
        origin = "launch.address" if settings.address else "RAY_ADDRESS"
        raise NoCluster(
            f"{origin} is {address!r}, the address of Ray's dashboard, which `ray job submit` takes: a driver joins at "
            f"HOST:PORT, 6379 by default. {'Leave it out' if settings.address else 'Unset it'} to start Ray here, "
            "give --launch.address HOST:6379, or submit the job there",
            setting="launch.address",
            value=address,
        )
    if address and "RAY_AUTH_MODE" not in os.environ and token_file().exists():
        # Clusters started on this machine require the token; a driver that does not send it waits 20 s and then fails.
        send_token()
    import ray

    if ray.is_initialized():  # by the caller, by the sweep of which this run is a trial, or earlier in a submitted job
        if ray.get_runtime_context().get_actor_id() is None:
            _check_versions(settings)
        yield _kept_dashboards.get(ray.get_runtime_context().get_job_id())
        return
    global _has_started_head
    dashboard = _add_scheme(_init_ray(settings, address, metadata))
    _has_started_head = not address
    try:
        if address:
            _check_versions(settings)
        if dashboard:
            # Makes Ray Train report its runs and workers to the dashboard's server: GET /api/train/v2/runs/v1.
            os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
        if is_submitted_job():
            _kept_dashboards[ray.get_runtime_context().get_job_id()] = dashboard
        yield dashboard
    finally:
        _has_started_head = False
        if not is_submitted_job():
            ray.shutdown()


def has_started_head() -> bool:
    """Returns whether this process is inside `cluster` with a Ray that it has started, whose head nobody starts again."""
    return _has_started_head


def start_local_ray(**options: Any) -> Any:
    """Starts Ray on this machine with these options and returns the result of `ray.init`; retries if the start timed out.

    Raises the errors of `ray.init`: ConnectionError, RuntimeError, ValueError, a bare Exception.
    """
    import psutil
    import ray

    process = psutil.Process()
    for number in range(1, MAX_STARTS + 1):
        before = process.children()
        try:
            # Without an address Ray would join a cluster that runs on this machine, if there is one.
            return ray.init(address="local", include_dashboard=False, **options)
        except Exception as error:  # Ray raises a bare Exception
            if number == MAX_STARTS or STARTUP_TIMEOUT_TEXT not in str(error):
                raise
            ray.shutdown()
            for child in set(process.children()) - {*before}:
                with suppress(psutil.NoSuchProcess):
                    if any("/ray/" in part for part in child.cmdline()):  # Ray leaves them, a second head
                        child.kill()
                        child.wait()
    raise AssertionError("the last start returns or raises")


def _init_ray(settings: LaunchConfig, address: str | None, metadata: Mapping[str, str] | None) -> str | None:
    """Joins Ray at the address or starts it; returns the address of its dashboard. Raises NoCluster."""
    import ray
    from ray.job_config import JobConfig

    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        if address:
            _wait_for_address(address, settings.cluster_timeout_s)
            with scrubbed_environment():
                joined = JobConfig(metadata=job_metadata() | dict(metadata or {}))
                context = ray.init(address=address, job_config=joined, **quiet)
        else:
            keep_token_private()
            # Ray's default is 15, at which any monitoring process would slow a training on few cores.
            os.environ.setdefault("RAY_worker_niceness", "0")
            with listen_on_loopback(), scrubbed_environment():
                options = {**local_ray_resources(), **_short_session_folder(), **quiet}
                context = start_local_ray(runtime_env=None, job_config=JobConfig(metadata=job_metadata()), **options)
    except Exception as error:  # ray.init raises ConnectionError, RuntimeError, ValueError, grpc's own, ...
        if line := parse_ray_mismatch(str(error)):
            raise NoCluster(line) from None
        origin = "launch.address" if settings.address else "the variable RAY_ADDRESS"
        where = f"joined at {address} ({origin})" if address else "started on this machine"
        raise NoCluster(
            f"no Ray cluster could be {where}: {error}\n  try `ray status`; with token authentication the driver needs "
            "RAY_AUTH_MODE=token and the cluster's token; or run without Ray: --launch inline"
        ) from None
    return str(context.dashboard_url or "") or None


def _short_session_folder() -> dict[str, str]:
    """Returns the option for a short session folder if TMPDIR is too long for Ray's socket paths, else no option.

    Raises NoCluster if no short folder can be made for this user.
    """
    folder = os.environ.get("RAY_TMPDIR") or str(Path(gettempdir()) / "ray")
    if len(os.fsencode(folder)) + SESSION_PATH_BYTES <= MAX_SOCKET_PATH_BYTES:
        return {}
    short = Path("/tmp") / f"raystride-{os.getuid()}"  # noqa: S108, owned by the user or refused
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    try:
        short.mkdir(mode=0o700, exist_ok=True)
        if short.stat().st_uid != os.getuid():
            raise PermissionError(f"{short} is another user's")
    except OSError as error:
        message = f"{variable} is {folder!r}, too long for Ray's sockets, and {short} will not do ({error})"
        raise NoCluster(f"{message}: set {variable} to a shorter folder") from None
    print_warning(f"{variable} is too long for Ray's sockets: Ray's session lies in {short}")
    return {"_temp_dir": str(short)}


def _check_versions(settings: LaunchConfig) -> None:
    if line := find_version_mismatch(settings.cluster_timeout_s, accept_other_code=settings.accept_other_code):
        raise CannotRun(line)


def token_file() -> Path:
    """Returns the path of the token that this user's Ray clusters require."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token"))


def keep_token_private() -> None:
    """Restricts the Ray auth token file to mode 0600: its reader can run any code as this user.

    Ray 2.60 creates it world-readable, so it is created here first. Warns if the user has disabled token authentication.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        print_warning("RAY_AUTH_MODE is disabled: whoever reaches Ray's ports on this machine can run code as you")
        return
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    file = token_file()
    with suppress(OSError):  # the home folder cannot be written, which Ray reports itself
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if file.exists():
            file.chmod(0o600)
            return
        with NamedTemporaryFile("w", dir=file.parent, prefix=".auth_token-") as made:  # mode 0600
            made.write(secrets.token_hex(32))
            made.flush()
            os.link(made.name, file)  # fails if another job was faster; then all use its token


def _add_scheme(address: str | None) -> str | None:
    return address if not address or "://" in address else f"http://{address}"


def _wait_for_address(address: str, seconds: float) -> None:
    """Waits until a server listens at host:port. Raises OSError; Ray itself would end the process after a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    started, is_announced = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            return
        except OSError as error:
            waited = time.monotonic() - started
            if waited > (min(seconds, MAX_LOOKUP_S) if isinstance(error, socket.gaierror) else seconds):
                raise
            if waited > NOTICE_S and not is_announced:
                is_announced = True
                print_warning(f"waiting for a Ray cluster at {address}, up to {seconds:.0f} s (launch.cluster_timeout_s)")
            time.sleep(0.5)


def uses_running_cluster(settings: LaunchConfig) -> bool:
    """Returns whether the job joins a running cluster, so that the cluster outlives the job."""
    return _cluster_address(settings) is not None


def _cluster_address(settings: LaunchConfig) -> str | None:
    """Returns the address of the cluster to join; None to start one on this machine, which Ray calls `local`."""
    address = settings.address or os.environ.get("RAY_ADDRESS") or None
    return None if address == "local" else address


def run_on_node(function: Callable[[], T], timeout_s: float, *, gpu: bool = False) -> T:
    """Runs a function in a worker process and returns its result: on another node if there is one, with `gpu` on a GPU node.

    Raises CannotRun if there is no result within `timeout_s` seconds.
    """
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and (not gpu or node["Resources"].get("GPU", 0))]
    others = [node["NodeID"] for node in alive if node["NodeID"] != here]
    if gpu and any(node["NodeID"] == here for node in alive):
        others = [here]
    strategy = NodeAffinitySchedulingStrategy(others[0] if others else here, soft=True)
    # Reserves no CPU: a busy cluster may have none free.
    task = ray.remote(num_cpus=0, scheduling_strategy=strategy)(call_function)
    try:
        found: T = ray.get(task.remote(function), timeout=timeout_s)
    except GetTimeoutError:
        raise CannotRun(
            f"no worker answered in {timeout_s:g} s (launch.cluster_timeout_s): the cluster is busy or lost a node; "
            "see `ray status`",
            setting="launch.cluster_timeout_s",
            value=timeout_s,
        ) from None
    return found


def has_several_nodes() -> bool:
    """Returns whether the cluster has more than one live node. Needs ray.init."""
    import ray

    return len([node for node in ray.nodes() if node["Alive"]]) > 1


def call_function(function: Callable[[], T]) -> T:
    """Calls a function and returns its result; wraps callable objects, since Ray does not accept them as tasks."""
    return function()
