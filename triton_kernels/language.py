"""Triton's language for the kernels of this package, or a stand-in where Triton is not installed (macOS, Windows).

Kernels are written at module level, so a stand-in lets every module import everywhere; launching one then says what is
missing. With TRITON_INTERPRET=1 in the environment before the first import, kernels run in Triton's interpreter on the CPU,
whose bfloat16 is put right here (see `raystride.triton_kernels.interpreter`).

    from raystride.triton_kernels.language import jit, tl

    @jit
    def _copy_kernel(x, y, n, BLOCK: tl.constexpr): ...
"""

from collections.abc import Callable
from typing import Any

from raystride.triton_kernels import interpreting

INTERPRETING = interpreting()
"""Whether kernels run in Triton's interpreter; read once, as Triton reads it."""

tl: Any
jit: Callable[[Any], Any]
HAS_TRITON: bool
"""Whether Triton can be imported here."""

try:
    import triton
    import triton.language
except ImportError:

    class _Language:
        """Enough of triton.language for the annotations of kernels."""

        constexpr = int

    def _no_kernel(function: Any) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"kernel {function.__name__} needs Triton, which is not installed; set --model.kernels torch")

        return refuse

    tl, jit, HAS_TRITON = _Language(), _no_kernel, False
else:
    tl, jit, HAS_TRITON = triton.language, triton.jit, True
    if INTERPRETING:
        from raystride.triton_kernels.interpreter import install

        install()


def jit_varying(*numbers: str) -> Callable[[Any], Any]:
    """`jit` for a kernel whose arguments of these names vary within a training: lengths, and counts that follow from them.

    Triton compiles a variant of its own for an argument that is 1, and for one that is a multiple of 16; lengths that vary
    would have it compile in the middle of a training, for seconds each, while the other ranks wait. Not for the length of
    what a thread loads side by side, whose multiple of 16 is what lets it load 16 bytes at once.
    """

    def decorate(function: Any) -> Any:
        return triton.jit(function, do_not_specialize=numbers) if HAS_TRITON else jit(function)

    return decorate


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`; Triton's blocks have such lengths."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)
