"""Compiles every kernel for architectures that are not there, and tells what came out.

No GPU and no driver is needed: Triton brings the compilers along. A recorder in place of the launcher notes which kernels
the operations launch, with which types, alignments and constants; exactly those are compiled. For each: registers a thread,
bytes spilled to memory, shared memory, estimated occupancy, how many tensor-core and TMA instructions it has, and seconds.

    python -m raystride.triton_kernels.compile_report                       # everything, as a table
    python -m raystride.triton_kernels.compile_report --write docs/kernels.md
    python -m raystride.triton_kernels.compile_report --architecture sm_90 --operation attention --shipped
"""

import argparse
import contextlib
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
from raystride.triton_kernels.launch import Grid, assumed_architecture, launcher
from raystride.triton_kernels.processes import end_with_parent
from raystride.triton_kernels.specimens import Specimen, specimens


@dataclass(frozen=True)
class Recorded:
    """A launch that an operation would make, and for what."""

    operation: str
    label: str
    architecture: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    """Name and type of each argument; `constexpr` for constants."""
    constants: tuple[tuple[str, Any], ...]
    attributes: tuple[tuple[int, str], ...]
    """By argument number, Triton's key of its alignment."""
    options: tuple[tuple[str, int], ...]
    """num_warps, num_stages."""
    shipped: bool
    """As the specimen says."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for launches that share one compiled kernel."""
        return (self.architecture, self.kernel.fn.__name__, self.signature, self.constants, self.attributes, self.options)


@dataclass(frozen=True)
class Compiled:
    """A row of the report."""

    operation: str
    kernel: str
    label: str
    tile: str
    """Block sizes, warps and stages."""
    architecture: str
    registers: int
    """Of a thread; on AMD vector registers."""
    spilled: int
    """Bytes of a thread that its registers could not hold."""
    shared: int
    """Bytes of shared memory."""
    occupancy: float
    """Estimated; 0 to 1."""
    matrix_instructions: int
    """Instructions for tensor cores."""
    other_matrix_instructions: int
    """Those of older architectures, which leave speed unused: mma.sync on sm_90."""
    tma: int
    """Copies by the tensor memory accelerator."""
    seconds: float
    fits: bool
    """Whether shared memory suffices."""
    multiplies: bool
    """Whether the kernel multiplies matrices at all."""
    shipped: bool
    """Whether users get it, or it is an alternative for tuning."""


def record(architecture: str, operation: str | None = None, only_shipped: bool = False) -> list[Recorded]:
    """Every launch that the specimens make on an architecture, each compiled kernel once."""
    found: dict[tuple[Any, ...], Recorded] = {}
    current: list[Specimen] = []

    def note(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        recorded = _describe(kernel, arguments, named, current[-1], architecture)
        found.setdefault(recorded.identity, recorded)

    with launcher(note), assumed_architecture(architecture):
        use_kernels("triton")
        for specimen in specimens(torch.device("cpu")):
            if operation in (None, specimen.operation) and (specimen.shipped or not only_shipped):
                current.append(specimen)
                specimen.call()
        use_kernels("auto")
    return list(found.values())


def _describe(
    kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any], specimen: Specimen, architecture: str
) -> Recorded:
    """A launch as the compiler sees it: Triton's own rules give types and alignments, and make 1 and None constants."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(_target(ARCHITECTURES[architecture]))
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
    return Recorded(
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


def compile_recorded(recorded: Recorded) -> Compiled:
    """Compiles one kernel and reads what came out."""
    import triton
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    architecture = ARCHITECTURES[recorded.architecture]
    target = _target(architecture)
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
    row = _read(kernel, log.getvalue(), architecture, recorded)
    return replace(row, seconds=time.perf_counter() - started)


def _target(architecture: Architecture) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(architecture.backend, architecture.capability, architecture.warp_size)


def _read(kernel: Any, log: str, architecture: Architecture, recorded: Recorded) -> Compiled:
    assembly = kernel.asm["ptx" if architecture.backend == "cuda" else "amdgcn"]
    if architecture.backend == "cuda":
        registers = int(re.findall(r"Used (\d+) registers", log)[-1])
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    else:
        registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", assembly)[-1])
        spilled = 4 * int(re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)[-1])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    instructions = {a.matrix_instruction: len(re.findall(rf"\b{re.escape(a.matrix_instruction)}", assembly)) for a in _all()}
    own = instructions.pop(architecture.matrix_instruction)
    blocks = [f"{name.removeprefix('BLOCK_').lower()} {value}" for name, value in recorded.constants if "BLOCK" in name]
    bound = [f"{value} registers at most" for name, value in recorded.options if name == "maxnreg"]
    return Compiled(
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
        seconds=0.0,
        fits=shared <= architecture.shared_of_block,
        multiplies="tt.dot" in kernel.asm["ttir"],
        shipped=recorded.shipped,
    )


def _all() -> Sequence[Architecture]:
    return list(ARCHITECTURES.values())


@cache
def _recorded_here(architecture: str, operation: str | None, only_shipped: bool) -> list[Recorded]:
    return record(architecture, operation, only_shipped)


def _compile_number(architecture: str, operation: str | None, only_shipped: bool, number: int) -> Compiled:
    return compile_recorded(_recorded_here(architecture, operation, only_shipped)[number])


def compile_all(
    architectures: Sequence[str], operation: str | None = None, only_shipped: bool = False, processes: int | None = None
) -> Iterator[Compiled]:
    """Compiles in several processes (as many as there are processors) and gives rows in order."""
    what = (operation, only_shipped)
    work = [(name, *what, n) for name in architectures for n in range(len(_recorded_here(name, *what)))]
    with ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn"), initializer=end_with_parent) as pool:
        yield from pool.map(_compile_number, *zip(*work, strict=True))


def faults(row: Compiled) -> list[str]:
    """What is wrong with a kernel that we would ship; empty if nothing is. On AMD spills are told, not faults."""
    found = []
    if row.spilled and ARCHITECTURES[row.architecture].backend == "cuda":
        found.append(f"spills {row.spilled} bytes")
    if not row.fits:
        found.append(f"needs {row.shared} bytes of shared memory")
    if row.multiplies and not row.matrix_instructions + row.other_matrix_instructions and "fp32" not in row.label:
        found.append("multiplies without tensor cores")
    return found


MAKES_PAGE = "python -m raystride.triton_kernels.compile_report --write docs/kernels.md"
_HEADER = ["kernel", "for", "tile", "registers", "spilled", "shared", "occupancy", "tensor core", "TMA", "s"]


def _cells(row: Compiled) -> list[str]:
    matrix = str(row.matrix_instructions) if row.multiplies else "-"
    if row.other_matrix_instructions:
        matrix += f" + {row.other_matrix_instructions} older"
    figures = [str(row.registers), str(row.spilled), f"{row.shared:,}", f"{row.occupancy:.0%}", matrix, str(row.tma)]
    return [row.kernel, row.label, row.tile, *figures, f"{row.seconds:.1f}"]


def compiled_page(rows: Sequence[Compiled], command: str = MAKES_PAGE) -> str:
    """The report as a Markdown page, a table for each architecture; `command` makes it."""
    import triton

    lines = [
        "# Kernels, as compiled",
        "",
        f"Generated by `{command}` with Triton {triton.__version__}; no GPU is needed. Registers of a thread, "
        "bytes spilled (stores and loads), bytes of shared memory, estimated occupancy, tensor-core instructions "
        f"({', '.join(f'{a.matrix_instruction} on {a.name}' for a in _all())}), bulk copies by TMA, seconds to compile.",
        "",
        "What is proved of each operation besides, and how: [operations](operations.md).",
    ]
    for name in dict.fromkeys(row.architecture for row in rows):
        lines += ["", f"## {name}", "", f"| {' | '.join(_HEADER)} |", "|" + " --- |" * len(_HEADER)]
        lines += [f"| {' | '.join(_cells(row))} |" for row in rows if row.architecture == name]
    return "\n".join(lines) + "\n"


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
    parser.add_argument("--write", type=Path, help="write the tables as a Markdown page")
    parser.add_argument("--command", default=MAKES_PAGE, help="what the page says it was made by")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--processes", type=int, help="compilers side by side; default: as many as processors")
    options = parser.parse_args(arguments)
    rows, wrong = [], 0
    for row in compile_all(
        options.architecture or list(ARCHITECTURES), options.operation, options.shipped, options.processes
    ):
        rows.append(row)
        wrong += bool(faults(row)) and row.shipped
        remark = f"  <- {'; '.join(faults(row))}" if faults(row) else ""
        text = json.dumps(asdict(row) | {"faults": faults(row)}) if options.json else "  ".join(_cells(row)) + remark
        print(text if options.json else f"{row.architecture:7}{text}", flush=True)
    if options.write:
        options.write.write_text(compiled_page(rows, options.command))
    if not options.json:
        print(f"{len(rows)} kernels compiled; {wrong} with faults")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
