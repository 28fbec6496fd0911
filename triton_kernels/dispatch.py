"""Dispatch of an operation to its Triton kernel or its PyTorch reference.

`auto` selects Triton for the operations and dtypes that are proved on this GPU (`pipelines.train.worker.kernel_proof`), and
the reference for all others; `triton` takes kernels unproved. Calls that the kernel does not support, and all under
forward-mode AD or a transform of `torch.func`, use the reference; the first one of an operation warns with the reason. Plain
attention may use PyTorch's own libraries instead (`use_library`). `kernels_ran` returns the implementations that ran, for
the run's record; inside `only_kernels` a call that would not run a kernel raises NotRun.

    use_kernels("auto", {("gelu", torch.bfloat16)})
    if takes_triton("gelu", x, refusal=unsupported(x)): ...
"""

import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from raystride.triton_kernels.configurations import uncovered_reason
from raystride.triton_kernels.language import HAS_TRITON
from raystride.triton_kernels.launch import architecture, can_launch

CHOICES = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that most kernels support."""

Proved = Container[tuple[str, torch.dtype]]
"""Operations and dtypes whose kernels `auto` takes."""


class _Everything:
    def __contains__(self, proved: object) -> bool:
        return True


EVERYTHING = _Everything()
"""All operations: of runs that began before kernels were proved."""


class NotRun(RuntimeError):
    """A call that was to run a kernel would not have; the text is the reason."""


class NoCompiler(NotRun):
    """No kernel can be compiled here, so that no further call would tell anything."""

    SIGNS = ("Failed to find C compiler", "Python.h", "libcuda.so cannot", "CalledProcessError")
    """In an error's text: Triton cannot build its launcher."""

    @classmethod
    def raise_for(cls, problem: str) -> None:
        """Raises this error if a problem's text has a sign of it."""
        if any(sign in problem for sign in cls.SIGNS):
            remedy = "install a C compiler and Python's headers, or set TRITON_LIBCUDA_PATH to libcuda's folder"
            raise cls(f"Triton cannot build its launcher: {problem}; {remedy}")


_choice = "auto"
_proved: Proved = frozenset()
_library = False
_only_kernels = False
_ran: dict[str, str] = {}


def use_kernels(choice: str, proved: Proved = frozenset()) -> None:
    """Sets the choice for this process: `auto`, which takes what is `proved`, `triton` or `torch`.

    Raises:
        ValueError: an unknown choice, or `triton` if Triton cannot run.
    """
    global _choice, _proved
    if choice not in CHOICES:
        raise ValueError(f"kernels: {choice!r} is none of {', '.join(CHOICES)}")
    if choice == "triton" and (reason := triton_unavailable_reason()):
        raise ValueError(f"model.kernels triton: {reason}; use auto or torch")
    _choice, _proved = choice, proved
    _ran.clear()


@contextmanager
def only_kernels() -> Iterator[None]:
    """Takes kernels, proved or not, inside the block; a call that would run anything else raises NotRun."""
    global _choice, _library, _only_kernels
    before = _choice, _library, _only_kernels
    _choice, _library, _only_kernels = "triton", False, True
    try:
        yield
    finally:
        _choice, _library, _only_kernels = before


@contextmanager
def choice_kept() -> Iterator[None]:
    """Leaves the choice of kernels and library after the block as it was before it."""
    global _choice, _proved, _library
    before = _choice, _proved, _library
    try:
        yield
    finally:
        _choice, _proved, _library = before


def use_library(chosen: bool) -> None:
    """Sets whether operations with a library implementation in PyTorch use it in place of kernels, in this process."""
    global _library
    _library = chosen


def takes_library(operation: str, tensor: torch.Tensor) -> bool:
    """Returns whether a call goes to a library: if that was chosen in place of a kernel, or `auto` has no proof of one."""
    chosen = _library if _wants_triton(operation, tensor) else _choice == "auto" and _has_library(tensor.device)
    if not (chosen and tensor.dtype in (torch.float16, torch.bfloat16)) or active_transform():
        return False
    _record_choice(operation, "library")
    return True


def _has_library(device: torch.device) -> bool:
    """Returns whether PyTorch surely has FlashAttention there: on NVIDIA's GPUs from sm_80 on."""
    return device.type == "cuda" and not torch.version.hip and not _device_refusal(device)


def triton_unavailable_reason() -> str:
    """Returns the reason why Triton kernels cannot run in this process; empty if they can."""
    if not torch.cuda.is_available() and not can_launch(torch.device("cpu")):
        return "no GPU is to be seen, and TRITON_INTERPRET=1, which would run kernels on the CPU, is not set"
    if not HAS_TRITON:
        return "Triton is not installed"
    return _device_refusal(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else ""


def kernels_ran() -> dict[str, str]:
    """Returns for each operation `triton`, `library`, `torch`, or `torch: reason of the refusal`."""
    return dict(_ran)


def takes_triton(
    operation: str, tensor: torch.Tensor, refusal: str = "", *, dtypes: Container[torch.dtype] = DTYPES
) -> bool:
    """Returns whether a call on this tensor goes to the Triton kernel. `refusal`: the reason why it cannot, or empty."""
    wanted = _wants_triton(operation, tensor)
    if wanted:
        refusal = _device_refusal(tensor.device) or refusal or active_transform()
    if wanted and not refusal and tensor.dtype not in dtypes:
        refusal = f"dtype {tensor.dtype}"
    if not wanted or refusal:
        if _only_kernels:
            raise NotRun(f"{operation} runs in PyTorch: {refusal or 'no GPU, and no interpreter'}")
        _record_choice(operation, f"torch: {refusal}" if wanted else "torch")
        return False
    _record_choice(operation, "triton")
    return True


def is_chosen(operation: str, dtype: torch.dtype) -> bool:
    """Returns whether the choice of this process is to run the operation's kernel on tensors of this dtype."""
    return _choice == "triton" or (_choice == "auto" and (operation, dtype) in _proved)


def _wants_triton(operation: str, tensor: torch.Tensor) -> bool:
    return is_chosen(operation, tensor.dtype) and HAS_TRITON and can_launch(tensor.device)


def _device_refusal(device: torch.device) -> str:
    return _gpu_refusal(device.index or 0) if device.type == "cuda" else ""


@cache
def _gpu_refusal(index: int) -> str:
    shared = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    return uncovered_reason(architecture(torch.device("cuda", index)), shared)


def active_transform() -> str:
    """Returns the name of an active transform of PyTorch's that only references support, as kernels have a backward pass
    alone; empty if there is none."""
    if forward_ad._current_level >= 0:
        return "forward-mode AD"
    return "a transform of torch.func" if _peek_transform() is not None else ""


# Private: without it, torch.func fails with PyTorch's own words.
_peek_transform: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


def _record_choice(operation: str, implementation: str) -> None:
    if _ran.get(operation) == implementation:
        return
    first_refusal = ":" in implementation and ":" not in _ran.get(operation, "")
    _ran[operation] = implementation
    if first_refusal:
        warnings.warn(f"{operation} runs in PyTorch, not in Triton: {implementation.removeprefix('torch: ')}", stacklevel=3)


# torch.compile runs these while it traces and takes the results as constants. The decorator of that name in torch.compiler
# sets the same mark, but imports the compiler for it, which takes a second of every start.
for _function in (_record_choice, _device_refusal, active_transform):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined,union-attr]
