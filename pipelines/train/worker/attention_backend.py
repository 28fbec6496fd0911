"""Chooses the backend of a run's plain attention calls on a GPU: our kernel, or PyTorch's (cuDNN, FlashAttention).

    bits |= choose_attention(config, chosen_before, device=device, rank=rank, world=world, log=log)
    # {"attention": "library", "gpu": "NVIDIA H100 80GB HBM3", "attention_gain": 1.31}; {} if there is no choice

Plain calls are causal and full attention over whole batches or packed documents, without windows, lengths, caps or dropout;
others use our kernel, which also gives the same bits each time. If `model.attention` is `auto`, the first worker times both
on the run's own shape when the run begins, and decides for all; a run resumed on the same GPU keeps the choice. Where
`model.kernels auto` does not take our kernel (`kernel_choice`), every call is PyTorch's and there is nothing to choose.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from raystride.model.shape import head_size
from raystride.pipelines.config import ModelConfig, TrainConfig
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.attention_packed import attention_packed, packed_library_reason
from raystride.triton_kernels.configurations import architecture_family, uncovered_reason
from raystride.triton_kernels.dispatch import is_chosen, use_library
from raystride.triton_kernels.launch import architecture

TIMED_FAMILIES = ("sm_90", "sm_100")
"""GPU families with library kernels that may be faster; `auto` is `triton` on others."""
MAX_TIME_RATIO = 0.97
"""The library is chosen if it takes at most this share of our kernel's time."""
ROUNDS = 5
MAX_ROWS = 1 << 14
"""Maximum number of tokens of a timed batch: larger batches take longer and give the same result."""
_IMPLEMENTATIONS = {"sm_90": "FA3", "sm_100": "FA4"}
"""Implementation behind PyTorch's attention if its package is installed; FlashAttention-2 otherwise."""


def choose_attention(
    model: ModelConfig,
    train: TrainConfig,
    chosen_before: Mapping[str, Any] | None,
    *,
    device: torch.device,
    rank: int,
    world: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Sets the backend of plain attention calls in this process; returns the entries of a checkpoint's `bits`. Collective.

    Call it after `choose_kernels`. `train.precision` is resolved; `chosen_before` has the `bits` of the run's
    checkpoint, or of the run that it repeats. On CPUs, and on GPUs without kernels, there is no choice.
    """
    use_library(False)
    if device.type != "cuda" or uncovered_reason(architecture(device)):
        return {}
    gpu_family, gpu = architecture_family(architecture(device)), torch.cuda.get_device_name(device)
    if model.attention != "triton":
        activate_flash_attention(gpu_family, log)
    if model.attention != "triton" and train.deterministic:
        log("PyTorch's attention without cuDNN, which train.deterministic leaves out")
    packed = train.packing != "none"
    dtype = torch.float16 if train.precision == "fp16" else torch.bfloat16
    if reason_for_own_kernel(model, train, gpu_family) or not is_chosen(
        "attention_packed" if packed else "attention", dtype
    ):
        return {}
    if packed and (reason := packed_library_reason(device)):
        log(f"packed attention by our kernel: {reason}")
        return {}
    chosen: list[Any] = [None]
    if model.attention == "library":
        chosen = [{"attention": "library"}]
    elif rank == 0:
        chosen = [previous_choice(chosen_before or {}, gpu) or choose_faster(time_attention(model, train, device))]
    if world > 1:
        dist.broadcast_object_list(chosen, src=0, device=torch.device("cpu"))
    bits: dict[str, Any] = chosen[0] | {"gpu": gpu}
    use_library(bits["attention"] == "library")
    gain = f", {bits['attention_gain']:.2f} times as fast as the other" if "attention_gain" in bits else ""
    log(f"plain attention by {'PyTorch' if bits['attention'] == 'library' else 'our kernel'}{gain}")
    return bits


def reason_for_own_kernel(model: ModelConfig, train: TrainConfig, gpu_family: str) -> str:
    """Returns why a run must use our attention kernel, whatever is faster; "" if there is a choice."""
    if model.attention == "triton" or model.kernels == "torch":
        return "the settings say so"
    if train.exact:
        return "exact bits"
    windows = model.window and not model.window_layers
    if model.dropout or model.softcap or windows:
        return "no call is plain"
    if model.attention == "auto" and (
        train.precision not in ("bf16", "pure_bf16", "fp16") or gpu_family not in TIMED_FAMILIES
    ):
        return "no library is faster here"
    return ""


def previous_choice(before: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    """Returns a run's previous choice if it was made on the same GPU model; else an empty dictionary."""
    same = before.get("gpu") == gpu and "attention" in before
    return {name: before[name] for name in ("attention", "attention_gain") if name in before} if same else {}


def choose_faster(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Returns the faster backend, the library only if it gains something, and its speed-up over the other."""
    own_seconds, library_seconds = seconds["triton"], seconds["library"]
    chosen = "library" if library_seconds <= MAX_TIME_RATIO * own_seconds else "triton"
    gain = own_seconds / library_seconds if chosen == "library" else library_seconds / own_seconds
    return {"attention": chosen, "attention_gain": round(gain, 3)}


def time_attention(
    model: ModelConfig, train: TrainConfig, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Returns the seconds of forward and backward of each backend on the run's batch shape, the best of alternating
    rounds; packed documents are as long as the context. A library that refuses a call takes infinitely long."""
    # Ones: random draws here would shift the training's random numbers, on the first worker only.
    rows = max(1, min(train.slot_samples, MAX_ROWS // model.context))
    dtype = torch.float16 if train.precision == "fp16" else torch.bfloat16
    shapes = [
        (rows, model.context, heads, head_size(model)) for heads in (model.heads, *[model.kv_heads or model.heads] * 2)
    ]
    q, k, v = (torch.ones(s, dtype=dtype, device=device).requires_grad_() for s in shapes)
    grad = torch.ones(shapes[0], dtype=dtype, device=device)
    offsets = torch.arange(0, rows + 1, dtype=torch.int32, device=device) * model.context

    def attend() -> torch.Tensor:
        if train.packing == "none":
            return attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
        tokens = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return attention_packed(*tokens, offsets, offsets, causal=True, longest=model.context).view_as(grad)

    seconds = dict.fromkeys(("triton", "library"), float("inf"))
    for turn in range(ROUNDS + 2):
        for name in seconds:
            use_library(name == "library")
            wait_for_device(device)
            began = clock()
            try:
                torch.autograd.grad(attend(), (q, k, v), grad)
            except RuntimeError:
                if name == "triton":
                    raise
                continue
            wait_for_device(device)
            if turn > 1:  # the first rounds compile and allocate memory
                seconds[name] = min(seconds[name], clock() - began)
    use_library(False)
    return seconds


def activate_flash_attention(gpu_family: str, log: Callable[[str], None]) -> None:
    """Makes PyTorch's attention use FlashAttention-3 or 4 if it is installed."""
    try:
        from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls
    except ImportError:  # an older PyTorch
        return
    if (name := _IMPLEMENTATIONS.get(gpu_family)) not in list_flash_attention_impls():
        return
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError):  # its package is missing or of another version
        return
    log(f"PyTorch's attention has {name}")


def wait_for_device(device: torch.device) -> None:
    """Waits for the work that a GPU has been given; on a CPU there is none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
