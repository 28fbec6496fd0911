"""Which implementation of an operation runs: the Triton kernel or the PyTorch reference.

`auto` takes Triton on NVIDIA and AMD GPUs and the reference elsewhere. A call that the kernel cannot take goes to the
reference, and the first such call of an operation says so and names the reason. Plain attention may go to PyTorch's own
libraries instead (`use_library`). `kernels_ran` tells what ran, for the run's record.

    use_kernels("triton")
    if takes_triton("gelu", x, refusal=unsupported(x)): ...
"""

import warnings
from collections.abc import Container

import torch

from raystride.triton_kernels.language import HAS_TRITON
from raystride.triton_kernels.launch import can_launch

CHOICES = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What most kernels compute on."""

_choice = "auto"
_library = False
_ran: dict[str, str] = {}


def use_kernels(choice: str) -> None:
    """Sets the choice for this process: `auto`, `triton` or `torch`.

    Raises:
        ValueError: another word, or `triton` where Triton cannot run.
    """
    global _choice
    if choice not in CHOICES:
        raise ValueError(f"kernels: {choice!r} is none of {', '.join(CHOICES)}")
    if choice == "triton" and (reason := why_no_triton()):
        raise ValueError(f"model.kernels triton: {reason}; use auto or torch")
    _choice = choice
    _ran.clear()


def use_library(chosen: bool) -> None:
    """Whether operations that PyTorch computes by a library of its own go there in this process, where kernels would run."""
    global _library
    _library = chosen


def takes_library(operation: str, tensor: torch.Tensor) -> bool:
    """Whether a call that a library can take goes there: where that was chosen, and the kernel would run otherwise."""
    if not (_library and _wants_triton(tensor) and tensor.dtype in (torch.float16, torch.bfloat16)):
        return False
    _note(operation, "library")
    return True


def why_no_triton() -> str:
    """Why Triton kernels cannot run in this process; empty where they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not torch.cuda.is_available() and not can_launch(torch.device("cpu")):
        return "no GPU is to be seen, and TRITON_INTERPRET=1, which would run kernels on the CPU, is not set"
    return ""


def kernels_ran() -> dict[str, str]:
    """By operation: `triton`, `library`, `torch`, or `torch: why the kernel was refused`."""
    return dict(_ran)


def takes_triton(
    operation: str, tensor: torch.Tensor, refusal: str = "", *, dtypes: Container[torch.dtype] = DTYPES
) -> bool:
    """Whether a call on this tensor goes to the Triton kernel. `refusal`: why the kernel cannot take the call, or empty.

    Under `auto` the interpreter does not count as a device: it is for proofs, a thousand times slower than PyTorch.
    """
    wanted = _wants_triton(tensor)
    if wanted and not refusal and tensor.dtype not in dtypes:
        refusal = f"dtype {tensor.dtype}"
    if not wanted or refusal:
        _note(operation, f"torch: {refusal}" if wanted else "torch")
        return False
    _note(operation, "triton")
    return True


def _wants_triton(tensor: torch.Tensor) -> bool:
    wanted = _choice == "triton" or (_choice == "auto" and tensor.device.type == "cuda")
    return wanted and HAS_TRITON and can_launch(tensor.device)


def _note(operation: str, what: str) -> None:
    if _ran.get(operation) == what:
        return
    first_refusal = ":" in what and ":" not in _ran.get(operation, "")
    _ran[operation] = what
    if first_refusal:
        warnings.warn(f"{operation} runs in PyTorch, not in Triton: {what.removeprefix('torch: ')}", stacklevel=3)


# torch.compile runs this while it traces and takes the result as a constant. The decorator of that name in torch.compiler
# sets the same mark, but imports the compiler for it, which takes a second of every start.
_note._dynamo_marked_constant = True  # type: ignore[attr-defined]
