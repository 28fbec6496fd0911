"""Dispatch: the implementation that runs, and its warnings."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.configurations import uncovered_reason
from raystride.triton_kernels.dispatch import kernels_ran, takes_triton, use_kernels
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.launch import assumed_architecture

ROOT = Path(__file__).resolve().parents[2]


def test_auto_takes_pytorch_on_a_cpu_even_in_the_interpreter() -> None:
    use_kernels("auto")
    assert not takes_triton("gelu", torch.zeros(1))
    assert kernels_ran() == {"gelu": "torch"}


def test_a_refusal_is_said_once_with_its_reason() -> None:
    with pytest.warns(UserWarning, match="gelu runs in PyTorch, not in Triton: too wide"):
        assert not takes_triton("gelu", torch.zeros(1), refusal="too wide")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not takes_triton("gelu", torch.zeros(1), refusal="too wide")
    assert kernels_ran() == {"gelu": "torch: too wide"}


def test_a_dtype_that_no_kernel_has_is_a_refusal() -> None:
    x = torch.randn(3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="gelu runs in PyTorch, not in Triton: dtype torch.float64"):
        assert torch.equal(gelu(x), gelu_reference(x))


def test_a_gpu_without_tiles_takes_pytorch_and_says_so() -> None:
    """Of Turing a block has 64 KiB of shared memory, and attention's gradients need more."""
    q = torch.randn(1, 1, 4, 16, requires_grad=True)
    with assumed_architecture("sm_75"), pytest.warns(UserWarning, match="attention runs in PyTorch.*sm_75"):
        attention(q, q, q).sum().backward()
    assert "sm_75" in uncovered_reason("sm_75")
    assert not uncovered_reason("sm_89", 99 << 10)
    assert "64 KiB" in uncovered_reason("sm_80", 64 << 10)


def test_what_ran_is_known_after_compilation_too() -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: gelu(x), fullgraph=True, backend="aot_eager")(torch.randn(4))
    assert kernels_ran() == {"gelu": "triton"}


def test_another_word_is_an_error() -> None:
    with pytest.raises(ValueError, match="'cuda' is none of auto, triton, torch"):
        use_kernels("cuda")


def _run(program: str, interpret: str | None = "0") -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": interpret} if interpret else {}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_is_refused_where_nothing_can_run_it() -> None:
    program = """
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.configurations import uncovered_reason
from raystride.triton_kernels.dispatch import use_kernels
try:
    use_kernels("triton")
except ValueError as error:
    print(error)
"""
    said = _run(program)
    assert "model.kernels triton: no GPU is to be seen" in said
    assert "use auto or torch" in said


@pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="a PyTorch that launches kernels")
def test_a_pytorch_for_cpus_does_without_triton() -> None:
    program = """
import sys
import raystride.pipelines.train.worker.run
from benchmarks.kernel_tools.compilation import record_launches
from raystride.triton_kernels.dispatch import triton_unavailable_reason
print("triton" in sys.modules, triton_unavailable_reason())
try:
    record_launches("sm_90", "gelu")
except RuntimeError as error:
    print(error)
"""
    loaded, refused = _run(program, interpret=None).splitlines()
    assert loaded.startswith("False no GPU is to be seen")
    assert "TRITON_INTERPRET=0" in refused


def test_without_triton_everything_imports_and_pytorch_computes() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.configurations import uncovered_reason
from raystride.triton_kernels.dispatch import use_kernels
from raystride.triton_kernels.gelu import _gelu_forward_kernel
ids = torch.zeros(1, 8, dtype=torch.int64)
print(Decoder(ModelConfig(layers=1, heads=1, hidden_size=8, context=8), 5)(ids, ids)[1].item())
for attempt in (lambda: use_kernels("triton"), _gelu_forward_kernel):
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        print(error)
"""
    counted, refused, missing = _run(program, interpret="1").splitlines()
    assert counted == "8"
    assert "Triton is not installed" in refused
    assert "set --model.kernels torch" in missing
