"""Proves the Triton kernels of a run on the GPU that they meet, once for these versions of driver, Triton and PyTorch.

    prove(config, storage, describe_gpu(device), limit_s=60)  # in child processes, which may crash; kept in a table
    with kernel_table(storage, gpu) as table:
        table["rms_norm bfloat16"]                # {"error": 0.4, "problem": "", "checks": 3, "date": "2026-11-30"}
        table["rms_norm 8192x4096, bfloat16"]     # of the run's own shape: {..., "triton_s": [...], "torch_s": [...]}

An operation is proved in a dtype if its checks on the device passed (`triton_kernels.device_checks`: as accurate as PyTorch,
the same bits each time), those of the run's own widths and heads among them. Times are of a forward and backward on the
run's own shapes, in three interleaved rounds. The table lies on the machine and, sealed, in the storage. It is of one
version of the kernels: their sources are part of its name.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from raystride.pipelines.config import Config
from raystride.pipelines.observability.record.environment import describe_hardware
from raystride.pipelines.system.machine_table import machine_table
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.attention_backend import wait_for_device
from raystride.pipelines.train.worker.kernel_needs import Function, Need, list_needs
from raystride.triton_kernels import device_checks
from raystride.triton_kernels.device_checks import (
    Call,
    CheckItem,
    DeviceCheck,
    Shapes,
    check_call,
    operation_of,
)
from raystride.triton_kernels.dispatch import NoCompiler, only_kernels, use_kernels
from raystride.triton_kernels.processes import map_in_children

ROUNDS = 3
ROUND_S = 0.02
"""A round repeats a call for about so many seconds."""
_REPEATS = 5
"""Runs of a check that are compared bitwise."""
PASSING = ("ended with -9", "it was ended after", "out of memory", "OutOfMemory", "no GPU is to be seen")
"""Signs of a problem of the moment: it is not kept, and the next proof tries again."""


class Gpu(NamedTuple):
    """What a proof is of, beside PyTorch's version and the kernels."""

    name: str
    driver: str
    triton: str


def describe_gpu(device: torch.device) -> Gpu:
    """Returns model and versions of a GPU; "" where one is not known."""
    gpus = describe_hardware()["gpus"]
    driver = gpus[0].get("driver") if gpus else torch.version.hip
    return Gpu(torch.cuda.get_device_name(device), str(driver or ""), triton_version())


def triton_version() -> str:
    """Returns the installed version of Triton, "" if there is none."""
    with suppress(PackageNotFoundError):
        return version("triton")
    return ""


@contextmanager
def kernel_table(storage: Folder | None, gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Opens the verdicts of this machine and this GPU model with these versions; see `machine_table`."""
    with machine_table("kernels", storage, gpu=list(gpu), kernels=_hash_kernels()) as table:
        yield table


@cache
def _hash_kernels() -> str:
    """Returns a hash of the kernels' sources and tiles: a proof is of these alone."""
    files = sorted(Path(str(device_checks.__file__)).parent.glob("*.*"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.suffix in (".py", ".json"))).hexdigest()[:16]


def proved_here(device: torch.device, gpu: Gpu | None = None) -> frozenset[tuple[str, torch.dtype]]:
    """Returns the operations and dtypes whose checks passed on this machine's GPU, whatever their speed."""
    with kernel_table(None, gpu or describe_gpu(device)) as table:
        passed = [key.split() for key, row in table.items() if "," not in key and not row["problem"]]
    return frozenset((operation, getattr(torch, dtype)) for operation, dtype in passed)


class ProofItem(NamedTuple):
    """Work of a child process: a general check by its name, or a call of the run's own."""

    device: str
    dtype: torch.dtype
    key: str
    """The table's row that it is for."""
    call: str
    own: Call | None = None
    """The run's own call, None for a general check."""
    timed: Shapes | None = None
    """To be timed on these shapes rather than checked."""


def general_items(need: Need, device: str) -> list[ProofItem]:
    """Returns the general checks of an operation in a dtype: each kernel and rule at one size."""
    operation = device_checks.PROVED_WITH.get(need.operation, need.operation)
    names = dict.fromkeys(item.call for item in device_checks.list_checks("cpu", quick=True))
    # Checks of bytes have an input of floating point, for its dtype alone.
    dtype = need.dtype if need.dtype.is_floating_point else torch.float32
    return [ProofItem(device, dtype, need.key, name) for name in names if operation_of(name) == operation]


def run_proof_item(item: ProofItem) -> Any:
    """Checks or times in this process: returns a DeviceCheck, or the seconds by implementation."""
    if item.own is None:
        return device_checks.run_item(CheckItem(item.device, item.call, item.dtype, quick=True))
    if item.timed is None:
        return check_call(item.own, torch.device(item.device), item.dtype, _REPEATS)
    return time_call(item.own[1], item.timed, item.dtype, torch.device(item.device))


def time_call(
    function: Function,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Returns seconds of forward and backward by `triton` and by `torch`, one a round; both take turns.

    PyTorch's are of what the public function does where its kernel is not proved. Raises NotRun if no kernel runs.
    """
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    use_kernels("auto")

    def run(count: int) -> float:
        wait_for_device(device)
        began = clock()
        for _ in range(count):
            y = function(*leaves)
            if y.requires_grad:
                torch.autograd.grad(y, leaves, torch.ones_like(y))
        wait_for_device(device)
        return (clock() - began) / count

    def run_kernels(count: int) -> float:
        with only_kernels():
            return run(count)

    ways = {"triton": run_kernels, "torch": run}
    for way in ways.values():
        way(1)  # compiles and allocates
    counts = {name: max(1, min(100, int(ROUND_S / max(way(1), 1e-6)))) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name].append(way(counts[name]))
    return seconds


def is_slower(row: Mapping[str, Any]) -> bool:
    """Returns whether the kernel takes longer than PyTorch by more than the spread of either's rounds."""
    ours, theirs = row["triton_s"], row["torch_s"]
    spread = max(max(times) - min(times) for times in (ours, theirs))
    return bool(median(ours) - median(theirs) > spread)


def prove(
    config: Config,
    storage: Folder | None,
    gpu: Gpu,
    *,
    device: str = "cuda",
    limit_s: float,
    processes: int = 0,
    items_of: Callable[[Need, str], list[ProofItem]] = general_items,
    run: Callable[[ProofItem], Any] = run_proof_item,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Proves what the run needs and the table does not have yet; returns the table. `config.train.precision` is resolved.

    Checks run side by side in child processes, then calls are timed one after the other; with train.exact nothing is timed.
    What is left at the limit stays open for the next time.
    """
    deadline = time.monotonic() + limit_s
    needs = list_needs(config)
    with kernel_table(storage, gpu) as table:
        pending = {need.key: items_of(need, device) for need in needs if need.key not in table}
        for need in needs:
            if need.checked and need.own_key not in table:
                pending[need.own_key] = [ProofItem(device, need.dtype, need.own_key, need.operation, need.checked)]
        try:
            _check_pending(table, pending, run, processes, deadline)
            timed = [need for need in needs if need.timed and table.get(need.own_key, {}).get("problem") == ""]
            if not config.train.exact:
                _time_missing(
                    table, [need for need in timed if "triton_s" not in table[need.own_key]], device, run, deadline
                )
        except NoCompiler as reason:
            log(f"no kernel can be proved: {reason}")
        return dict(table)


def list_open(needs: list[Need], table: Mapping[str, Any], *, exact: bool) -> list[str]:
    """Returns the keys that a run needs and that have no verdict, or no times, in the table."""
    keys = [key for need in needs for key in (need.key, need.own_key) if key]
    timed = {need.own_key for need in needs if need.timed and not exact}
    rows = {key: table.get(key) for key in keys}
    return [
        key for key, row in rows.items() if row is None or (key in timed and not row["problem"] and "triton_s" not in row)
    ]


def _check_pending(
    table: dict[str, Any],
    pending: dict[str, list[ProofItem]],
    run: Callable[[ProofItem], Any],
    processes: int,
    deadline: float,
) -> None:
    """Writes a row for each key whose checks all have a result, or of which one is wrong.

    Calls that the kernel refuses, as PyTorch has them anyway, say nothing about the others.
    """
    results: dict[str, list[DeviceCheck]] = {key: [] for key in pending}
    undecided = set()
    items = [item for found in pending.values() for item in found]
    for item, check in device_checks.run_in_children(items, processes=processes, deadline=deadline, run=run):
        found = results[item.key]
        found.append(check)
        if any(sign in check.problem + check.not_run for sign in PASSING):
            undecided.add(item.key)
        if item.key in undecided | table.keys():
            continue
        if check.failed or len(found) == len(pending[item.key]):
            table[item.key] = _make_row(found)


def _make_row(checks: list[DeviceCheck]) -> dict[str, Any]:
    wrong = next((check for check in checks if check.failed), None)
    problem = f"not run: {checks[0].not_run}" if all(check.not_run for check in checks) else ""
    if wrong:
        problem = wrong.problem or (
            f"{wrong.error:.2g} times the allowed error" if wrong.same_bits else "other bits in another run"
        )
    errors = [check.error for check in checks if check.error == check.error]
    return {
        "error": round(max(errors, default=0.0), 3),
        "problem": problem[:300],
        "checks": sum(not check.not_run for check in checks),
        "date": time.strftime("%Y-%m-%d"),
    }


def _time_missing(
    table: dict[str, Any], needs: list[Need], device: str, run: Callable[[ProofItem], Any], deadline: float
) -> None:
    items = [ProofItem(device, need.dtype, need.own_key, need.operation, need.checked, need.timed) for need in needs]
    for outcome in map_in_children(run, items, processes=1, timeout_s=device_checks.CHECK_S, deadline=deadline):
        if isinstance(outcome.value, dict):
            rounded = {f"{name}_s": [float(f"{each:.4g}") for each in times] for name, times in outcome.value.items()}
            table[outcome.item.key] = table[outcome.item.key] | rounded
        elif not any(sign in outcome.problem for sign in PASSING):
            table[outcome.item.key] = table[outcome.item.key] | {"problem": outcome.problem[:300]}
