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
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from raystride.model.shape import head_size, hidden_width, is_gated, is_rotated, rotary_size
from raystride.pipelines.config import Config
from raystride.pipelines.config.combinations import DECODERS
from raystride.pipelines.data.plugins import BUILT_IN_TASKS
from raystride.pipelines.observability.record.environment import describe_hardware
from raystride.pipelines.system.machine_table import machine_table
from raystride.pipelines.system.storage.folder import Folder
from raystride.triton_kernels import device_checks
from raystride.triton_kernels.adamw import adamw, adamw_reference
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.device_checks import (
    Call,
    CheckItem,
    DeviceCheck,
    Shapes,
    check_call,
    operation_of,
    parameters_after_step,
)
from raystride.triton_kernels.dispatch import NoCompiler, only_kernels, use_kernels
from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.processes import map_in_children
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference

ROUNDS = 3
ROUND_S = 0.02
"""A round repeats a call for about so many seconds."""
MAX_ROWS = 1 << 14
"""Maximum number of tokens of a timed batch."""
MAX_CHECKED_ROWS, MAX_CHECKED_TOKENS, MAX_CHECKED_WORDS = 1000, 512, 1 << 15
"""Maximum of rows, tokens of attention and words of a checked call, which PyTorch computes in float64 as well."""
_REPEATS = 5
"""Runs of a check that are compared bitwise."""
PASSING = ("ended with -9", "it was ended after", "out of memory", "OutOfMemory", "no GPU is to be seen")
"""Signs of a problem of the moment: it is not kept, and the next proof tries again."""

Function = Callable[..., torch.Tensor]


class Gpu(NamedTuple):
    """What a proof is of, beside PyTorch's version and the kernels."""

    name: str
    driver: str
    triton: str


class Need(NamedTuple):
    """An operation that a run calls in a dtype."""

    operation: str
    dtype: torch.dtype
    checked: Call | None = None
    """A call with the run's widths and heads, and few rows; None: the general checks are all there is."""
    timed: Shapes | None = None
    """The run's own shapes."""

    @property
    def key(self) -> str:
        """The table's key of the general checks."""
        return proof_key(self.operation, self.dtype)

    @property
    def own_key(self) -> str:
        """The key of the run's own shape."""
        sizes = " ".join("x".join(map(str, shape)) for shape in self.timed or self.checked[3]) if self.checked else ""
        return f"{self.checked[0]} {sizes}, {dtype_name(self.dtype)}" if self.checked else ""


def proof_key(operation: str, dtype: torch.dtype) -> str:
    """Returns the table's key of an operation's general checks in a dtype."""
    return f"{operation} {dtype_name(dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


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


def list_needs(config: Config) -> list[Need]:
    """Returns the operations that a run calls, in its dtypes. `config.train.precision` is resolved."""
    model, optimizer = config.model, config.optimizer
    stream = torch.bfloat16 if config.train.precision == "pure_bf16" else torch.float32
    matmul = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision, stream)
    matrices: Shapes = [(4 * model.hidden_size, model.hidden_size)] * 4
    ours, reference = (partial(parameters_after_step, update) for update in (adamw, adamw_reference))
    needs = [_own("adamw", stream, ours, reference, matrices)] if optimizer.kind != "sgd" else []
    if config.task == "images":
        return needs + [Need(name, matmul) for name in ("convolution", "relu", "mse")]
    if config.task not in BUILT_IN_TASKS:
        return needs
    context = model.context
    samples = max(1, min(config.train.slot_samples, MAX_ROWS // context))
    rows = samples * context
    needs += _norm_needs(model.architecture == "llama", rows, model.hidden_size, stream)
    gated = is_gated(model)
    llama_silu = model.architecture == "llama" and model.gate != "gelu"
    gelus = model.architecture in ("gpt2", "bert")
    pair: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = (
        ((swiglu, swiglu_reference) if llama_silu else (geglu, geglu_reference))
        if gated
        else ((gelu, gelu_reference) if gelus else (relu, relu_reference))
    )
    needs.append(_own(pair[0].__name__, matmul, *pair, [(rows, hidden_width(model))] * (2 if gated else 1)))
    heads, groups, size = model.heads, model.kv_heads or model.heads, head_size(model)
    if is_rotated(model) and rotary_size(model) == size:
        turned: Shapes = [(samples, count, context, size) for count in (heads, groups)]
        needs.append(
            _own("rope", matmul, partial(_turn, rope), partial(_turn, rope_reference), turned, MAX_CHECKED_TOKENS, axis=2)
        )
    needs += _attention_needs(config, samples, heads, groups, size, matmul)
    if config.task == "preference":
        needs.append(Need("linear_log_probabilities", matmul))
    elif config.task in DECODERS or config.task == "translation":
        words = config.tokenizer.vocabulary_size
        shapes: Shapes = [(rows, model.hidden_size), (words, model.hidden_size)]
        own = _own("linear_cross_entropy", matmul, _sum_loss_ours, _sum_loss_reference, shapes)
        checked: Shapes = [
            (min(rows, MAX_CHECKED_TOKENS), model.hidden_size),
            (min(words, MAX_CHECKED_WORDS), model.hidden_size),
        ]
        assert own.checked is not None
        needs.append(own._replace(checked=(*own.checked[:3], checked)))
    if config.task == "classification" and config.tokenizer.kind == "bytes":
        needs.append(Need("byte_pack", torch.uint8))
    if config.scaling.context > 1:
        needs.append(Need("attention_context", matmul))
    if config.scaling.tensor > 1:
        needs.append(Need("linear_cross_entropy_sharded", matmul))
    return needs


def _own(
    operation: str,
    dtype: torch.dtype,
    ours: Function,
    reference: Function,
    shapes: Shapes,
    most: int = MAX_CHECKED_ROWS,
    *,
    axis: int = 0,
    rules: str = "",
) -> Need:
    """Returns a need with the run's shapes; the checked call has at most `most` entries along `axis` of matrices."""
    checked = [(*shape[:axis], min(shape[axis], most), *shape[axis + 1 :]) if len(shape) > 1 else shape for shape in shapes]
    checked = [(1, *shape[1:]) if axis else shape for shape in checked]
    return Need(operation, dtype, (f"{operation}{rules}", ours, reference, checked), shapes)


def _norm_needs(is_rms: bool, rows: int, width: int, dtype: torch.dtype) -> list[Need]:
    matrix, row = (rows, width), (width,)
    plain, added = ("rms_norm", "add_rms_norm") if is_rms else ("layer_norm", "add_layer_norm")
    alone = (rms_norm, rms_norm_reference) if is_rms else (layer_norm, layer_norm_reference)
    with_sum = (add_rms_norm, add_rms_norm_reference) if is_rms else (add_layer_norm, add_layer_norm_reference)
    weights = [row] if is_rms else [row, row]
    joined = partial(_concat, with_sum[0]), partial(_concat, with_sum[1])
    return [
        _own(plain, dtype, *alone, [matrix, *weights]),
        _own(added, dtype, *joined, [matrix, matrix, *weights]),
    ]


def _attention_needs(config: Config, samples: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> list[Need]:
    causal, softcap, context = config.task != "classification", config.model.softcap, config.model.context
    rules = (" causal" if causal else "") + (f" cap {softcap:g}" if softcap else "")
    if config.train.packing == "none":
        shapes: Shapes = [(samples, count, context, size) for count in (heads, groups, groups)]
        ours, reference = (
            partial(function, causal=causal, softcap=softcap) for function in (attention, attention_reference)
        )
        return [_own("attention", dtype, ours, reference, shapes, MAX_CHECKED_TOKENS, axis=2, rules=rules)]
    shapes = [(samples * context, count, size) for count in (heads, groups, groups)]
    ours, reference = (
        partial(_attend_packed, function, causal, softcap, min(context, MAX_CHECKED_TOKENS))
        for function in (attention_packed, attention_packed_reference)
    )
    packed = _own("attention_packed", dtype, ours, reference, shapes, MAX_CHECKED_TOKENS, rules=rules)
    return [packed, Need("attention", dtype)]  # validation and text are not packed


def _concat(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat(function(*tensors), -1)


def _turn(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.cat(function(q, k, *_angles(q.shape[2], q.shape[3], q.device)), 1)


@cache
def _angles(tokens: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(tokens, dtype=torch.float32, device=device)[:, None]
    angles = positions / 10000 ** (torch.arange(0, size, 2, device=device) / size)
    return angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)


def _attend_packed(
    function: Callable[..., torch.Tensor],
    causal: bool,
    softcap: float,
    length: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    offsets = torch.tensor([*range(0, len(q), length), len(q)], dtype=torch.int32, device=q.device)
    return function(q, k, v, offsets, offsets, causal=causal, softcap=softcap)


def _sum_loss_ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, _targets(x, weight))[0]


def _sum_loss_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy_reference(x, weight, _targets(x, weight))[0]


def _targets(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device) * 7919 % len(weight)


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
        _synchronize(device)
        began = clock()
        for _ in range(count):
            y = function(*leaves)
            if y.requires_grad:
                torch.autograd.grad(y, leaves, torch.ones_like(y))
        _synchronize(device)
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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
