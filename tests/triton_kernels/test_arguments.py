"""Invalid arguments are refused before a kernel sees them, with an error that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raystride.triton_kernels.adamw import adamw
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.byte_pack import byte_pack
from raystride.triton_kernels.convolution import convolution
from raystride.triton_kernels.geglu import geglu
from raystride.triton_kernels.launch import use_launcher
from raystride.triton_kernels.layer_norm import add_layer_norm, layer_norm
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy
from raystride.triton_kernels.mse import mse
from raystride.triton_kernels.rms_norm import add_rms_norm, rms_norm
from raystride.triton_kernels.rope import rope
from raystride.triton_kernels.swiglu import swiglu

FAR = torch.device("meta")
Q, K = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 7, 16)
FOUR = torch.ones(2, 4, 7, 16)
"""Heads of which six are no multiple."""
X, W, T = torch.randn(4, 8), torch.randn(9, 8), torch.zeros(4, dtype=torch.int64)
IMAGES = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3), torch.randn(5)
OFFSETS = torch.tensor([0, 4], dtype=torch.int32)


def _packed(**changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {"q": X[:, None], "k": X[:, None], "v": X[:, None], "query_offsets": OFFSETS}
    return attention_packed(**({"key_offsets": OFFSETS} | given | changes))


def _adamw(**changes: Any) -> None:
    given: dict[str, Any] = {name: [X.clone()] for name in ("parameters", "gradients", "exp_avgs", "exp_avg_sqs")}
    rest = {"steps": [torch.ones(())], "learning_rate": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "decay": 0.0}
    adamw(**(given | rest | changes))


WRONG: list[tuple[str, Callable[[], Any]]] = [
    (r"the heads of q must be a multiple .* q \(2, 6, 5, 16\), k \(2, 4, 7", lambda: attention(Q, FOUR, FOUR)),
    (r"q, k and v must have 4 dimensions, but are q \(4, 8\)", lambda: attention(X, X, X)),
    (r"k and v must have the batch", lambda: attention(Q, K[:1], K[:1])),
    (r"k and v must have the batch", lambda: attention(Q, K, K[:, :, :6])),
    (r"k and v must have the batch and the head size of q", lambda: attention(Q, K[..., :8], K[..., :8])),
    (r"k must be on cpu, as what comes before it, but is on meta", lambda: attention(Q, K.to(FAR), K.to(FAR))),
    (r"key_lengths must be of shape \(2,\), but is of shape \(1,\)", lambda: attention(Q, K, K, key_lengths=T[:1])),
    (r"key_lengths must be of torch.int32 or torch.int64", lambda: attention(Q, K, K, key_lengths=torch.ones(2))),
    (r"key_lengths must be on cpu", lambda: attention(Q, K, K, key_lengths=T[:2].to(FAR))),
    (r"softcap must be at least 0, which is none, but is -1", lambda: attention(Q, K, K, softcap=-1)),
    (r"dropout must be between 0 and 1, but is 1.5", lambda: attention(Q, K, K, dropout=1.5)),
    (r"seed must be a single number", lambda: attention(Q, K, K, dropout=0.5, seed=T)),
    (r"seed must be of torch.int64 or torch.int32", lambda: attention(Q, K, K, dropout=0.5, seed=T.float())),
    (r"seed must be of shape \(2,\)", lambda: attention(Q, K, K, dropout=0.5, seed=T.int())),
    (r"query_offsets must be of torch.int32", lambda: _packed(query_offsets=OFFSETS.float())),
    (r"key_offsets must be of shape \(2,\), but is of shape \(3,\)", lambda: _packed(key_offsets=T[:3])),
    (r"q, k and v must have 3 dimensions", lambda: _packed(q=X)),
    (r"targets must be of shape \(4,\), but is of shape \(3,\)", lambda: linear_cross_entropy(X, W, T[:3])),
    (r"targets must be of torch.int64", lambda: linear_cross_entropy(X, W, T.int())),
    (r"targets must be on cpu", lambda: linear_cross_entropy(X, W, T.to(FAR))),
    (r"weight must be of shape \(9, 8\), but is of shape \(9, 7\)", lambda: linear_cross_entropy(X, W[:, :7], T)),
    (r"label_smoothing must be between 0 and 1, but is 2", lambda: linear_cross_entropy(X, W, T, label_smoothing=2)),
    (r"rms_norm: weight must be on cpu", lambda: rms_norm(X, W[0].to(FAR))),
    (r"residual must be on cpu", lambda: add_rms_norm(X, X.to(FAR), W[0])),
    (r"bias must be on cpu", lambda: layer_norm(X, W[0], W[0].to(FAR))),
    (r"residual must be on cpu", lambda: add_layer_norm(X, X.to(FAR), W[0])),
    (r"up must be on cpu", lambda: swiglu(X, X.to(FAR))),
    (r"up must be on cpu", lambda: geglu(X, X.to(FAR))),
    (r"target must be on cpu", lambda: mse(X, X.to(FAR))),
    (r"rope: q_weight must be of shape \(16,\)", lambda: rope(Q, Q, Q[:1, :1], Q[:1, :1], W[0], W[0])),
    (r"rope: q_weight and k_weight must both be given", lambda: rope(Q, Q, Q[:1, :1], Q[:1, :1], Q[0, 0, 0])),
    (r"sin must be on cpu", lambda: rope(Q, Q, Q[:1, :1], Q[:1, :1].to(FAR))),
    (r"offsets must be on cpu", lambda: byte_pack(T.to(torch.uint8), T.to(FAR), length=3)),
    (r"must be as many, but are \[1, 1, 1, 1, 2\]", lambda: _adamw(steps=[torch.ones(())] * 2)),
    (r"gradients\[0\] must be of shape \(4, 8\), but is of shape \(3, 8\)", lambda: _adamw(gradients=[X[:3]])),
    (r"exp_avgs\[0\] must be of shape \(4, 8\)", lambda: _adamw(exp_avgs=[X[:3]])),
    (r"x must be \(B, C, H, W\), but is of shape \(4, 8\)", lambda: convolution(X, IMAGES[1], IMAGES[2])),
    (r"weight must be \(O, C, S, S\), S odd, but", lambda: convolution(IMAGES[0], IMAGES[1][..., :2], IMAGES[2])),
    (r"weight must be of shape \(5, 3, 3, 3\)", lambda: convolution(IMAGES[0], IMAGES[1][:, :2], IMAGES[2])),
    (r"bias must be of shape \(5,\)", lambda: convolution(*IMAGES[:2], torch.ones(4))),
    ("copies must be as many as the 1 parameters or none, but are 2", lambda: _adamw(copies=[X, X])),
    (r"copies\[0\] must be of shape \(4, 8\)", lambda: _adamw(copies=[X[:3]])),
    ("stochastic rounding is for bfloat16 .* but they are torch.float32", lambda: _adamw(stochastic=True)),
    ("but they have copies", lambda: _adamw(copies=[X], stochastic=True)),
    (r"skip must be of shape \(\)", lambda: _adamw(skip=torch.zeros(2))),
]  # fmt: skip


@pytest.mark.parametrize(("said", "call"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_argument_is_named(said: str, call: Callable[[], Any]) -> None:
    launched: list[str] = []
    with use_launcher(lambda kernel, *_: launched.append(kernel.fn.__name__)), pytest.raises(ValueError, match=said):
        call()
    assert not launched


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_what_would_lose_digits_is_left_to_pytorch() -> None:
    assert mse(X, X.double()).dtype == torch.float64
    assert add_rms_norm(X, X.double(), W[0])[1].dtype == torch.float64
    angles = torch.ones(1, 1, 5, 16, dtype=torch.float64)
    assert rope(Q, Q, angles, angles)[0].dtype == torch.float32


@pytest.mark.parametrize("wrong", [[0, 3], [1, 4], [0, 5], [0, 9, 4]])
def test_offsets_that_lead_outside_are_an_error(wrong: list[int]) -> None:
    offsets = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="query_offsets must rise from 0 to 4"):
        _packed(query_offsets=offsets, key_offsets=offsets)
