"""Compilation of kernels ahead of time for GPUs that need not be there: records the launches of operations, compiles them.

No GPU and no driver is needed: Triton contains the compilers. A recorder replaces the launcher and records the kernels that
operations launch, with types, alignments and constants; exactly those are compiled.

    launches = record_launches("sm_90", "attention")
    compile_launch(launches[0]).registers                     # of a thread
"""

import contextlib
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_tools.architectures import ARCHITECTURES, Architecture, occupancy
from benchmarks.kernel_tools.specimens import Specimen, list_specimens
from raystride.triton_kernels.configurations import TileCase, choosing_tiles
from raystride.triton_kernels.dispatch import NotRun, use_kernels
from raystride.triton_kernels.language import HAS_TRITON, INTERPRETING
from raystride.triton_kernels.launch import Grid, assumed_architecture, num_launches, use_launcher
from raystride.triton_kernels.processes import end_with_parent


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch recorded from an operation, and its purpose."""

    operation: str
    label: str
    architecture: str
    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    """Name and type of each argument, a tuple of types if it is a tuple; `constexpr` for constants."""
    constants: tuple[tuple[tuple[int, ...], str, Any], ...]
    """Path of indices, name, and value."""
    attributes: tuple[tuple[tuple[int, ...], str], ...]
    """Path and Triton's key of an alignment."""
    options: tuple[tuple[str, int], ...]
    """num_warps, num_stages."""
    shipped: bool
    """As in the specimen."""
    case: TileCase | None = None
    """The case of its tile; None of kernels without a table of tiles, and of alternatives."""

    @property
    def blocks(self) -> list[str]:
        """Names and values of the block sizes, as "BLOCK_M 128"."""
        return [f"{name.upper()} {value}" for _, name, value in self.constants if "BLOCK" in name.upper() and value]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for launches that share one compiled kernel."""
        return (self.architecture, self.kernel.fn.__name__, self.signature, self.constants, self.attributes, self.options)


SMALL_KERNELS = ("adamw_corrections", "mse_total", "sum_groups")
"""Kernels that add up what others have left, or have a few numbers a tensor."""


@dataclass(frozen=True)
class CompiledKernel:
    """A row of the report."""

    operation: str
    kernel: str
    label: str
    tile: str
    """Block sizes, warps and stages."""
    architecture: str
    registers: int
    """Registers of a thread; on AMD vector registers."""
    spilled: int
    """Bytes spilled by a thread."""
    shared: int
    """Bytes of shared memory."""
    occupancy: float
    """Estimated; 0 to 1."""
    matrix_instructions: int
    """Instructions for tensor cores."""
    other_matrix_instructions: int
    """Instructions of older architectures, which are slower: mma.sync on sm_90."""
    tma: int
    """Copies by the tensor memory accelerator."""
    load_bytes: int
    """Width of at least half of what is read from global memory: bytes of a thread's access; 0 if nothing is."""
    store_bytes: int
    """The same of what is written."""
    seconds: float
    fits: bool
    """Whether shared memory suffices."""
    multiplies: bool
    """Whether the kernel multiplies matrices at all."""
    shipped: bool
    """Whether it is shipped, or an alternative for tuning."""

    @property
    def streams(self) -> bool:
        """Whether it walks through arrays that are much larger than a block's shared memory, whose speed bounds its own."""
        return self.operation not in ("attention", "byte_pack") and self.kernel not in SMALL_KERNELS

    @property
    def shared_kib(self) -> int:
        """KiB of shared memory, rounded up."""
        return -(-self.shared // 1024)


def record_launches(architecture: str, operation: str | None = None, only_shipped: bool = False) -> list[RecordedLaunch]:
    """Returns every launch of the specimens on an architecture, each compiled kernel once."""
    return record_specimens(
        architecture,
        lambda specimen: operation in (None, specimen.operation) and (specimen.shipped or not only_shipped),
    )


def record_specimens(architecture: str, selects: Callable[[Specimen], bool]) -> list[RecordedLaunch]:
    """Returns the launches of the selected specimens on an architecture, each compiled kernel once.

    Raises RuntimeError if the kernels were imported without Triton or for its interpreter, and NotRun for a specimen that
    launches none.
    """
    if not HAS_TRITON or INTERPRETING:
        raise RuntimeError("kernels are compiled if TRITON_INTERPRET=0 is in the environment before they are imported")
    found: dict[tuple[Any, ...], RecordedLaunch] = {}
    current: list[Specimen] = []
    cases: dict[str, TileCase] = {}

    def record_launch(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        recorded = _describe_launch(kernel, arguments, named, current[-1], architecture)
        recorded = replace(recorded, case=cases.get(short_name(kernel)))
        found.setdefault(recorded.identity, recorded)

    def note_case(case: TileCase) -> None:
        cases[case.kernel] = case

    with use_launcher(record_launch), assumed_architecture(architecture), choosing_tiles(note_case):
        use_kernels("triton")
        for specimen in filter(selects, list_specimens(torch.device("cpu"))):
            current.append(specimen)
            cases.clear()
            before = num_launches()
            specimen.call()
            if num_launches() == before:
                raise NotRun(f"{specimen.operation}, {specimen.label} on {architecture}: it launched no kernel")
        use_kernels("auto")
    return list(found.values())


def short_name(kernel: Any) -> str:
    """Returns a kernel's name as in reports, such as "attention_forward"."""
    return str(kernel.fn.__name__).strip("_").removesuffix("_kernel")


def _describe_launch(
    kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any], specimen: Specimen, architecture: str
) -> RecordedLaunch:
    """Describes a launch for the compiler: Triton's own rules give types and alignments, and make 1 and None constants."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(_gpu_target(ARCHITECTURES[architecture]))
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | {k: v for k, v in named.items() if k in kernel.arg_names}
    signature: list[tuple[str, Any]] = []
    constants: list[tuple[tuple[int, ...], str, Any]] = []
    attributes: list[tuple[tuple[int, ...], str]] = []

    def describe(path: tuple[int, ...], name: str, value: Any, kind: Any, key: Any) -> None:
        if isinstance(kind, tuple):
            names = getattr(value, "_fields", [name] * len(kind))
            for number, parts in enumerate(zip(names, value, kind, key, strict=True)):
                describe((*path, number), *parts)
        elif kind == "constexpr":
            constants.append((path, name, getattr(value, "value", value)))
        elif key:
            attributes.append((path, key))

    for number, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        one, aligned = not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
        kind, key = (
            ("constexpr", None) if parameter.is_constexpr else native_specialize_impl(backend, value, False, one, aligned)
        )
        signature.append((parameter.name, kind))
        describe((number,), parameter.name, value, kind, key)
    options = tuple(sorted((k, v) for k, v in named.items() if k not in kernel.arg_names))
    return RecordedLaunch(
        operation=specimen.operation,
        label=specimen.label,
        architecture=architecture,
        kernel=kernel,
        signature=tuple(signature),
        constants=tuple(constants),
        attributes=tuple(attributes),
        options=options,
        shipped=specimen.shipped,
    )


def compile_launch(recorded: RecordedLaunch, kept: Path | None = None) -> CompiledKernel:
    """Compiles one kernel and reads its resource usage.

    `kept` is a folder of earlier results, by kernels and compiler, to which new ones are added.
    """
    if kept is None:
        return _compile(recorded)
    import triton

    causes = (triton.__version__, recorded.kernel.cache_key, recorded.identity, recorded.label, recorded.shipped)
    path = kept / f"{hashlib.sha256(repr(causes).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        return CompiledKernel(**json.loads(path.read_bytes()))
    row = _compile(recorded)
    kept.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(row)))
    return row


def _compile(recorded: RecordedLaunch) -> CompiledKernel:
    import triton
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    architecture = ARCHITECTURES[recorded.architecture]
    target = _gpu_target(architecture)
    parse = make_backend(target).parse_attr
    source = ASTSource(
        recorded.kernel,
        dict(recorded.signature),
        constexprs={path: value for path, _, value in recorded.constants},
        attrs={path: parse(key) for path, key in recorded.attributes},
    )
    triton.knobs.compilation.always_compile = True  # a cached kernel would come without the assembler's log
    triton.knobs.nvidia.dump_ptxas_log = True
    log, started = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(log):
        kernel = triton.compile(source, target=target, options=dict(recorded.options))
    row = _read_compiled(kernel, log.getvalue(), architecture, recorded)
    return replace(row, seconds=time.perf_counter() - started)


def _gpu_target(architecture: Architecture) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(architecture.backend, architecture.capability, architecture.warp_size)


def _read_compiled(kernel: Any, log: str, architecture: Architecture, recorded: RecordedLaunch) -> CompiledKernel:
    assembly = kernel.asm["ptx" if architecture.backend == "cuda" else "amdgcn"]
    if architecture.backend == "cuda":
        registers = int(re.findall(r"Used (\d+) registers", log)[-1])
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    else:
        registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", assembly)[-1])
        spilled = 4 * int(re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)[-1])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    instructions = {
        a.matrix_instruction: len(re.findall(rf"\b{re.escape(a.matrix_instruction)}", assembly))
        for a in ARCHITECTURES.values()
    }
    own = instructions.pop(architecture.matrix_instruction)
    blocks = [block.removeprefix("BLOCK_").lower() for block in recorded.blocks]
    bound = [f"{value} registers at most" for name, value in recorded.options if name == "maxnreg"]
    bound += ["persistent" for _, name, value in recorded.constants if name == "persistent" and value]
    return CompiledKernel(
        operation=recorded.operation,
        kernel=short_name(recorded.kernel),
        label=recorded.label,
        tile=", ".join([*blocks, f"{warps} warps", f"{kernel.metadata.num_stages} stages", *bound]),
        architecture=architecture.name,
        registers=registers,
        spilled=spilled,
        shared=shared,
        occupancy=occupancy(architecture, registers=registers, shared=shared, warps=warps),
        matrix_instructions=own,
        other_matrix_instructions=sum(instructions.values()),
        tma=len(re.findall(r"cp\.async\.bulk\.tensor", assembly)),
        load_bytes=half_width(read_widths(assembly, kernel.asm["ttir"], "load")),
        store_bytes=half_width(read_widths(assembly, kernel.asm["ttir"], "store")),
        seconds=0.0,
        fits=shared <= architecture.max_block_shared,
        multiplies="tt.dot" in kernel.asm["ttir"],
        shipped=recorded.shipped,
    )


def read_widths(assembly: str, triton_ir: str, kind: str) -> list[int]:
    """Returns the bytes of each access of an array in global memory, a `load` or a `store`, in PTX or AMD's assembly.

    Accesses of single numbers, which `triton_ir` has, are left out.
    """
    name = {"load": "ld", "store": "st"}[kind]
    amd_bytes = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "short": 2, "dword": 4}
    widths = [
        int(count or 1) * int(size) // 8
        for count, size in re.findall(rf"\b{name}\.global(?:\.[A-Za-z_0-9:]+?)*?(?:\.v(\d))?\.[bfsu](\d+)\b", assembly)
    ]
    if kind == "load":
        widths += [int(size, 0) for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)", assembly)]
    for unit, count in re.findall(rf"\b(?:global|buffer)_{kind}_({'|'.join(amd_bytes)})(?:x(\d))?", assembly):
        widths.append(amd_bytes[unit] * int(count or 1))
    for size in re.findall(rf"tt\.{kind} .*: !tt\.ptr<[a-z]+(\d+)>", triton_ir):
        if (single := max(1, int(size) // 8)) in widths:
            widths.remove(single)
    return widths


def half_width(widths: Sequence[int]) -> int:
    """Returns the largest width such that accesses of it or more carry at least half of the bytes; 0 of none."""
    carried = 0
    for width in sorted(widths, reverse=True):
        carried += width
        if 2 * carried >= sum(widths):
            return width
    return 0


@cache
def _cached_launches(architecture: str, operation: str | None, only_shipped: bool) -> list[RecordedLaunch]:
    return record_launches(architecture, operation, only_shipped)


def _compile_number(
    architecture: str, operation: str | None, only_shipped: bool, kept: Path | None, number: int
) -> CompiledKernel:
    return compile_launch(_cached_launches(architecture, operation, only_shipped)[number], kept)


def compile_all(
    architectures: Sequence[str],
    operation: str | None = None,
    only_shipped: bool = False,
    processes: int | None = None,
    kept: Path | None = None,
) -> Iterator[CompiledKernel]:
    """Compiles in several processes (by default one a processor) and yields rows in order; `kept` as in `compile_launch`."""
    what = (operation, only_shipped)
    work = [(name, *what, kept, n) for name in architectures for n in range(len(_cached_launches(name, *what)))]
    with ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn"), initializer=end_with_parent) as pool:
        yield from pool.map(_compile_number, *zip(*work, strict=True))


def digest_launches(launches: Sequence[RecordedLaunch]) -> str:
    """Returns 16 hexadecimal digits of the launches: architectures, kernels, labels, block sizes, warps and stages."""
    lines = [
        [
            launch.architecture,
            launch.kernel.fn.__name__,
            launch.label,
            *launch.blocks,
            *(f"{name} {value}" for name, value in launch.options),
        ]
        for launch in launches
    ]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]
