"""The Ray cluster of a job: a local one that lives as long as the job, or a running one that the job joins.

with cluster(config.launch) as dashboard:                 # ray.init ... ray.shutdown
    print(dashboard)                                      # http://127.0.0.1:8265, or None: a local cluster has none
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

from raystride.pipelines.cluster.fallback import say
from raystride.pipelines.cluster.internals import on_loopback
from raystride.pipelines.cluster.logins import withheld
from raystride.pipelines.cluster.versions import other_versions, ray_difference
from raystride.pipelines.config import Launch
from raystride.pipelines.credentials import hidden
from raystride.pipelines.limits import local_ray_resources

T = TypeVar("T")
QUIET = {
    # Each worker's print would otherwise come twice, and usage statistics need a network.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The controller's look at its workers; its default of 2 s delays start and end.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Where `uv` is on the path, Ray would set up its environments in workers.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
TELL_S, NAME_S = 2.0, 10.0
"""Seconds after which it is said that a cluster is waited for; for which a host's name that nobody knows is looked up."""
SOCKET_BYTES, SESSION_BYTES = 107, 70
"""Longest path of a Unix socket, and what Ray adds to its folder for one: /session_<time>_<pid>/sockets/plasma_store."""
STARTS, TOO_SLOW = 3, "timed out during startup"
"""Times that Ray is started on this machine where it says this: it waits half a minute for itself, and no longer."""


class CannotRun(RuntimeError):
    """The cluster cannot run this configuration; the message has a line for each check that failed.

    `problems` are those checks by name, each with what was asked and what there is; `setting` and `value` are the limit that
    was waited for, and `host` is where it failed, as far as they are known.
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
        super().__init__(hidden(message))
        self.problems = tuple((name, hidden(found)) for name, found in problems)
        self.setting, self.value, self.host = setting, value, host


class NoCluster(CannotRun):
    """The Ray cluster that was asked for cannot be joined or started."""


@contextmanager
def cluster(settings: Launch, metadata: Mapping[str, str] | None = None) -> Iterator[str | None]:
    """Joins or starts Ray for the block, unless it is inline; yields the address of its dashboard, if any.

    `metadata` is what a running cluster's dashboard says of the driver; of a submitted job see `launch.job_page`.
    Raises NoCluster, with what to try, and CannotRun where driver and workers have other versions.
    """
    if settings.mode == "inline":
        yield None
        return
    with _handlers_kept() as set_again, _ray(settings, metadata) as dashboard:
        set_again()  # those of ray.init would end the process amid whatever it does
        yield dashboard


@contextmanager
def _handlers_kept() -> Iterator[Callable[[], None]]:
    """Leaves the handlers of signals as they were: ray.init and Ray Tune set their own, and never take them back.

    Yields what sets them again. What Ray starts until then ignores SIGHUP: if a terminal goes away, all its processes get
    one, and the driver needs Ray to save.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # nobody can set any here
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGBREAK")
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def set_again() -> None:
        for number, handler in before.items():
            if handler is not None:  # set by another language, which Python cannot do again
                signal.signal(number, handler)

    try:
        yield set_again
    finally:
        set_again()


@contextmanager
def _ray(settings: Launch, metadata: Mapping[str, str] | None) -> Iterator[str | None]:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    address = settings.address or os.environ.get("RAY_ADDRESS")
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
        # Clusters started on this machine ask for the token; a driver that does not send it waits 20 s and then fails.
        os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    if ray.is_initialized():  # by the caller, or by the sweep that this run is a trial of
        if ray.get_runtime_context().get_actor_id() is None:
            _refuse_other_versions(settings)
        yield None
        return
    dashboard = _with_scheme(_init(settings, address, metadata))
    try:
        if address:
            _refuse_other_versions(settings)
        if dashboard:
            # Has Ray Train tell the dashboard's server of its runs and their workers: GET /api/train/v2/runs/v1.
            os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
        yield dashboard
    finally:
        ray.shutdown()


def start_local(**options: Any) -> Any:
    """What `ray.init` returns, which starts Ray on this machine with these options, again where a busy one was too slow.

    Raises what it raises: ConnectionError, RuntimeError, ValueError, a bare Exception.
    """
    import ray

    for number in range(1, STARTS + 1):
        try:
            # Without an address Ray would join a cluster that was started on this machine, if there is one.
            return ray.init(address="local", include_dashboard=False, **options)
        except Exception as error:  # a bare one is what Ray raises
            if number == STARTS or TOO_SLOW not in str(error):
                raise
            ray.shutdown()
    raise AssertionError("the last start returns or raises")


def _init(settings: Launch, address: str | None, metadata: Mapping[str, str] | None) -> str | None:
    """Joins Ray at the address, or starts it; the address of its dashboard. Raises NoCluster."""
    import ray
    from ray.job_config import JobConfig

    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        if address:
            _wait_for(address, settings.timeout_s)
            with withheld():
                context = ray.init(address=address, job_config=JobConfig(metadata=dict(metadata or {})), **quiet)
        else:
            keep_token_private()
            # Ray's own is 15: on few cores everything that looks at a training would slow it.
            os.environ.setdefault("RAY_worker_niceness", "0")
            with on_loopback(), withheld():
                context = start_local(runtime_env=None, **local_ray_resources(), **_short_folder(), **quiet)
    except Exception as error:  # ray.init raises ConnectionError, RuntimeError, ValueError, grpc's own, ...
        if line := ray_difference(str(error)):
            raise NoCluster(line) from None
        origin = "launch.address" if settings.address else "the variable RAY_ADDRESS"
        where = f"joined at {address} ({origin})" if address else "started on this machine"
        raise NoCluster(
            f"no Ray cluster could be {where}: {error}\n  try `ray status`; with token authentication the driver needs "
            "RAY_AUTH_MODE=token and the cluster's token; or run without Ray: --launch inline"
        ) from None
    return str(context.dashboard_url or "") or None


def _short_folder() -> dict[str, str]:
    """Returns where Ray is to keep its session on this machine, if TMPDIR is too long for the paths of its sockets.

    Raises NoCluster if there is no short folder for this user either.
    """
    folder = os.environ.get("RAY_TMPDIR") or str(Path(gettempdir()) / "ray")
    if len(os.fsencode(folder)) + SESSION_BYTES <= SOCKET_BYTES:
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
    say(f"{variable} is too long for Ray's sockets: Ray's session lies in {short}")
    return {"_temp_dir": str(short)}


def _refuse_other_versions(settings: Launch) -> None:
    if line := other_versions(settings.timeout_s):
        raise CannotRun(line)


def token_file() -> Path:
    """Where Ray keeps the token that its clusters of this user ask for."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def keep_token_private() -> None:
    """Has nobody but the user read the token, with which one runs what one likes as that user.

    Ray writes it for all to read (2.60 does), so it is made before. Says so where the user has Ray ask for none.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        say("RAY_AUTH_MODE is disabled: whoever reaches Ray's ports on this machine can run code as you")
        return
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    file = token_file()
    with suppress(OSError):  # a home that cannot be written, where Ray says so itself
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if file.exists():
            file.chmod(0o600)
            return
        with NamedTemporaryFile("w", dir=file.parent, prefix=".auth_token-") as made:  # which is its user's alone
            made.write(secrets.token_hex(32))
            made.flush()
            os.link(made.name, file)  # fails where another job was faster, whose token then is everybody's


def _with_scheme(address: str | None) -> str | None:
    return address if not address or "://" in address else f"http://{address}"


def _wait_for(address: str, seconds: float) -> None:
    """Waits until something listens at host:port. Raises OSError: Ray itself would end the process after a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    began, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            return
        except OSError as error:
            waited = time.monotonic() - began
            if waited > (min(seconds, NAME_S) if isinstance(error, socket.gaierror) else seconds):
                raise
            if waited > TELL_S and not told:
                told = True
                say(f"waiting for a Ray cluster at {address}, up to {seconds:.0f} s (launch.timeout_s)")
            time.sleep(0.5)


def joined(settings: Launch) -> bool:
    """Whether the cluster outlives the job."""
    return bool(settings.address or os.environ.get("RAY_ADDRESS"))


def ask_a_node(function: Callable[[], T], timeout_s: float, *, gpu: bool = False) -> T:
    """What a function gives in a worker process of another node than this one, if there is one; `gpu`: of one with GPUs.

    Raises CannotRun where it is not back in `timeout_s` seconds.
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
    # Without a processor: on a cluster that is in use there may be none free.
    task = ray.remote(num_cpus=0, scheduling_strategy=strategy)(call)
    try:
        found: T = ray.get(task.remote(function), timeout=timeout_s)
    except GetTimeoutError:
        raise CannotRun(
            f"no worker answered in {timeout_s:g} s (launch.timeout_s): the cluster is busy or lost a node; "
            "see `ray status`",
            setting="launch.timeout_s",
            value=timeout_s,
        ) from None
    return found


def several_nodes() -> bool:
    """Whether the cluster that this process joined has other nodes."""
    import ray

    return len([node for node in ray.nodes() if node["Alive"]]) > 1


def call(function: Callable[[], T]) -> T:
    """What a function gives, as a task of Ray's: that of an object that can be called is none."""
    return function()
