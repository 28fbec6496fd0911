"""What runs on a GPU alone says what is missing where there is none, and its checks can fail."""

import pytest
import torch

from raystride.triton_kernels import device_checks, sanitize
from raystride.triton_kernels.device_checks import DeviceCheck, run_checks
from raystride.triton_kernels.gelu import gelu, gelu_reference

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
    }
    monkeypatch.setattr(
        device_checks, "_calls", lambda device: [(name, call, gelu_reference, [(8, 8)]) for name, call in calls.items()]
    )
    checks = {check.name.split(",")[0]: check for check in run_checks(torch.device("cpu"), quick=True)}
    assert {name for name, check in checks.items() if check.failed} == {"wrong", "racy", "broken"}
    assert checks["wrong"].error > 1
    assert not checks["racy"].same_bits
    assert "RuntimeError" in checks["broken"].problem


def test_not_a_number_is_wrong() -> None:
    assert DeviceCheck("x", float("nan"), True).failed
