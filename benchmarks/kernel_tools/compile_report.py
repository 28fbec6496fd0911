"""Compiles every kernel ahead of time for several GPU architectures, and reports registers, spills and instructions.

No GPU and no driver is needed (see `compilation`). The report has registers a thread, bytes spilled, shared memory,
estimated occupancy, the number of tensor-core and TMA instructions, the bytes of each load and store, and seconds.

    python -m benchmarks.kernel_tools.compile_report                       # everything, as a table
    python -m benchmarks.kernel_tools.compile_report --write build/kernels.md --page docs/kernels.md      # make kernels
    python -m benchmarks.kernel_tools.compile_report --architecture sm_90 --operation attention --shipped
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported: interpreted kernels cannot be compiled

from benchmarks.kernel_tools.architectures import ARCHITECTURES
from benchmarks.kernel_tools.compilation import CompiledKernel, compile_all, digest_launches, record_launches

WIDEST_ACCESS = 16
"""Bytes of a thread's access to global memory below which a streaming kernel has a fault."""


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

    Decoding has 16 rows. dK and dV of large heads, and of heads of 128 with dropout and another rule, have few where 64
    overflow the registers.
    """
    rules = ("dropout and window", "dropout, window", "dropout and key lengths", "packed and dropout")
    both = "D 128" in row.label and any(one in row.label for one in rules)
    return "decoding" in row.kernel or (row.kernel == "attention_backward_keys" and ("D 256" in row.label or both))


COMPUTES = {
    "attention": "softmax(scale Q K^T + mask) V, plain, packed and against a cache",
    "gelu": "GELU, exact and by tanh",
    "relu": "max(x, 0)",
    "swiglu": "silu(gate) * up",
    "geglu": "gelu(gate) * up, exact and by tanh",
    "mse": "mean squared error",
    "convolution": "convolution, bias, ReLU and 2 x 2 max-pooling in one pass",
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
        f"instructions ({', '.join(f'{a.matrix_instruction} on {a.name}' for a in ARCHITECTURES.values())}), bulk copies by "
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
        "`python -m benchmarks.kernel_tools.compile_report --operation gelu`.",
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
        prog="python -m benchmarks.kernel_tools.compile_report", description=__doc__.split("\n")[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--architecture", action="append", choices=list(ARCHITECTURES), help="only this one; may be repeated"
    )
    parser.add_argument("--operation", help="only this one: attention, rms_norm, ...")
    parser.add_argument("--shipped", action="store_true", help="leave out the alternatives that are there for tuning")
    parser.add_argument("--write", type=Path, help="write a Markdown page with a row for each kernel")
    parser.add_argument("--page", type=Path, help="write a Markdown page with a row for each operation")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument(
        "--kept", type=Path, help="folder of earlier results: kernels that have not changed are not compiled"
    )
    parser.add_argument("--processes", type=int, help="compilers side by side; default: as many as processors")
    options = parser.parse_args(arguments)
    rows, wrong = [], 0
    for row in compile_all(
        options.architecture or list(ARCHITECTURES), options.operation, options.shipped, options.processes, options.kept
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
