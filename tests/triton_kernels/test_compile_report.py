"""Kernels as compiled for GPUs that are not here: what we ship neither spills nor outgrows shared memory, on tensor cores.

What is looked at are the committed tables, by the Triton that is installed and by the oldest that is admitted; that the
first tells of the kernels as they are, a sample shows that is compiled here. To make them again:

    python -m raystride.triton_kernels.compile_report --write docs/kernels.md
    make report-3.6
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.files import Folder
from raystride.triton_kernels.architectures import ARCHITECTURES, occupancy
from raystride.triton_kernels.compile_report import Compiled, compiled_page, faults
from tests.some import some
from tests.triton_kernels import compiled
from tests.triton_kernels.compiled import BY_TRITON_3_6, TABLE, Cells, sample, state, table

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def now() -> dict[str, list[Cells]]:
    """What the kernels would launch now, and the sample of the table's rows compiled again; once for the same kernels."""
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


def _shipped(page: Path = TABLE) -> list[dict[str, str]]:
    names = ["architecture", "kernel", "label", "tile", "registers", "spilled", "shared", "occupancy", "matrix", "tma", "s"]
    rows = [dict(zip(names, row, strict=True)) for row in table(page)]
    return [row for row in rows if "alternative" not in row["label"]]


@pytest.mark.long
def test_the_table_has_what_is_launched_and_no_more(now: dict[str, list[Cells]]) -> None:
    assert [row[:3] for row in table()] == [launch[:3] for launch in now["launches"]]
    for row, launch in zip(table(), now["launches"], strict=True):
        blocks = [part for part in row[3].split(", ") if not part.endswith(("warps", "stages", "at most"))]
        assert blocks == launch[3:], (row, launch)


@pytest.mark.long
def test_the_table_has_what_is_compiled(now: dict[str, list[Cells]]) -> None:
    rows = table()
    for number, found in some(zip(sample(rows), now["rows"], strict=True)):
        assert rows[number][:-1] == found[:-1]  # the last is how long it took


@pytest.mark.parametrize("page", [TABLE, BY_TRITON_3_6], ids=lambda page: page.stem)
def test_nothing_that_is_shipped_has_a_fault(page: Path) -> None:
    for row in some(_shipped(page)):
        architecture = ARCHITECTURES[row["architecture"]]
        assert architecture.backend != "cuda" or row["spilled"] == "0", row
        assert int(row["shared"].replace(",", "")) <= architecture.shared_of_block, row
        assert row["matrix"] != "0" or "fp32" in row["label"], row


def test_every_kernel_of_the_package_is_compiled_for_every_architecture() -> None:
    kernels = set()
    for path in (ROOT / "triton_kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels.add(node.name.strip("_").removesuffix("_kernel"))
    assert len(kernels) > 20
    for architecture in ARCHITECTURES:
        assert {row["kernel"] for row in _shipped() if row["architecture"] == architecture} == kernels


def test_the_older_triton_compiles_the_same_kernels() -> None:
    """Made by hand, in an environment of its own: `make report-3.6`. That none spills stands on the kernels' page."""
    names = ("architecture", "kernel", "label")
    rows = _shipped(BY_TRITON_3_6)
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in _shipped()]
    nvidia = [row for row in rows if ARCHITECTURES[row["architecture"]].backend == "cuda"]
    assert f"none of {len(nvidia)} spills" in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.long
def test_the_older_triton_would_compile_what_its_table_has(now: dict[str, list[Cells]]) -> None:
    rows = table(BY_TRITON_3_6)
    assert len(rows) == len(now["launches_3_6"])
    for row, launch in zip(rows, now["launches_3_6"], strict=True):
        assert row[:3] == launch[:3]
        assert set(launch[3:]) <= set(row[3].split(", ")), (row, launch)


def test_matrix_kernels_use_the_newest_tensor_cores() -> None:
    multiplying = [row for row in _shipped() if row["matrix"] != "-" and "bf16" in row["label"]]
    assert {row["architecture"] for row in multiplying} == set(ARCHITECTURES)
    for row in multiplying:
        # Decoding has 16 rows, fewer than the 64 that the newest instructions work on, and so have the keys of large heads
        # with a window, dropout or lengths, and those of 128 with dropout and another: more do not fit the registers.
        wide = "D 256" in row["label"] and "causal" not in row["label"]
        both = "D 128" in row["label"] and any(what in row["label"] for what in ("dropout and window", "dropout, window"))
        both |= "D 128 packed and dropout" in row["label"]
        few = row["kernel"] == "attention_backward_keys" and (wide or both)
        assert "decoding" in row["kernel"] or few or "older" not in row["matrix"], row


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
    text = compiled_page([_row(), _row(architecture="sm_80", spilled=24)])
    assert text.count("| kernel |") == 2
    assert "| attention_forward | bf16 | m 128 | 128 | 24 | 1,000 | 50% | 16 | 4 | 1.0 |" in text


def test_occupancy_is_bounded_by_what_runs_out_first() -> None:
    sm_90 = ARCHITECTURES["sm_90"]
    assert occupancy(sm_90, registers=32, shared=0, warps=8) == 1.0
    assert occupancy(sm_90, registers=128, shared=0, warps=8) == 0.25
    assert occupancy(sm_90, registers=32, shared=100 * 1024, warps=8) == 0.25
    assert occupancy(sm_90, registers=32, shared=228 * 1024, warps=8) == 0.0
    assert occupancy(ARCHITECTURES["gfx942"], registers=128, shared=0, warps=4) == 0.5
