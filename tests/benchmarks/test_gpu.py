"""The GPU command without a GPU: rehearsed as it is called, and its training on this machine's processor."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_rows, kernels
from raystride.triton_kernels.device_checks import list_checks
from raystride.triton_kernels.dispatch import NotRun, kernels_ran, use_kernels, use_library
from raystride.triton_kernels.gelu import gelu, gelu_reference

ROOT = Path(__file__).resolve().parents[2]


def rehearse(file: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """The command's exit code, its figures and what it printed; tiles alone, fifty times as fast as predicted."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "50", "--only", "tiles*", "--output", str(file), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(file.read_text()), done.stdout


@pytest.mark.long
@pytest.mark.weekly
def test_a_rehearsal_with_every_fault_leaves_figures_and_a_second_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    names = [row.name for row in gpu_rows.rows(tmp_path, rounds=3) if row.name.startswith("tiles")]
    ways = ("raises", "loses", "hangs", "dies")
    faults = [word for way, name in zip(ways, names, strict=False) for word in ("--fault", f"{way}={name}")]
    code, found, said = rehearse(file, "--budget", "6000", *faults)
    assert code == 1
    assert list(found["rows"]) == names
    assert found["left_out"] == []
    for name, what in zip(names, ("out of memory", "illegal memory access", "it was ended", "ended with 139"), strict=False):
        assert what in found["rows"][name]["error"]
    assert all(found["rows"][name]["result"] == {"rehearsed_s": 30.0} for name in names[4:])
    assert "4 failed, 0 left out" in said

    short = tmp_path / "short.json"
    _, found, said = rehearse(short, "--budget", "1.0")  # over before anything has begun
    assert (found["rows"], found["left_out"]) == ({}, names)
    _, after, _ = rehearse(short, "--budget", "6000", "--resume")
    assert list(after["rows"]) == names


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 3
    assert "nothing was measured" in capsys.readouterr().err


def test_a_rehearsal_tells_what_was_not_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    names = [row.name for row in gpu_rows.rows(tmp_path, rounds=3) if row.name.startswith("tiles")]
    faults = ("--fault", f"falls_back={names[0]}", "--fault", f"no_compiler={names[2]}")
    code, found, said = rehearse(file, "--budget", "6000", *faults)
    assert code == 3
    assert found["rows"][names[0]]["not_run"] == "not run: gelu runs in PyTorch, as rehearsed"
    assert found["left_out"] == names[3:], "nothing is begun where nothing can be compiled"
    assert f"1 rows measured, 0 failed, 2 not run, {len(names) - 3} left out" in said


def test_a_machine_without_nvidia_smi_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpu.power_limit() is None
    assert gpu.device()["gpu"] == "rehearsal"


def test_one_launch_is_a_kernels_or_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_rows.launch_once("cpu")["verdict"].startswith("right"), "by the interpreter"
    monkeypatch.setattr("raystride.triton_kernels.device_checks.can_launch", lambda device: False)
    with pytest.raises(NotRun, match="no GPU is to be seen"):
        gpu_rows.launch_once("cpu")


def test_every_row_of_a_kernel_begins_in_one_state_and_leaves_it() -> None:
    x = torch.randn(2, 8)
    for disturb in (partial(use_kernels, "torch"), partial(use_kernels, "triton"), partial(use_library, True)):
        disturb()
        torch.use_deterministic_algorithms(True)
        with gpu_rows.one_state():
            assert not torch.are_deterministic_algorithms_enabled()
            gelu(x)
            assert kernels_ran() == {"gelu": "torch"}
            disturb()
        gelu(x)
        assert kernels_ran()["gelu"] == "torch", "what a row chose ends with it"


@pytest.mark.parametrize(
    ("ours", "said"),
    [(gelu, ""), (gelu_reference, "it launched no kernel"), (lambda x: gelu(x.double()), "gelu runs in PyTorch")],
)
def test_ours_is_a_kernel_or_the_row_is_not_run(ours: Any, said: str) -> None:
    x = torch.randn(2, 8)
    case = kernels.Case("gelu", "small", lambda: {"PyTorch": lambda: gelu_reference(x), "ours": lambda: ours(x)})
    with gpu_rows.one_state(), pytest.raises(NotRun, match=said) if said else nullcontext():
        kernels.make_ways(case)["ours"]()
        assert kernels_ran() == {"gelu": "triton"}


def test_a_training_that_ran_otherwise_than_it_says_is_not_a_figure() -> None:
    gpu_rows.expect_kernels({"attention": "library", "gelu": "triton"}, "triton")
    gpu_rows.expect_kernels({"attention": "torch"}, "torch")
    for ran, choice in (({"gelu": "torch: rows"}, "triton"), ({"gelu": "torch"}, "triton"), ({"gelu": "triton"}, "torch")):
        with pytest.raises(NotRun, match="gelu by"):
            gpu_rows.expect_kernels(ran, choice)


def test_trainings_and_checks_have_processes_of_their_own_and_none_is_of_69_gb(tmp_path: Path) -> None:
    rows = {row.name: row for row in gpu_rows.rows(tmp_path, 1)}
    for name, row in rows.items():
        trains, checks = name.startswith(("lm_", "the same bits")), name.startswith(("check", "compute", "Nsight"))
        assert row.place == ("child" if trains else "children" if checks else "here"), name
    shipped = rows["check what ships, bfloat16"].measure
    assert isinstance(shipped, partial)
    names = [item.call for item in list_checks("cpu", patterns=shipped.args[0])]
    assert len(names) > 20
    assert not any("far" in name for name in names)


def test_its_rows_are_named_once_and_come_in_the_order_of_their_worth(tmp_path: Path) -> None:
    rows = list(gpu_rows.rows(tmp_path, rounds=1))
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    kinds = [name.split()[0].rstrip(":") for name in names]
    order = [
        kinds.index(kind) for kind in ("one", "check", "lm_124m", "attention", "lm_1b", "the", "compute-sanitizer", "tiles")
    ]
    assert order == sorted(order)
    first_kernel, first_training = kinds.index("attention"), kinds.index("lm_124m")
    assert names[first_kernel].startswith("attention: D 128, T 4096, causal")
    assert sum(row.seconds for row in rows[:first_kernel]) < 500, "within it GPT-2 small is trained in three ways"
    assert sum(row.seconds for row in rows[:first_training]) < 120


def test_all_its_trainings_are_ones_that_settings_allow(tmp_path: Path) -> None:
    """What would be found out on the GPU only, where minutes are counted."""
    trainings = [row.measure for row in gpu_rows.rows(tmp_path, 1) if row.name.startswith("lm_")]
    assert len(trainings) > 8
    for training in trainings:
        assert isinstance(training, partial)
        config, model = training.args
        replace(config, model=replace(config.model, **model), train=replace(config.train, **training.keywords))


def test_its_trainings_run_on_a_processor_too() -> None:
    small = gpu_rows.gpt2_small()
    tiny = replace(
        small,
        model=replace(small.model, layers=1, hidden_size=16, heads=2, context=32),
        train=replace(small.train, hours=0, steps=2, slots=2, slot_size=2, precision="fp32"),
        tokenizer=replace(small.tokenizer, vocabulary_size=300),
    )
    found = gpu_rows.train(tiny, gpu_rows.PYTORCH, device="cpu")
    assert found["steps"] == 2
    assert found["tokens_per_second"] > 0
    assert len(found["parameters_sha256"]) == 64
    assert gpu_rows.one_billion().model.hidden_size == 2048
