"""Activation checkpointing and compilation, block by block, before a strategy spreads the model.

Both change how a block's forward runs and nothing else: parameters keep their names, and a hook that a strategy puts on a
block runs outside of both.

    model = recompute(model, config.train)
"""

import getpass
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

from raystride.model.linear import bf16_products, in_bf16
from raystride.model.preference import leave_figures_uncompiled
from raystride.pipelines.config import Train
from raystride.triton_kernels.attention_packed import leave_uncompiled


def blocks(model: nn.Module) -> list[nn.Module]:
    """What a model is made of in the large: the items of its `ModuleList`s."""
    return [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]


def recompute(model: nn.Module, settings: Train) -> nn.Module:
    """The same model, whose blocks keep less for the backward, or are compiled, as `train` asks."""
    if settings.activation_checkpointing != "none":
        selective = settings.activation_checkpointing == "selective"
        for block in blocks(model):
            block.forward = _Checkpointed(block.forward, selective)  # type: ignore[method-assign]
    if settings.compile != "none":
        _keep_processors_apart()
        leave_uncompiled()
        leave_figures_uncompiled()
    if settings.compile == "block":
        for block in blocks(model):
            block.compile()
    elif settings.compile == "model":
        model.compile()
    return model


def _keep_processors_apart() -> None:
    """Gives what is compiled a cache of this kind of processor.

    PyTorch's own is not told which vector instructions it was made for: what AVX-512 has left there gives NaN, or ends the
    process, where the same code runs with AVX2 (PyTorch 2.13).
    """
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    place = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place))


@contextmanager
def as_compiled() -> Iterator[None]:
    """Inside, what is compiled runs compiled and nothing else is compiled: validation and generation have other shapes."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        yield
        return
    with torch.compiler.set_stance("eager_on_recompile"):
        yield


class _Checkpointed:
    """A block's forward that is computed again in the backward (Chen et al., 2016); selective: but for its products."""

    def __init__(self, forward: Callable[..., Any], selective: bool) -> None:
        self._forward, self._selective = forward, selective

    def __call__(self, *arguments: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        contexts = partial(_contexts, self._selective, in_bf16())
        # The reentrant form takes no contexts.
        return checkpoint(self._forward, *arguments, use_reentrant=False, context_fn=contexts)


def _contexts(selective: bool, bf16: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """In which a forward runs the first time, and again: with the products of the first time, and with what it kept."""
    if not selective:
        return nullcontext(), _all_of(bf16_products()) if bf16 else nullcontext()
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    first, again = create_selective_checkpoint_contexts(_kept())
    return first, _all_of(again, *([bf16_products()] if bf16 else []))


@contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _kept() -> list[Any]:
    """The operations whose results selective checkpointing keeps: matrix products and attention."""
    aten, ours = torch.ops.aten, torch.ops.raystride
    found = [aten.mm.default, aten.addmm.default, aten.bmm.default, ours.product.default]
    found += [aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default]
    found += [aten._scaled_dot_product_efficient_attention.default, ours.attention.default, ours.attention_packed.default]
    return found
