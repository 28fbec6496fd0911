"""Programs for a GPU name what is missing without one, and the device checks can fail."""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernel_tools import sanitize
from raystride.triton_kernels import device_checks
from raystride.triton_kernels.device_checks import (
    PROVED_WITH,
    CheckItem,
    DeviceCheck,
    list_checks,
    operation_of,
    run_checks,
    run_in_children,
)
from raystride.triton_kernels.dispatch import NoCompiler
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.launch import use_launcher

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_without_a_gpu_sanitizers_say_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main([]) == 3
    said = capsys.readouterr().err
    assert "an NVIDIA GPU that PyTorch can see" in said
    assert "make test" in said


@needs_no_gpu
def test_without_a_gpu_the_device_checks_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_checks.main([]) == 3
    assert "there is no GPU to be seen" in capsys.readouterr().err


def test_the_checks_tell_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter(range(1, 1000))
    calls = {
        "right": gelu,
        "wrong": lambda x: gelu(x) * 1.05,
        "racy": lambda x: gelu(x) + next(noise),
        "broken": lambda x: gelu(x.view(3, 5)),
        "PyTorch": gelu_reference,
        "refused": lambda x: gelu(x.double()),
    }
    checked = [(name, call, gelu_reference, [(8, 8)]) for name, call in calls.items()]
    monkeypatch.setattr(device_checks, "_iterate_calls", lambda device: checked)
    checks = {check.name.split(",")[0]: check for check in run_checks(torch.device("cpu"), quick=True)}
    assert {name for name, check in checks.items() if check.failed} == {"wrong", "racy", "broken"}
    assert checks["wrong"].error > 1
    assert not checks["racy"].same_bits
    assert "RuntimeError" in checks["broken"].problem
    assert checks["PyTorch"].verdict == "not run: it launched no kernel"
    assert checks["refused"].verdict == "not run: gelu runs in PyTorch: dtype torch.float64"


FATES = {"right": "", "raises": "ValueError: no", "crashes": "its process ended with -11", "hangs": "it was ended after"}


def run_with_fate(item: CheckItem) -> DeviceCheck:
    """Stands for a check in a child, by the call's name."""
    if item.call == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item.call == "hangs":
        time.sleep(600)
    if item.call in ("raises", "no compiler"):
        raise ValueError("no" if item.call == "raises" else "Failed to find C compiler. Please specify via CC")
    return DeviceCheck(item.call, 0.5, True)


def items(*calls: str) -> list[CheckItem]:
    return [CheckItem("cpu", call, torch.bfloat16, quick=True) for call in calls]


def test_a_check_that_crashes_or_hangs_is_wrong_and_alone() -> None:
    chosen = items(*FATES, "right", "right")
    found = [check for _, check in run_in_children(chosen, processes=2, timeout_s=40.0, run=run_with_fate)]
    assert len(found) == len(chosen)
    for name, problem in FATES.items():
        check = next(check for check in found if check.name.split(",")[0] == name)
        assert check.problem.startswith(problem)
        assert check.failed == bool(problem)
    assert sum(not check.failed for check in found) == 3


def test_without_a_compiler_no_further_check_is_begun() -> None:
    with pytest.raises(NoCompiler, match="install a C compiler"):
        list(run_in_children(items("no compiler", "hangs"), processes=1, run=run_with_fate))


def test_where_no_kernel_can_run_the_program_says_not_run() -> None:
    """By the program itself, outside the interpreter."""
    command = [
        sys.executable,
        "-m",
        "raystride.triton_kernels.device_checks",
        "--device",
        "cpu",
        "--quick",
        "--only",
        "gelu*",
    ]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("not run: no GPU is to be seen") == 2
    assert "0 wrong, 2 not run" in done.stdout


def test_every_operation_of_the_dispatch_has_checks() -> None:
    """An operation without one could never be proved, and `auto` would never take its kernel."""
    named = {
        ast.literal_eval(node.args[0])
        for path in Path(str(device_checks.__file__)).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "takes_triton"
        and isinstance(node.args[0], ast.Constant)
    }
    named |= {"linear_log_probabilities", "linear_cross_entropy_sharded"}  # by a variable there
    assert named == {operation_of(item.call) for item in list_checks("cpu")} | set(PROVED_WITH)
    assert {operation_of(item.call) for item in list_checks("cpu", quick=True)} == named - set(PROVED_WITH)


@pytest.mark.weekly
@pytest.mark.parametrize("number", [*range(7), pytest.param(7, marks=pytest.mark.long), 8])
def test_far_calls_look_at_the_same_numbers(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """On a GPU there are 2^31 elements in front of these; here a few thousand, which is what the interpreter can do."""
    monkeypatch.setattr(device_checks, "FAR", 3000)
    name, ours, reference, shapes = list(device_checks.large_offset_calls(torch.device("cpu")))[number]
    small = [tuple(min(size, 24) for size in shape) for shape in shapes]
    if name.startswith("rope"):
        small = [(2, 4, 333, 64), (2, 2, 333, 64)]
    check = device_checks._run_check(name, ours, reference, [torch.randn(shape) for shape in small], 2)
    assert not check.failed, check


@pytest.mark.parametrize("calls", [device_checks._iterate_calls, device_checks._iterate_quick_calls])
def test_every_kernel_is_checked_and_looked_at_by_the_sanitizer(
    calls: Callable[[torch.device], Iterator[device_checks.Call]],
) -> None:
    """Launched by the list, on this machine's shapes; a kernel that is not there would never run on a device."""
    launched: set[str] = set()
    with use_launcher(lambda kernel, grid, arguments, named: launched.add(kernel.fn.__name__)):
        for _, ours, _, shapes in calls(torch.device("cpu")):
            device_checks.value_and_gradients(ours, [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes])
    kernels = {
        node.name
        for path in Path(str(device_checks.__file__)).parent.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }
    assert launched == kernels


@pytest.mark.parametrize("name", ["linear_cross_entropy_sharded, 1000 words", "byte_pack", "byte_pack_sequence"])
def test_calls_and_references_that_are_put_together_here_agree(name: str) -> None:
    calls = {call[0]: call[1:] for call in device_checks._iterate_calls(torch.device("cpu"))}
    ours, reference, shapes = calls[name]
    check = device_checks._run_check(name, ours, reference, [torch.randn(shape) for shape in shapes], 1)
    assert not check.failed, check


def test_far_calls_are_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once would not fit the device's memory, and count as wrong."""
    far = [(f"gelu {size}, far", gelu, gelu_reference, [(size, 8)]) for size in range(1, 4)]
    monkeypatch.setattr(device_checks, "_iterate_calls", lambda device: far)
    parts = [[c.name for c in run_checks(torch.device("cpu"), patterns=("*bfloat16",), part=(i, 3))] for i in range(3)]
    assert [len(part) for part in parts] == [3, 0, 0]


def _sdpa(reference: Callable[..., torch.Tensor], inputs: list[torch.Tensor], math: bool) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH) if math else nullcontext():
        return device_checks.value_and_gradients(reference, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_either_of_pytorchs_implementations_passes_as_ours_beside_the_other(dtype: torch.dtype) -> None:
    """Both are right: its math backend, and the FlashAttention of this processor; three percent too much is not."""
    calls = [
        call
        for call in device_checks._iterate_attention_calls(torch.device("cpu"))
        if call[0] in ("attention, causal", "attention, full", "attention, causal and key lengths") or "D 64, 1 x" in call[0]
    ]
    assert len(calls) > 4
    for name, _, reference, shapes in calls:
        torch.manual_seed(0)
        inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
        exact = device_checks.value_and_gradients(reference, [x.double() for x in inputs], dtype)
        flash, math = (_sdpa(reference, inputs, math=math) for math in (False, True))
        for mine, theirs in ((flash, math), (math, flash)):
            assert device_checks.worst_error(name, mine, theirs, exact) <= 1, name
            for number in range(1, 4):
                wrong = [x * 1.03 if place == number else x for place, x in enumerate(mine)]
                assert device_checks.worst_error(name, wrong, theirs, exact) > 1, (name, number)


def test_not_a_number_is_wrong() -> None:
    assert DeviceCheck("x", float("nan"), True).failed


def test_parts_of_the_chosen_checks_are_all_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [(f"gelu {size}", gelu, gelu_reference, [(size, 8)]) for size in range(1, 8)]
    monkeypatch.setattr(device_checks, "_iterate_calls", lambda device: calls)
    monkeypatch.setattr(device_checks, "REPEATS", 1)
    chosen = ("gelu ?, bfloat16", "gelu 1, float32")
    parts = [[c.name for c in run_checks(torch.device("cpu"), patterns=chosen, part=(i, 3))] for i in range(3)]
    whole = [check.name for check in run_checks(torch.device("cpu"), patterns=chosen)]
    assert len(whole) == 8
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
