"""Guard bands: canaries before and after every tensor of a kernel launch, and in its padding.

The interpreter does not notice a kernel that reads or writes past the end of a tensor. Here each launch works on copies that
lie between canaries, NaN for floats and 0x5A bytes for integers. A canary that has changed fails the test; one that was read
makes its way into the result as NaN, which the comparison with the reference shows. Every tensor has a NaN of its own bits:
one that was read from another's canaries and written over this one's is seen as well.

    with guarded(): y = gelu(x)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from raystride.triton_kernels.launch import Grid, use_launcher

BAND = 256
"""Elements before and after; a multiple of what tensor descriptors are aligned to."""
_NANS = {
    torch.float64: (torch.int64, 0x7FF8 << 48),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
}
"""By dtype, an integer of its size and the first of its quiet NaNs, whose low bits are free."""


class GuardBandError(AssertionError):
    """A kernel wrote outside its tensors."""


class _Guarded:
    """A copy of a tensor of the same shape and strides, between canaries."""

    def __init__(self, original: torch.Tensor, number: int) -> None:
        self.original = original
        extent = sum((size - 1) * stride for size, stride in zip(original.shape, original.stride(), strict=True)) + 1
        self.buffer = torch.empty(extent + 2 * BAND, dtype=original.dtype, device=original.device)
        if original.dtype in _NANS:
            bits, nan = _NANS[original.dtype]
            self.buffer.view(bits).fill_(nan + 1 + number)
        else:
            self.buffer.view(torch.uint8).fill_(0x5A if original.dtype != torch.bool else 1)
        self.view = self.buffer.as_strided(original.shape, original.stride(), BAND)
        _once(self.view).copy_(_once(original))
        covered = torch.zeros(self.buffer.shape, dtype=torch.bool, device=original.device)
        _once(covered.as_strided(original.shape, original.stride(), BAND)).fill_(True)
        self.canaries = ~covered
        self.before = self._bits()

    def _bits(self) -> torch.Tensor:
        return self.buffer[self.canaries].view(torch.uint8).clone()

    def restore(self, kernel: str, number: int) -> None:
        """Copies the result back; raises where a canary has changed."""
        if not torch.equal(self._bits(), self.before):
            raise GuardBandError(f"{kernel} wrote outside its tensor argument number {number}")
        _once(self.original).copy_(_once(self.view))


def _once(x: torch.Tensor) -> torch.Tensor:
    """x without the repetitions of a tensor that was expanded: each of its numbers once."""
    return x[tuple(slice(1) if step == 0 else slice(None) for step in x.stride())]


@contextmanager
def guarded() -> Iterator[list[str]]:
    """Guards all launches of the block; gives the list of the kernels that were launched."""
    launched: list[str] = []

    def launch(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        copies: dict[tuple[Any, ...], _Guarded] = {}

        def guard(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor) and argument.numel():
                # Arguments that are the same tensor must stay the same tensor: a kernel may work in place.
                key = (argument.data_ptr(), argument.shape, argument.stride(), argument.dtype)
                return copies.setdefault(key, _Guarded(argument, len(copies))).view
            if isinstance(argument, tuple):
                fields = map(guard, argument)
                return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
            if type(argument).__name__ == "TensorDescriptor":
                return replace(argument, base=guard(argument.base))
            return argument

        name = kernel.fn.__name__
        launched.append(name)
        real(kernel, grid, tuple(guard(argument) for argument in arguments), named)
        for number, copy in enumerate(copies.values()):
            copy.restore(name, number)

    with use_launcher(launch) as real:
        yield launched
