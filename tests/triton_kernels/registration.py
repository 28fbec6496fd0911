"""Checks of an operation's registration: opcheck, torch.compile over the whole graph, and checkpointing, full and selective.

check_registration(lambda x: gelu(x), (x,), "raystride::gelu", (x, False))
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def check_registration(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], operator: str, arguments: tuple[Any, ...]
) -> None:
    """`function` of `inputs` gives a tensor; `operator`, the custom op behind it, takes `arguments`."""
    namespace, name = operator.split("::")
    overload = getattr(getattr(torch.ops, namespace), name).default
    torch.library.opcheck(overload, tuple(x.requires_grad_() if _is_smooth(x) else x for x in arguments))

    plain = _value_and_gradients(function, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    recomputed = partial(checkpoint, function, use_reentrant=False)
    saving = partial(create_selective_checkpoint_contexts, partial(_policy, overload))
    selective = partial(checkpoint, function, use_reentrant=False, context_fn=saving)
    for variant in (compiled, recomputed, selective):
        for expected, found in zip(plain, _value_and_gradients(variant, inputs), strict=True):
            assert torch.equal(expected, found)


def _is_smooth(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _policy(saved: Any, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == saved else CheckpointPolicy.PREFER_RECOMPUTE


def _value_and_gradients(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() if _is_smooth(x) else x for x in inputs]
    value = function(*leaves)
    value.float().square().sum().backward()
    return [value.detach(), *(x.grad for x in leaves if x.grad is not None)]
