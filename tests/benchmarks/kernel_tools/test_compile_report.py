"""Kernels as compiled for GPUs that are not here: what we ship neither spills nor outgrows shared memory, on tensor cores.

`make kernels` compiles all of them and writes `docs/kernels.md`, whose figures are checked here. The digest of the launches
shows that the page belongs to the kernels as they are, and so does a sample that is compiled here. By other Tritons they are
compiled by hand, in environments of their own: `make report-3.6`, whose last line stands in `docs/operations.md`.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernel_tools.architectures import ARCHITECTURES, occupancy
from benchmarks.kernel_tools.compilation import CompiledKernel
from benchmarks.kernel_tools.compile_report import COMPUTES, PAGE_HEADER, find_faults, operations_page, tables_page
from raystride.pipelines.system.storage.folder import Folder
from tests.some import some
from tests.triton_kernels import compiled
from tests.triton_kernels.compiled import PAGE, state

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    """Digests of the launches as they are now, and a sample of them compiled; once for the same kernels."""
    kept = Path(tempfile.gettempdir()) / f"raystride-compiled-{os.getuid()}" / f"{state()}.json"
    if not kept.exists():
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        command = [sys.executable, "-m", "tests.triton_kernels.compiled"]
        found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
        assert found.returncode == 0, found.stderr[-3000:]
        Folder(str(kept.parent)).put(kept.name, found.stdout.encode())
    return dict(json.loads(kept.read_bytes()))


def test_what_was_compiled_of_other_kernels_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = state()
    assert before == state()
    monkeypatch.setattr("triton.__version__", "0.0")
    another = state()
    shutil.copytree(ROOT / "triton_kernels", tmp_path / "triton_kernels")
    with (tmp_path / "triton_kernels" / "rope.py").open("a") as stream:
        stream.write("# changed\n")
    monkeypatch.setattr(compiled, "KERNELS", tmp_path / "triton_kernels")
    assert len({before, another, state()}) == 3


@pytest.fixture(scope="module")
def operations() -> dict[str, dict[str, str]]:
    """The rows of the page, by operation and column."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert header == PAGE_HEADER
    return {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows}


def _figures(row: dict[str, str], column: str) -> dict[str, int]:
    """The figures of a cell, by architecture."""
    return dict(zip(ARCHITECTURES, map(int, row[column].split(", ")), strict=True))


def _kernels(row: dict[str, str]) -> set[str]:
    return {kernel.strip("`") for kernel in row["kernels"].split()}


@pytest.mark.long
def test_the_page_was_made_of_the_launches_of_now(now: dict[str, Any]) -> None:
    assert f"launches {now['digest']};" in PAGE.read_text()


@pytest.mark.long
def test_a_sample_compiles_to_what_the_page_admits(now: dict[str, Any], operations: dict[str, dict[str, str]]) -> None:
    by_kernel = {kernel: row for row in operations.values() for kernel in _kernels(row)}
    for found in some(CompiledKernel(**row) for row in now["rows"]):
        row = by_kernel[found.kernel]
        assert not find_faults(found), found
        assert found.registers <= _figures(row, "registers")[found.architecture], found
        assert found.spilled <= _figures(row, "bytes spilled")[found.architecture], found
        assert found.shared_kib <= _figures(row, "shared memory, KiB")[found.architecture], found
        assert found.label.partition(" ")[0] in row["dtypes"], found


def test_nothing_that_is_shipped_has_a_fault(operations: dict[str, dict[str, str]]) -> None:
    assert "for NVIDIA none spills" in PAGE.read_text()
    for row in some(operations.values()):
        for name, spilled in _figures(row, "bytes spilled").items():
            assert ARCHITECTURES[name].backend != "cuda" or spilled == 0, row
        for name, shared_kib in _figures(row, "shared memory, KiB").items():
            assert shared_kib * 1024 <= ARCHITECTURES[name].max_block_shared, row
        older = {"`attention_decoding`", "`attention_backward_keys`"}
        assert set(row["tensor cores"].split()) <= {"newest", "-", "older", "in"} | older, row


def test_every_kernel_of_the_package_is_compiled(operations: dict[str, dict[str, str]]) -> None:
    kernels = set()
    for path in (ROOT / "triton_kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels.add(node.name.strip("_").removesuffix("_kernel"))
    assert len(kernels) > 20
    assert set().union(*map(_kernels, operations.values())) == kernels
    assert {name: row["computes"] for name, row in operations.items()} == COMPUTES


@pytest.mark.long
def test_other_tritons_were_given_the_launches_of_now(now: dict[str, Any]) -> None:
    lines = (ROOT / "docs" / "operations.md").read_text().splitlines()
    rows = {
        cells[1].rpartition(".")[0]: cells[2:] for cells in (re.split(r" *\| *", line) for line in lines) if len(cells) > 4
    }
    assert {"3.6", "3.8"} <= now["others"].keys()
    for version, (digest, count) in some(now["others"].items()):
        assert rows[version][:2] == [f"`{digest}`", f"none of {count}"], version


def _row(**changes: Any) -> CompiledKernel:
    plain = {
        "operation": "attention", "kernel": "attention_forward", "label": "bf16", "tile": "m 128", "architecture": "sm_90",
        "registers": 128, "spilled": 0, "shared": 1000, "occupancy": 0.5, "matrix_instructions": 16,
        "other_matrix_instructions": 0, "tma": 4, "load_bytes": 16, "store_bytes": 16,
        "seconds": 1.0, "fits": True, "multiplies": True, "shipped": True,
    }  # fmt: skip
    return CompiledKernel(**(plain | changes))


def test_faults_are_found() -> None:
    assert not find_faults(_row())
    assert find_faults(_row(spilled=8)) == ["spills 8 bytes"]
    assert not find_faults(_row(spilled=8, architecture="gfx942"))
    assert find_faults(_row(fits=False, shared=300_000)) == ["needs 300000 bytes of shared memory"]
    assert find_faults(_row(matrix_instructions=0)) == ["multiplies without tensor cores"]
    assert not find_faults(_row(matrix_instructions=0, multiplies=False))


def test_narrow_accesses_are_a_fault_of_streaming_kernels() -> None:
    narrow = {"operation": "adamw", "kernel": "adamw", "multiplies": False, "matrix_instructions": 0}
    assert find_faults(_row(**narrow, load_bytes=4, store_bytes=8)) == [
        "reads 4 bytes at a time",
        "writes 8 bytes at a time",
    ]
    assert not find_faults(_row(**narrow, load_bytes=0))
    assert not find_faults(_row(**narrow, load_bytes=4, architecture="gfx942"))
    assert not find_faults(_row(**narrow | {"kernel": "adamw_corrections"}, load_bytes=4))
    assert not find_faults(_row(load_bytes=4))


def test_older_tensor_cores_are_a_fault_but_for_small_tiles() -> None:
    fault = ["uses the tensor-core instructions of older architectures"]
    assert find_faults(_row(other_matrix_instructions=8)) == fault
    keys = {"other_matrix_instructions": 8, "kernel": "attention_backward_keys"}
    assert find_faults(_row(**keys, label="bf16 D 128 dropout")) == fault
    assert not find_faults(_row(**keys, label="bf16 D 128 dropout and window"))
    assert not find_faults(_row(**keys, label="bf16 D 256 causal"))
    assert not find_faults(_row(other_matrix_instructions=8, kernel="attention_decoding"))


def test_the_full_page_has_a_table_for_each_architecture() -> None:
    text = tables_page([_row(), _row(architecture="sm_80", spilled=24)])
    assert text.count("| kernel |") == 2
    assert "| attention_forward | bf16 | m 128 | 128 | 24 | 1,000 | 50% | 16 | 4 | 16 | 16 | 1.0 |" in text


def test_the_page_has_the_worst_of_each_operation() -> None:
    rows = [_row(architecture=name, registers=number) for number, name in enumerate(ARCHITECTURES, 100)]
    rows += [
        _row(registers=7, spilled=24, shared=2049, label="fp32"),
        _row(kernel="attention_decoding", other_matrix_instructions=1),
        _row(registers=255, shipped=False),
        _row(operation="gelu", kernel="gelu_forward", multiplies=False),
    ]
    text = operations_page(rows, "0123")
    assert "8 kernels compiled by Triton" in text
    assert "launches 0123; of 7 for NVIDIA 1 spills." in text
    none = "-, -, -, -, -"
    row = "| bf16 fp32 | `attention_forward` `attention_decoding` | 100, 101, 128, 103, 104 | 0, 0, 24, 0, 0 | "
    assert f"{row}1, 1, 3, 1, 1 | {none} | {none} | older in `attention_decoding` |" in text
    gelu = " | ".join(f"-, -, {figure}, -, -" for figure in (128, 0, 1, 16, 16))
    assert f"| `gelu_forward` | {gelu} | - |" in text


def test_occupancy_is_bounded_by_what_runs_out_first() -> None:
    sm_90 = ARCHITECTURES["sm_90"]
    assert occupancy(sm_90, registers=32, shared=0, warps=8) == 1.0
    assert occupancy(sm_90, registers=128, shared=0, warps=8) == 0.25
    assert occupancy(sm_90, registers=32, shared=100 * 1024, warps=8) == 0.25
    assert occupancy(sm_90, registers=32, shared=228 * 1024, warps=8) == 0.0
    assert occupancy(ARCHITECTURES["gfx942"], registers=128, shared=0, warps=4) == 0.5
