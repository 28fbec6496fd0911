"""Nsight around real jobs: nsys itself where it is installed; for ncu, which needs a GPU, a program that answers like it."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from shutil import which

import pytest
import yaml

from raystride.pipelines.observability.profiling.nsight import SystemsWindow
from raystride.pipelines.observability.profiling.nsight_commands import NSYS_SESSION_VARIABLE, worker_executable
from raystride.pipelines.observability.profiling.nsight_compute import (
    COMPUTE_METRIC,
    DURATION_METRIC,
    MEMORY_METRIC,
    explain_missing_report,
    parse_speed_of_light,
)
from raystride.pipelines.observability.profiling.profile import ProfileError
from tests.tiny import write_text

ROOT = Path(__file__).resolve().parents[4]
TABLE = f'''"ID","Kernel Name","{DURATION_METRIC}","{COMPUTE_METRIC}","{MEMORY_METRIC}"
"","","us","%","%"
"0","gemm_128x64","41.50","71.25","33.10"
"1","add_layer_norm","1,205.00","12.50","88.75"
'''
NCU = """#!/bin/sh
if [ "$1" = --import ]; then cat "$(dirname "$0")/table.csv"; exit; fi
while [ "$1" != --export ]; do [ "$1" = --log-file ] && log="$2"; shift; done
out="$2.ncu-rep"; shift 2
"$@"; code=$?
echo "==PROF== Report" > "$log"; touch "$out"; exit $code
"""


def job(folder: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The main job on a tiny model, eight steps long."""
    settings = {
        "data": {"source": str(write_text(folder)), "kind": "text", "validation": "tail", "validation_fraction": 0.1},
        "tokenizer": {"kind": "bytes"},
        "model": {"layers": 2, "heads": 2, "hidden_size": 16, "context": 16},
        "train": {"steps": 8, "slots": 2, "slot_size": 2, "log_every": 2},
        "optimizer": {"warmup_steps": 2},
        "validation": {"every": 0, "samples": 4},
        "checkpoint": {"every": 0},
        "sample": {"tokens": 0},
        "scaling": {"workers": 1, "device": "cpu", "threads": 1},
        "profile": {"steps": [3, 5]},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "ray_jobs/train.py", "--config", str(folder / "job.yaml"), "--storage", str(folder / "runs")]
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    given = [*command, "--run", "r", *arguments]
    return subprocess.run(given, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("launch", ["inline", "ray"])
@pytest.mark.long
def test_nsys_collects_the_window_and_its_summary_names_our_ranges(tmp_path: Path, launch: str) -> None:
    if which("nsys") is None:
        pytest.skip("nsys is not installed")
    pytest.importorskip("nvtx")
    given = ("--profile.tool", "nsys", "--launch", launch, "--record.mlflow", "false")
    done = job(tmp_path, *given)
    if "Local Endpoint is not available" in done.stderr:  # on a busy machine nsys may give up its own daemon too soon
        done = job(tmp_path, *given)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "r" / "profiles"
    assert "warning" not in done.stdout, done.stdout
    assert (folder / "nsys-rank0-steps3-5.nsys-rep").stat().st_size > 10_000
    rows = json.loads((folder / "nsys-rank0-steps3-5-nvtx_sum.json").read_text())
    assert {row["Range"].lstrip(":"): row["Instances"] for row in rows}["step"] == "3"
    assert "forward" in (folder / "nsys-rank0-steps3-5.html").read_text()


def test_a_program_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    for tool in ("nsys", "ncu"):
        if which(tool) is None:
            done = job(tmp_path, "--profile.tool", tool, "--launch", "inline")
            assert done.returncode == 2
            assert (
                f"profile.tool is '{tool}': it needs the program {tool}, which is not there: install Nsight" in done.stderr
            )
            assert not (tmp_path / "runs" / "r").exists()


@pytest.mark.long
def test_ncu_runs_the_job_once_more_and_its_figures_become_a_page(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ncu").write_text(NCU)
    (programs / "ncu").chmod(0o755)
    (programs / "table.csv").write_text(TABLE)
    done = job(tmp_path, "--profile.tool", "ncu", "--launch", "inline", "--record.mlflow", "false", path=str(programs))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "r"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 8
    assert f"profile  {folder}/profiles/ncu.html" in done.stdout
    text = (folder / "profiles" / "ncu.html").read_text()
    assert "The longest is add_layer_norm: 1205.0 µs at 12 % of the peak of arithmetic and 89 % of that of memory" in text
    assert (folder / "profiles" / "ncu.ncu-rep").exists()


def test_speed_of_light_comes_in_microseconds() -> None:
    rows = parse_speed_of_light(TABLE.replace('"us"', '"ns"'))
    assert rows[1] == {"kernel": "add_layer_norm", "us": pytest.approx(1.205), "compute_%": 12.5, "memory_%": 88.75}
    assert parse_speed_of_light("==WARNING== nothing\n") == []


def test_a_report_that_is_not_there_has_a_reason() -> None:
    assert "RestrictProfilingToAdminUsers=0" in explain_missing_report("==ERROR== ERR_NVGPUCTRPERM - The user does not ...")
    assert "profile.kernel" in explain_missing_report("==WARNING== No kernels were profiled.")


def test_a_worker_on_a_node_without_nsys_is_plain_python() -> None:
    shell = f"exec {worker_executable('cpu')} -c 'import sys; print(sys.argv[1:])' 'two words' \\$x"
    bash = which("bash")
    done = subprocess.run(
        [str(bash), "-c", shell], env={"PATH": "/nowhere:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['two words', '$x']", done.stderr


NSYS = """#!/bin/sh
for word; do case "$word" in --output=*) echo "${word#--output=}" > "$(dirname "$0")/out";; esac; done
[ "$1" = stop ] && case $LEAVES in report) touch "$(cat "$(dirname "$0")/out").nsys-rep";;
    raw) touch "$(cat "$(dirname "$0")/out").qdstrm"; echo "importer binary not found";; esac
exit 0
"""


@pytest.mark.parametrize(
    ("leaves", "reason"),
    [
        ("raw", r"report\.qdstrm: .*QdstrmImporter"),
        ("report", r"ranges.*NVTX"),
        ("nothing", r"nsys .*: nothing$"),
    ],
)
def test_a_report_that_is_no_report_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str, reason: str
) -> None:
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LEAVES", leaves)
    monkeypatch.setenv(NSYS_SESSION_VARIABLE, "s1")
    monkeypatch.setattr("raystride.pipelines.observability.profiling.nsight.nvtx_listener", lambda: nullcontext)
    window = SystemsWindow()
    window.open()
    with pytest.raises(ProfileError, match=reason):
        window.close(tmp_path, "nsys-rank0-steps3-5")
    assert (tmp_path / "nsys-rank0-steps3-5.nsys-rep").exists() == (leaves == "report")
