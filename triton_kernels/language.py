"""Triton's language for the kernels of this package, or a stand-in if it is not installed (macOS, Windows) or of no use.

Kernels are defined at module level, so the stand-in lets every module be imported; launching a kernel then raises an error.
A PyTorch for CPUs launches no kernel, so it has the stand-in, which saves each process 72 MiB and 0.1 s; TRITON_INTERPRET in
the environment, 0 or 1, has Triton imported (0 for compilation ahead of time).
With TRITON_INTERPRET=1 in the environment before the first import, kernels run in Triton's interpreter on the CPU, with a
fix of its bfloat16 (see `raystride.triton_kernels.interpreter`).

    from raystride.triton_kernels.language import jit, tl

    @jit
    def _copy_kernel(x, y, n, BLOCK: tl.constexpr): ...
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from raystride.triton_kernels import interpreting

INTERPRETING = interpreting()
"""Whether kernels run in Triton's interpreter; read once, like Triton does."""

tl: Any
jit: Callable[[Any], Any]
HAS_TRITON: bool
"""Whether kernels are Triton's."""

try:
    if not (torch.version.cuda or torch.version.hip or "TRITON_INTERPRET" in os.environ or "triton" in sys.modules):
        raise ImportError("a PyTorch for CPUs launches no kernel")
    import triton
    import triton.language
except ImportError:

    class _Language:
        """The part of triton.language that annotations of kernels need."""

        constexpr = int

    def _no_kernel(function: Any) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"kernel {function.__name__} needs Triton and a GPU; set --model.kernels torch")

        return refuse

    tl, jit, HAS_TRITON = _Language(), _no_kernel, False
else:
    tl, jit, HAS_TRITON = triton.language, triton.jit, True
    if INTERPRETING:
        from raystride.triton_kernels.interpreter import patch_interpreter

        patch_interpreter()


def jit_varying(*numbers: str) -> Callable[[Any], Any]:
    """Returns `jit` without specialization of the named arguments, which vary in a training: lengths and derived counts.

    Triton compiles a separate variant for an argument that is 1, and for a multiple of 16; varying lengths would trigger
    compilations in the middle of a training, for seconds each, while the other ranks wait. Not for the length of a
    thread's vector loads, for which a multiple of 16 allows loads of 16 bytes.
    """

    def decorate(function: Any) -> Any:
        return triton.jit(function, do_not_specialize=numbers) if HAS_TRITON else jit(function)

    return decorate


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number`; lengths of Triton's blocks."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """Returns number / divisor, rounded up."""
    return -(-number // divisor)
