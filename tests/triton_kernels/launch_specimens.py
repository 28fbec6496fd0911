"""Launches specimens through Triton's own launcher on a stand-in driver; a program, since a process has one driver.

export TRITON_INTERPRET=0 TRITON_LIBCUDA_PATH=STUB LD_LIBRARY_PATH=STUB
python -m tests.triton_kernels.launch_specimens sm_90 "gelu*"
"""

import sys
from fnmatch import fnmatch

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime.driver import driver

from benchmarks.kernel_tools.specimens import list_specimens
from raystride.triton_kernels.dispatch import only_kernels
from raystride.triton_kernels.launch import assumed_architecture, num_launches, use_launcher


class StubDriver(CudaDriver):
    """NVIDIA's driver of Triton, without PyTorch's CUDA."""

    def __init__(self, architecture: str) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self._capability = int(architecture.removeprefix("sm_"))
        self.get_current_device = self.get_current_stream = lambda *_: 0
        self.set_current_device = lambda _: None
        self.get_device_capability = lambda *_: divmod(self._capability, 10)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def main(architecture: str, *patterns: str) -> None:
    """Runs the specimens whose names match, and prints how many kernels each has launched."""
    driver.set_active(StubDriver(architecture))
    with assumed_architecture(architecture), use_launcher(lambda kernel, grid, args, named: kernel[grid](*args, **named)):
        for specimen in list_specimens(torch.device("cpu")):
            name = f"{specimen.operation} {specimen.label}"
            if specimen.shipped and any(fnmatch(name, pattern) for pattern in patterns):
                before = num_launches()
                with only_kernels():
                    specimen.call()
                print(f"{name}: {num_launches() - before}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
