"""Compiles every kernel ahead of time for several GPU architectures, and reports registers, spills and instructions.

No GPU and no driver is needed: Triton contains the compilers. A recorder replaces the launcher and records the kernels that
operations launch, with types, alignments and constants; exactly those are compiled. The report has registers a thread, bytes
spilled to memory, shared memory, estimated occupancy, the number of tensor-core and TMA instructions, the bytes of each load
and store, and seconds.

    python -m raystride.triton_kernels.compile_report                       # everything, as a table
    python -m raystride.triton_kernels.compile_report --write build/kernels.md --page docs/kernels.md      # make kernels
    python -m raystride.triton_kernels.compile_report --architecture sm_90 --operation attention --shipped
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported: interpreted kernels cannot be compiled

import torch

from raystride.triton_kernels.architectures import ARCHITECTURES, Architecture, occupancy
from raystride.triton_kernels.dispatch import use_kernels
from raystride.triton_kernels.launch import Grid, assumed_architecture, use_launcher
from raystride.triton_kernels.processes import end_with_parent
from raystride.triton_kernels.specimens import Specimen, list_specimens


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch recorded from an operation, and its purpose."""

    operation: str
    label: str
    architecture: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    """Name and type of each argument; `constexpr` for constants."""
    constants: tuple[tuple[str, Any], ...]
    attributes: tuple[tuple[int, str], ...]
    """Argument index and Triton's key of its alignment."""
    options: tuple[tuple[str, int], ...]
    """num_warps, num_stages."""
    shipped: bool
    """As in the specimen."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for launches that share one compiled kernel."""
        return (self.architecture, self.kernel.fn.__name__, self.signature, self.constants, self.attributes, self.options)


WIDEST_ACCESS = 16
"""Bytes of a thread's access to global memory below which a streaming kernel has a fault."""
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
    found: dict[tuple[Any, ...], RecordedLaunch] = {}
    current: list[Specimen] = []

    def record_launch(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        recorded = _describe_launch(kernel, arguments, named, current[-1], architecture)
        found.setdefault(recorded.identity, recorded)

    with use_launcher(record_launch), assumed_architecture(architecture):
        use_kernels("triton")
        for specimen in list_specimens(torch.device("cpu")):
            if operation in (None, specimen.operation) and (specimen.shipped or not only_shipped):
                current.append(specimen)
                specimen.call()
        use_kernels("auto")
    return list(found.values())


def _describe_launch(
    kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any], specimen: Specimen, architecture: str
) -> RecordedLaunch:
    """Describes a launch for the compiler: Triton's own rules give types and alignments, and make 1 and None constants."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(_gpu_target(ARCHITECTURES[architecture]))
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | {k: v for k, v in named.items() if k in kernel.arg_names}
    signature, constants, attributes = [], [], []
    for number, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        one, aligned = not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
        kind, key = (
            ("constexpr", None) if parameter.is_constexpr else native_specialize_impl(backend, value, False, one, aligned)
        )
        signature.append((parameter.name, kind))
        if kind == "constexpr":
            constants.append((parameter.name, value))
        elif key:
            attributes.append((number, key))
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


def compile_launch(recorded: RecordedLaunch) -> CompiledKernel:
    """Compiles one kernel and reads its resource usage."""
    import triton
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    architecture = ARCHITECTURES[recorded.architecture]
    target = _gpu_target(architecture)
    parse = make_backend(target).parse_attr
    numbers = {name: number for number, (name, _) in enumerate(recorded.signature)}
    source = ASTSource(
        recorded.kernel,
        dict(recorded.signature),
        constexprs={(numbers[name],): value for name, value in recorded.constants},
        attrs={(number,): parse(key) for number, key in recorded.attributes},
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
        for a in _list_architectures()
    }
    own = instructions.pop(architecture.matrix_instruction)
    blocks = [f"{name.removeprefix('BLOCK_').lower()} {value}" for name, value in recorded.constants if "BLOCK" in name]
    bound = [f"{value} registers at most" for name, value in recorded.options if name == "maxnreg"]
    return CompiledKernel(
        operation=recorded.operation,
        kernel=recorded.kernel.fn.__name__.strip("_").removesuffix("_kernel"),
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


def _list_architectures() -> Sequence[Architecture]:
    return list(ARCHITECTURES.values())


@cache
def _cached_launches(architecture: str, operation: str | None, only_shipped: bool) -> list[RecordedLaunch]:
    return record_launches(architecture, operation, only_shipped)


def _compile_number(architecture: str, operation: str | None, only_shipped: bool, number: int) -> CompiledKernel:
    return compile_launch(_cached_launches(architecture, operation, only_shipped)[number])


def compile_all(
    architectures: Sequence[str], operation: str | None = None, only_shipped: bool = False, processes: int | None = None
) -> Iterator[CompiledKernel]:
    """Compiles in several processes (by default one a processor) and yields rows in order."""
    what = (operation, only_shipped)
    work = [(name, *what, n) for name in architectures for n in range(len(_cached_launches(name, *what)))]
    with ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn"), initializer=end_with_parent) as pool:
        yield from pool.map(_compile_number, *zip(*work, strict=True))


def find_faults(row: CompiledKernel) -> list[str]:
    """Returns the faults of a kernel that would be shipped, empty if none. On AMD spills are reported, but no faults."""
    found = []
    if row.spilled and ARCHITECTURES[row.architecture].backend == "cuda":
        found.append(f"spills {row.spilled} bytes")
    if row.streams and ARCHITECTURES[row.architecture].backend == "cuda":
        accesses = {"reads": row.load_bytes, "writes": row.store_bytes}
        found += [f"{verb} {width} bytes at a time" for verb, width in accesses.items() if 0 < width < WIDEST_ACCESS]
    if not row.fits:
        found.append(f"needs {row.shared} bytes of shared memory")
    if row.multiplies and not row.matrix_instructions + row.other_matrix_instructions and "fp32" not in row.label:
        found.append("multiplies without tensor cores")
    if row.multiplies and row.other_matrix_instructions and "bf16" in row.label and not _may_use_older_tensor_cores(row):
        found.append("uses the tensor-core instructions of older architectures")
    return found


def _may_use_older_tensor_cores(row: CompiledKernel) -> bool:
    """Returns True if a tile has fewer than the 64 rows that the newest instructions work on.

    Decoding has 16 rows. dK and dV of large heads with a window, dropout or lengths, and of heads of 128 with dropout and
    another rule, have few since 64 overflow the registers.
    """
    wide = "D 256" in row.label and "causal" not in row.label
    both = "D 128" in row.label and any(rules in row.label for rules in ("dropout and window", "dropout, window"))
    both |= "D 128 packed and dropout" in row.label
    return "decoding" in row.kernel or (row.kernel == "attention_backward_keys" and (wide or both))


COMPUTES = {
    "attention": "softmax(scale Q K^T + mask) V, plain, packed and against a cache",
    "gelu": "GELU, exact and by tanh",
    "relu": "max(x, 0)",
    "swiglu": "silu(gate) * up",
    "mse": "mean squared error",
    "rms_norm": "RMSNorm, alone or after the residual addition",
    "layer_norm": "LayerNorm, alone or after the residual addition",
    "rope": "rotary positions of queries and keys, with or without their norms",
    "linear_cross_entropy": "cross entropy from hidden states, without all logits",
    "linear_cross_entropy_sharded": "the same with the vocabulary sharded over workers",
    "adamw": "an AdamW step of all tensors",
    "byte_pack": "raw bytes to padded or packed ids",
}
"""The result of each operation, for the page."""
PAGE_HEADER = [
    "operation",
    "computes",
    "dtypes",
    "kernels",
    "registers",
    "bytes spilled",
    "shared memory, KiB",
    "bytes a load",
    "bytes a store",
    "tensor cores",
]
_HEADER = [
    *(
        "kernel",
        "for",
        "tile",
        "registers",
        "spilled",
        "shared",
        "occupancy",
        "tensor core",
        "TMA",
        "bytes a load",
        "a store",
    ),
    "s",
]


def digest_launches(launches: Sequence[RecordedLaunch]) -> str:
    """Returns 16 hexadecimal digits of the launches: architectures, kernels, labels, block sizes, warps and stages."""
    lines = [
        [
            launch.architecture,
            launch.kernel.fn.__name__,
            launch.label,
            *(f"{name} {value}" for name, value in launch.constants if "BLOCK" in name),
            *(f"{name} {value}" for name, value in launch.options),
        ]
        for launch in launches
    ]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def _format_cells(row: CompiledKernel) -> list[str]:
    matrix = str(row.matrix_instructions) if row.multiplies else "-"
    if row.other_matrix_instructions:
        matrix += f" + {row.other_matrix_instructions} older"
    figures = [str(row.registers), str(row.spilled), f"{row.shared:,}", f"{row.occupancy:.0%}", matrix, str(row.tma)]
    figures += [str(row.load_bytes), str(row.store_bytes)]
    return [row.kernel, row.label, row.tile, *figures, f"{row.seconds:.1f}"]


def tables_page(rows: Sequence[CompiledKernel]) -> str:
    """Returns all rows as a Markdown page with a table for each architecture."""
    import triton

    lines = [
        f"# Kernels, as compiled by Triton {triton.__version__}",
        "",
        "Registers of a thread, bytes spilled (stores and loads), bytes of shared memory, estimated occupancy, tensor-core "
        f"instructions ({', '.join(f'{a.matrix_instruction} on {a.name}' for a in _list_architectures())}), bulk copies by "
        "TMA, seconds to compile.",
    ]
    for name in dict.fromkeys(row.architecture for row in rows):
        lines += ["", f"## {name}", "", f"| {' | '.join(_HEADER)} |", "|" + " --- |" * len(_HEADER)]
        lines += [f"| {' | '.join(_format_cells(row))} |" for row in rows if row.architecture == name]
    return "\n".join(lines) + "\n"


def operations_page(rows: Sequence[CompiledKernel], digest: str) -> str:
    """Returns the page of `docs/`: one table with a row for each operation, and its worst figures on each architecture.

    `digest` is that of the shipped launches; alternatives among the rows are left out.
    """
    shipped = [row for row in rows if row.shipped]
    lines = [
        "# Kernels, as compiled",
        "",
        f"{describe_total(rows, digest)}.",
        "`make kernels` writes this page and, with a row for each kernel, `build/kernels.md`; no GPU is needed.",
        "",
        f"Figures are the worst of an operation's kernels on {', '.join(ARCHITECTURES)}, in this order: registers of a",
        "thread, bytes that did not fit into them (stores and loads), KiB of shared memory of a block, and, of kernels that",
        "stream, bytes of a thread's load and store, which carry at least half of what it reads and writes. Tensor cores:",
        "`newest` if all kernels that multiply 16-bit numbers use the newest instructions of their architecture, else the",
        "kernels that use older ones. All rows of an operation are printed by",
        "`python -m raystride.triton_kernels.compile_report --operation gelu`.",
        "",
        f"| {' | '.join(PAGE_HEADER)} |",
        "|" + " --- |" * len(PAGE_HEADER),
    ]
    operations = {operation: [row for row in shipped if row.operation == operation] for operation in COMPUTES}
    lines += [f"| {' | '.join(_summarize_operation(kernels))} |" for kernels in operations.values() if kernels]
    proofs = (
        "Further proofs of each operation: [operations](operations.md). To look at one kernel: [debugging](debugging.md)."
    )
    return "\n".join([*lines, "", proofs]) + "\n"


def _summarize_operation(rows: Sequence[CompiledKernel]) -> list[str]:
    """Returns the cells of an operation's row in the page's table."""

    def worst_values(figure: str) -> str:
        by_architecture = [[getattr(row, figure) for row in rows if row.architecture == name] for name in ARCHITECTURES]
        return ", ".join(str(max(figures)) if figures else "-" for figures in by_architecture)

    def narrowest_accesses(figure: str) -> str:
        streaming = [row for row in rows if row.streams and getattr(row, figure)]
        by_architecture = [[getattr(row, figure) for row in streaming if row.architecture == name] for name in ARCHITECTURES]
        return ", ".join(str(min(figures)) if figures else "-" for figures in by_architecture)

    multiplying = [row for row in rows if row.multiplies and "fp32" not in row.label]
    older = sorted({row.kernel for row in multiplying if row.other_matrix_instructions})
    newest = "newest" if multiplying else "-"
    return [
        f"`{rows[0].operation}`",
        COMPUTES[rows[0].operation],
        " ".join(kind for kind in ("bf16", "fp16", "fp32") if any(kind in row.label for row in rows)) or "uint8",
        " ".join(dict.fromkeys(f"`{row.kernel}`" for row in rows)),
        worst_values("registers"),
        worst_values("spilled"),
        worst_values("shared_kib"),
        narrowest_accesses("load_bytes"),
        narrowest_accesses("store_bytes"),
        f"older in {' '.join(f'`{kernel}`' for kernel in older)}" if older else newest,
    ]


def describe_total(rows: Sequence[CompiledKernel], digest: str) -> str:
    """Returns one sentence about all shipped kernels: Triton's version, their number, and whether any spills."""
    import triton

    shipped = [row for row in rows if row.shipped]
    nvidia = [row for row in shipped if ARCHITECTURES[row.architecture].backend == "cuda"]
    spilling = sum(row.spilled > 0 for row in nvidia)
    return (
        f"{len(shipped)} kernels compiled by Triton {triton.__version__}, launches {digest}; of {len(nvidia)} for NVIDIA "
        f"{spilling or 'none'} spill{'' if spilling > 1 else 's'}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; 1 if a shipped kernel has a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m raystride.triton_kernels.compile_report", description=__doc__.split("\n")[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--architecture", action="append", choices=list(ARCHITECTURES), help="only this one; may be repeated"
    )
    parser.add_argument("--operation", help="only this one: attention, rms_norm, ...")
    parser.add_argument("--shipped", action="store_true", help="leave out the alternatives that are there for tuning")
    parser.add_argument("--write", type=Path, help="write a Markdown page with a row for each kernel")
    parser.add_argument("--page", type=Path, help="write a Markdown page with a row for each operation")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--processes", type=int, help="compilers side by side; default: as many as processors")
    options = parser.parse_args(arguments)
    rows, wrong = [], 0
    for row in compile_all(
        options.architecture or list(ARCHITECTURES), options.operation, options.shipped, options.processes
    ):
        rows.append(row)
        wrong += bool(find_faults(row)) and row.shipped
        remark = f"  <- {'; '.join(find_faults(row))}" if find_faults(row) else ""
        text = (
            json.dumps(asdict(row) | {"faults": find_faults(row)})
            if options.json
            else "  ".join(_format_cells(row)) + remark
        )
        print(text if options.json else f"{row.architecture:7}{text}", flush=True)
    launches = [
        launch for name in options.architecture or ARCHITECTURES for launch in record_launches(name, options.operation, True)
    ]
    digest = digest_launches(launches)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(tables_page(rows))
    if options.page:
        options.page.write_text(operations_page(rows, digest))
    if not options.json:
        print(f"{describe_total(rows, digest)}; {wrong} with faults")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
