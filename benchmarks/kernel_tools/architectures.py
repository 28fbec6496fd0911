"""GPU architectures that the kernels are compiled for, and the occupancy of a kernel on them.

Facts are from NVIDIA's CUDA C++ Programming Guide ("Compute Capabilities") and AMD's CDNA 3 ISA guide (2024).

    occupancy(ARCHITECTURES["sm_90"], registers=128, shared=98_304, warps=8)       # 0.25
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A streaming multiprocessor (NVIDIA) or a compute unit (AMD)."""

    name: str
    """Name in Triton and the compilers."""
    backend: str
    """`cuda` or `hip`."""
    warp_size: int
    """Threads a warp (AMD: wavefront)."""
    max_warps: int
    """Warps that can be resident."""
    registers: int
    """32-bit registers."""
    register_unit: int
    """Allocation granularity of a warp's registers."""
    max_registers: int
    """Registers that a thread can have."""
    shared: int
    """Bytes of shared memory (AMD: LDS)."""
    max_block_shared: int
    """Bytes of shared memory that one block can have."""
    matrix_instruction: str
    """Instruction of its tensor cores in assembly."""

    @property
    def capability(self) -> int | str:
        """Name of the architecture in Triton's compilation target: 90, or gfx942."""
        return int(self.name.removeprefix("sm_")) if self.backend == "cuda" else self.name


_KIB = 1024
_LIST = [
    Architecture("sm_80", "cuda", 32, 64, 65536, 256, 255, 164 * _KIB, 163 * _KIB, "mma.sync"),
    Architecture("sm_86", "cuda", 32, 48, 65536, 256, 255, 100 * _KIB, 99 * _KIB, "mma.sync"),
    Architecture("sm_90", "cuda", 32, 64, 65536, 256, 255, 228 * _KIB, 227 * _KIB, "wgmma.mma_async"),
    Architecture("sm_100", "cuda", 32, 64, 65536, 256, 255, 228 * _KIB, 227 * _KIB, "tcgen05.mma"),
    Architecture("gfx942", "hip", 64, 32, 4 * 512 * 64, 512, 512, 64 * _KIB, 64 * _KIB, "v_mfma"),
]
ARCHITECTURES = {architecture.name: architecture for architecture in _LIST}
"""Architectures of the compile report: A100, RTX 30, H100 and H200, B200, MI300."""

_BLOCK_OVERHEAD = 1024
"""Bytes of shared memory that CUDA takes for itself in every block."""


def occupancy(architecture: Architecture, *, registers: int, shared: int, warps: int) -> float:
    """Returns resident over possible warps, 0 to 1, from registers a thread, shared memory bytes and warps a block.

    0 if no block fits.
    """
    per_warp = -(-max(registers, 1) * architecture.warp_size // architecture.register_unit) * architecture.register_unit
    overhead = _BLOCK_OVERHEAD if architecture.backend == "cuda" else 0
    if shared > architecture.max_block_shared or registers > architecture.max_registers:
        return 0.0
    by_registers = architecture.registers // (per_warp * warps)
    by_shared = architecture.shared // max(shared + overhead, 1)
    blocks = min(by_registers, by_shared, architecture.max_warps // warps)
    return blocks * warps / architecture.max_warps
