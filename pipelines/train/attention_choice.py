"""Whose attention computes a run's plain calls on a GPU: our kernel, or what PyTorch has for them (cuDNN, FlashAttention).

    bits |= choose_attention(config, device=device, found=found, rank=rank, world=world, log=log)
    # {"attention": "library", "gpu": "NVIDIA H100 80GB HBM3", "attention_gain": 1.31}; {} where there is nothing to choose

Plain are causal and full attention over whole batches, without windows, lengths, packed documents, caps or dropout; others
compute by our kernel, which also gives the same bits each time. Where `model.attention` is `auto`, the first worker times
both on the run's own shape when the run begins, and decides for all; a run resumed on the same GPU stays with it.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from raystride.model.shape import head_size
from raystride.pipelines.config import Config
from raystride.pipelines.train.checkpoint import Found
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.configurations import family
from raystride.triton_kernels.dispatch import use_library
from raystride.triton_kernels.launch import architecture

TIMED = ("sm_90", "sm_100")
"""Where the libraries have kernels that may be faster; elsewhere `auto` is `triton`."""
WORTHWHILE = 0.97
"""The library must take at most this share of our kernel's time."""
ROUNDS = 5
MOST_ROWS = 1 << 14
"""Tokens of a timed batch: more of them take longer, and say the same."""
_IMPLEMENTATIONS = {"sm_90": "FA3", "sm_100": "FA4"}
"""What stands behind PyTorch's attention where its package is installed, and FlashAttention-2 otherwise."""


def choose_attention(
    config: Config, *, device: torch.device, found: Found | None, rank: int, world: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Sets whose attention plain calls take in this process; what a checkpoint's `bits` say of it. All workers call it.

    `config.train.precision` is resolved. On CPUs there is nothing to choose.
    """
    use_library(False)
    if device.type != "cuda":
        return {}
    near, gpu = family(architecture(device)), torch.cuda.get_device_name(device)
    if config.model.attention != "triton":
        activate_flash_attention(near, log)
    if why_ours(config, near):
        return {}
    chosen: list[Any] = [None]
    if config.model.attention == "library":
        chosen = [{"attention": "library"}]
    elif rank == 0:
        before = found.manifest.get("bits", {}) if found else {}
        chosen = [kept(before, gpu) or decide(time_attention(config, device))]
    if world > 1:
        dist.broadcast_object_list(chosen, src=0, device=torch.device("cpu"))
    bits: dict[str, Any] = chosen[0] | {"gpu": gpu}
    use_library(bits["attention"] == "library")
    gain = f", {bits['attention_gain']:.2f} times as fast as the other" if "attention_gain" in bits else ""
    log(f"plain attention by {'PyTorch' if bits['attention'] == 'library' else 'our kernel'}{gain}")
    return bits


def why_ours(config: Config, near: str) -> str:
    """Why a run's plain attention computes by our kernel, whatever is faster; empty where there is a choice."""
    model, train = config.model, config.train
    if model.attention == "triton" or model.kernels == "torch":
        return "the settings say so"
    if train.exact:
        return "exact bits"
    windows = model.window and not model.window_layers
    if model.dropout or model.softcap or windows or train.packing != "none":
        return "no call is plain"
    if model.attention == "auto" and (train.precision not in ("bf16", "pure_bf16", "fp16") or near not in TIMED):
        return "no library is faster here"
    return ""


def kept(before: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    """What a run chose before, where that was on such a GPU; else empty."""
    same = before.get("gpu") == gpu and "attention" in before
    return {name: before[name] for name in ("attention", "attention_gain") if name in before} if same else {}


def decide(seconds: Mapping[str, float]) -> dict[str, Any]:
    """The faster one, the library only where it gains something, and how many times as fast as the other it is."""
    ours, theirs = seconds["triton"], seconds["library"]
    chosen = "library" if theirs <= WORTHWHILE * ours else "triton"
    gain = ours / theirs if chosen == "library" else theirs / ours
    return {"attention": chosen, "attention_gain": round(gain, 3)}


def time_attention(config: Config, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds of a forward and backward of each on batches as the run has them, the best of some that take turns."""
    model = config.model
    # Of ones: numbers drawn here would be missing from the training's own, on the first worker alone.
    rows = max(1, min(config.train.slot_samples, MOST_ROWS // model.context))
    dtype = torch.float16 if config.train.precision == "fp16" else torch.bfloat16
    shapes = [
        (rows, model.context, heads, head_size(model)) for heads in (model.heads, *[model.kv_heads or model.heads] * 2)
    ]
    q, k, v = (torch.ones(s, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for s in shapes)
    grad = torch.ones(shapes[0], dtype=dtype, device=device).transpose(1, 2)
    seconds = dict.fromkeys(("triton", "library"), float("inf"))
    for turn in range(ROUNDS + 2):
        for name in seconds:
            use_library(name == "library")
            _wait(device)
            began = clock()
            torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), grad)
            _wait(device)
            if turn > 1:  # the first ones compile, and ask for memory
                seconds[name] = min(seconds[name], clock() - began)
    use_library(False)
    return seconds


def activate_flash_attention(near: str, log: Callable[[str], None]) -> None:
    """Has PyTorch's attention use FlashAttention-3 or 4 where that is installed."""
    try:
        from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls
    except ImportError:  # an older PyTorch
        return
    if (name := _IMPLEMENTATIONS.get(near)) not in list_flash_attention_impls():
        return
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError):  # its package is not there, or is another version
        return
    log(f"PyTorch's attention has {name}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
