"""Activation checkpointing and compilation, block by block, before a strategy distributes the model.

Both change only how a block's forward runs: parameters keep their names, and hooks that a strategy registers on a block run
outside of both.

    model = recompute(model, config.train)
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raystride.model.linear import bf16_products, is_bf16_allowed
from raystride.model.preference import exclude_figures_from_compile
from raystride.pipelines.config import TrainConfig
from raystride.triton_kernels.attention_packed import exclude_packed_from_compile


def model_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns a model's blocks, each once: the items of its `ModuleList`s that are no containers; outer ones first."""
    items = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    return list(dict.fromkeys(block for block in items if not isinstance(block, nn.ModuleList | nn.ModuleDict)))


def recompute(model: nn.Module, settings: TrainConfig) -> nn.Module:
    """Wraps the model's blocks for activation checkpointing and compiles them, as `train` configures; returns the same
    model."""
    if settings.activation_checkpointing != "none":
        selective = settings.activation_checkpointing == "selective"
        for block in model_blocks(model):
            block.forward = _CheckpointedForward(block.forward, selective)  # type: ignore[method-assign]
    if settings.compile != "none":
        _use_cache_of_cpu_type()
        exclude_packed_from_compile()
        exclude_figures_from_compile()
    if settings.compile == "block":
        for block in model_blocks(model):
            block.compile()
    elif settings.compile == "model":
        model.compile()
    return model


def _use_cache_of_cpu_type() -> None:
    """Sets a compilation cache per type of processor.

    PyTorch's own cache ignores the vector instructions that code was compiled for: code for AVX-512 gives NaN, or ends the
    process, on a machine that runs the same code with AVX2 (PyTorch 2.13).
    """
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


@contextmanager
def without_recompilation() -> Iterator[None]:
    """Runs compiled code but compiles nothing new inside the block: validation and generation have other shapes."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        yield
        return
    with torch.compiler.set_stance("eager_on_recompile"):
        yield


class _CheckpointedForward:
    """A block's forward, recomputed in the backward (Chen et al., 2016); selective: all but its products."""

    def __init__(self, forward: Callable[..., Any], selective: bool) -> None:
        self._forward, self._selective = forward, selective

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        contexts = partial(_checkpoint_contexts, self._selective, is_bf16_allowed())
        # The reentrant form accepts no contexts.
        return checkpoint(self._forward, *arguments, use_reentrant=False, context_fn=contexts, **named)


def _checkpoint_contexts(selective: bool, bf16: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the first forward and of its recomputation, which uses the same products and kept results."""
    if not selective:
        return nullcontext(), _enter_all(bf16_products()) if bf16 else nullcontext()
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    first, recomputation = create_selective_checkpoint_contexts(_saved_operations())
    return first, _enter_all(recomputation, *([bf16_products()] if bf16 else []))


@contextmanager
def _enter_all(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enters several contexts as one."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _saved_operations() -> list[Any]:
    """Returns the operations with results that selective checkpointing keeps: matrix products and attention."""
    aten, ours = torch.ops.aten, torch.ops.raystride
    operations = [aten.mm.default, aten.addmm.default, aten.bmm.default, ours.product.default]
    operations += [aten._grouped_mm.default] if hasattr(aten, "_grouped_mm") else []  # PyTorch's older versions lack it
    operations += [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
    ]
    operations += [
        aten._scaled_dot_product_efficient_attention.default,
        ours.attention.default,
        ours.attention_packed.default,
    ]
    return operations
