"""The single entry point of kernel launches, so that launches can also be recorded or checked.

`benchmarks.kernel_tools.compile_report` replaces the launcher to record the kernels of an operation, with types and
constants, and compiles exactly those for other architectures. The tests replace it to put guard bands around every tensor.

    launch(_gelu_forward_kernel, (cdiv(n, 1024),), x, y, n, BLOCK=1024, num_warps=4)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from raystride.triton_kernels.language import INTERPRETING

Grid = tuple[int, ...]
Launcher = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
"""A function of a kernel, its grid, its positional arguments, and its named ones (constants, num_warps, num_stages)."""


def launch(kernel: Any, grid: Grid, *arguments: Any, **named: Any) -> None:
    """Runs a kernel over a grid; an empty grid launches nothing."""
    global _launches
    if all(grid):
        _launches += 1
        _launcher(kernel, grid, arguments, named)


def num_launches() -> int:
    """Returns how many kernels this process has launched."""
    return _launches


def flatten(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yields arguments, and the fields of those that are tuples."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from flatten(argument)
        else:
            yield argument


def _launch_on_device(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    device = next((a.device for a in flatten(arguments) if isinstance(a, torch.Tensor)), None)
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **named)
    else:
        # Triton launches on the current device, whatever its arguments are on.
        with torch.cuda.device(device):
            kernel[grid](*arguments, **named)


_launcher: Launcher = _launch_on_device
_launches = 0


@contextmanager
def use_launcher(replacement: Launcher) -> Iterator[Launcher]:
    """Launches through `replacement` inside the block; yields the replaced launcher."""
    global _launcher
    before, _launcher = _launcher, replacement
    try:
        yield before
    finally:
        _launcher = before


_assumed: str | None = None


@contextmanager
def assumed_architecture(name: str) -> Iterator[None]:
    """Selects configurations as on this architecture inside the block."""
    global _assumed
    before, _assumed = _assumed, name
    try:
        yield
    finally:
        _assumed = before


def architecture(device: torch.device) -> str:
    """Returns the architecture of the configurations: `sm_80`, `sm_90`, `sm_100`, `gfx942`, ...; `sm_90` for a CPU."""
    if _assumed:
        return _assumed
    return _architecture_of(device.index or 0) if device.type == "cuda" else "sm_90"


@cache
def _architecture_of(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def can_launch(device: torch.device) -> bool:
    """Returns whether kernels run on this device: a GPU, or any device in the interpreter or with a replaced launcher."""
    return device.type == "cuda" or INTERPRETING or _launcher is not _launch_on_device
