"""Kernels as compiled for GPUs that are not here: what we ship neither spills nor outgrows shared memory, on tensor cores.

Compiled in processes of its own: in this one, kernels belong to the interpreter.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triton_kernels.architectures import ARCHITECTURES, occupancy
from triton_kernels.compile_report import Compiled, faults, page

pytestmark = pytest.mark.timeout(900)  # two minutes on two quiet cores

ROOT = Path(__file__).resolve().parents[2]
NVIDIA = ["sm_80", "sm_90", "sm_100"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The report for all architectures, of the tiles that are shipped."""
    command = [sys.executable, "-m", "triton_kernels.compile_report", "--json", "--shipped"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert found.returncode in (0, 1), found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_nothing_that_is_shipped_has_a_fault(rows: list[dict[str, Any]]) -> None:
    wrong = [(row["architecture"], row["kernel"], row["label"], row["tile"], row["faults"]) for row in rows if row["faults"]]
    assert not wrong
    assert not [row for row in rows if row["architecture"] in NVIDIA and row["spilled"]]


def test_every_kernel_of_the_package_is_compiled_for_every_architecture(rows: list[dict[str, Any]]) -> None:
    kernels = set()
    for path in (ROOT / "triton_kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels.add(node.name.strip("_").removesuffix("_kernel"))
    assert len(kernels) > 20
    for architecture in ARCHITECTURES:
        compiled = {row["kernel"] for row in rows if row["architecture"] == architecture}
        assert compiled == kernels


def test_matrix_kernels_use_the_newest_tensor_cores(rows: list[dict[str, Any]]) -> None:
    multiplying = [row for row in rows if row["multiplies"] and "bf16" in row["label"]]
    assert {row["architecture"] for row in multiplying} == set(ARCHITECTURES)
    for row in multiplying:
        if "decoding" in row["kernel"]:
            # Its 16 rows are fewer than the 64 that the newest instructions work on.
            assert row["matrix_instructions"] + row["other_matrix_instructions"], row
        else:
            assert row["matrix_instructions"], row
            assert not row["other_matrix_instructions"], row


def _row(**changes: Any) -> Compiled:
    plain = {
        "operation": "attention", "kernel": "attention_forward", "label": "bf16", "tile": "m 128", "architecture": "sm_90",
        "registers": 128, "spilled": 0, "shared": 1000, "occupancy": 0.5, "matrix_instructions": 16,
        "other_matrix_instructions": 0, "tma": 4, "seconds": 1.0, "fits": True, "multiplies": True, "shipped": True,
    }  # fmt: skip
    return Compiled(**(plain | changes))


def test_faults_are_found() -> None:
    assert not faults(_row())
    assert faults(_row(spilled=8)) == ["spills 8 bytes"]
    assert not faults(_row(spilled=8, architecture="gfx942"))
    assert faults(_row(fits=False, shared=300_000)) == ["needs 300000 bytes of shared memory"]
    assert faults(_row(matrix_instructions=0)) == ["multiplies without tensor cores"]
    assert not faults(_row(matrix_instructions=0, multiplies=False))


def test_the_page_has_a_table_for_each_architecture() -> None:
    text = page([_row(), _row(architecture="sm_80", spilled=24)])
    assert text.count("| kernel |") == 2
    assert "| attention_forward | bf16 | m 128 | 128 | 24 | 1,000 | 50% | 16 | 4 | 1.0 |" in text


def test_occupancy_is_bounded_by_what_runs_out_first() -> None:
    sm_90 = ARCHITECTURES["sm_90"]
    assert occupancy(sm_90, registers=32, shared=0, warps=8) == 1.0
    assert occupancy(sm_90, registers=128, shared=0, warps=8) == 0.25
    assert occupancy(sm_90, registers=32, shared=100 * 1024, warps=8) == 0.25
    assert occupancy(sm_90, registers=32, shared=228 * 1024, warps=8) == 0.0
    assert occupancy(ARCHITECTURES["gfx942"], registers=128, shared=0, warps=4) == 0.5
