"""Counts the variants of each kernel that Triton would compile in a training with varying lengths; no GPU is needed.

A launcher that runs nothing records the key of Triton's variants: types, alignments, arguments that are 1, constants.
A process of its own, since a test's own process has kernels that belong to the interpreter:

    python -m tests.triton_kernels.variants                   # {"_gelu_forward_kernel": 2, ...}
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.kernel_tools.compilation import _describe_launch
from benchmarks.kernel_tools.specimens import Specimen
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.byte_pack import byte_pack, byte_pack_sequence
from raystride.triton_kernels.convolution import convolution
from raystride.triton_kernels.dispatch import use_kernels
from raystride.triton_kernels.geglu import geglu
from raystride.triton_kernels.gelu import gelu
from raystride.triton_kernels.launch import assumed_architecture, use_launcher
from raystride.triton_kernels.layer_norm import add_layer_norm, layer_norm
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy
from raystride.triton_kernels.mse import mse
from raystride.triton_kernels.relu import relu
from raystride.triton_kernels.rms_norm import add_rms_norm, rms_norm
from raystride.triton_kernels.rope import rope
from raystride.triton_kernels.swiglu import swiglu

SIZE, HEADS, GROUPS, WORDS = 64, 4, 2, 50_257
WIDTH = HEADS * SIZE


def _shapes(count: int) -> Iterator[tuple[int, int, int]]:
    """Batches, queries and keys as a training meets them: odd ones, multiples of 16, single ones, and the last batch."""
    generator = torch.Generator().manual_seed(0)
    yield from ((1, 1, 1), (8, 1, 1024), (1, 512, 512), (7, 513, 513), (8, 16, 17), (3, 17, 16))
    for _ in range(count):
        batch, queries, keys = (int(torch.randint(1, high, (), generator=generator)) for high in (17, 3000, 3000))
        yield batch, queries, keys


def _rows(batch: int, tokens: int, *shape: int) -> torch.Tensor:
    return torch.empty(batch, tokens, *shape, dtype=torch.bfloat16, requires_grad=True)


def _kernel_of(channels: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows(outputs, channels, 3, 3), _rows(1, outputs)[0]


def _heads(batch: int, tokens: int, heads: int) -> torch.Tensor:
    return _rows(batch, tokens, heads, SIZE).transpose(1, 2)


def _differentiate(result: Any) -> None:
    outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])


def train(operation: str, batch: int, queries: int, keys: int) -> None:
    """One forward and backward of an operation at these lengths; everything else as in every other step."""
    x, weight = _rows(batch, queries, WIDTH), torch.ones(WIDTH, requires_grad=True)
    q, k, v = _heads(batch, queries, HEADS), _heads(batch, keys, GROUPS), _heads(batch, keys, GROUPS)
    lengths, tables = torch.ones(batch, dtype=torch.int64), torch.ones(2, 1, 1, queries, SIZE)
    offsets = torch.arange(batch + 1, dtype=torch.int32) * queries
    calls = {
        "causal": lambda: attention(q, _heads(batch, queries, GROUPS), _heads(batch, queries, GROUPS), causal=True),
        "cross": lambda: attention(q, k, v, key_lengths=lengths, dropout=0.1),
        "packed": lambda: attention_packed(
            *(_rows(1, batch * queries, n, SIZE)[0] for n in (HEADS, GROUPS, GROUPS)), offsets, offsets
        ),
        "decoding": lambda: torch.no_grad()(attention)(q[:, :, :1], k, v, causal=True),
        "rms_norm": lambda: rms_norm(x, weight),
        "add_rms_norm": lambda: add_rms_norm(x, x, weight),
        "layer_norm": lambda: layer_norm(x, weight, weight),
        "add_layer_norm": lambda: add_layer_norm(x, x, weight, weight),
        "rope": lambda: rope(q, _heads(batch, queries, GROUPS), *tables),
        "rope, norms": lambda: rope(q, _heads(batch, queries, GROUPS), *tables, *torch.ones(2, SIZE)),
        "gelu": lambda: gelu(x),
        "relu": lambda: relu(x),
        "swiglu": lambda: swiglu(x, x),
        "geglu": lambda: geglu(x, x),
        "mse": lambda: mse(x, x),
        "convolution": lambda: convolution(_rows(batch, 3, 8, 8), *_kernel_of(3, 16), pool=True),
        "linear_cross_entropy": lambda: linear_cross_entropy(
            x[:, :9], _rows(1, WORDS, WIDTH)[0], torch.ones(batch, min(9, queries), dtype=torch.int64)
        ),
        "byte_pack": lambda: byte_pack(torch.ones(keys, dtype=torch.uint8), offsets.long(), length=queries),
        "byte_pack_sequence": lambda: byte_pack_sequence(torch.ones(keys, dtype=torch.uint8), offsets.long(), end_id=256),
    }  # fmt: skip
    _differentiate(calls[operation]())


OPERATIONS = (
    "causal", "cross", "packed", "decoding", "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rope",
    "rope, norms", "gelu", "relu", "swiglu", "geglu", "mse", "convolution", "linear_cross_entropy", "byte_pack",
    "byte_pack_sequence",
)  # fmt: skip


def count(steps: int = 20) -> dict[str, int]:
    """By operation and kernel, the variants of so many drawn steps on sm_90."""
    found: dict[str, set[Any]] = defaultdict(set)
    for operation in OPERATIONS:
        specimen = Specimen(operation, "", lambda: None)

        def note(kernel: Any, grid: Any, arguments: Any, named: Any, specimen: Specimen = specimen) -> None:
            described = _describe_launch(kernel, arguments, named, specimen, "sm_90")
            found[f"{specimen.operation}: {kernel.fn.__name__}"].add(described.identity)

        with use_launcher(note), assumed_architecture("sm_90"):
            use_kernels("triton")
            for shape in _shapes(steps):
                train(operation, *shape)
    return {name: len(variants) for name, variants in found.items()}


if __name__ == "__main__":
    print(json.dumps(count()))
