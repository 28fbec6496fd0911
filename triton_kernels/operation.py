"""Custom operators with a fast path in eager mode, a drop-in for `torch.library.custom_op`.

torch.compile, selective checkpointing, DTensor and FakeTensor need a torch.library operator. A call of one passes the
dispatcher and two layers of Python, some 35 microseconds for a forward and a backward, which a small model on a fast GPU
waits for. So plain tensors in eager mode run the same body through an autograd.Function, and all others the operator:

    @operation("raystride::gelu")
    def _gelu(x: torch.Tensor) -> torch.Tensor: ...
    @_gelu.register_fake
    def _(x): ...
    _gelu.register_autograd(_differentiate, setup_context=_save)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Operation:
    """A function of tensors that is also a torch.library operator."""

    def __init__(self, name: str, body: Callable[..., Any]) -> None:
        self._body = body
        self._operator = torch.library.custom_op(name, body, mutates_args=())
        self._function: Any = None
        self.register_fake = self._operator.register_fake

        def refuse(ctx: Any, *grads: torch.Tensor | None) -> Any:
            raise RuntimeError(
                f"{name}: kernels have no second derivative, as a gradient penalty or create_graph=True needs it; set "
                "--model.kernels torch"
            )

        # Of gradients' operators; `register_autograd` replaces it for others.
        self._operator.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None], gradients: int = 1
    ) -> None:
        """Registers the gradient; arguments as in `torch.library.register_autograd`.

        `backward` gets the gradients of the first `gradients` outputs as tensors. Those of further outputs are None where
        they have none, not zeros that PyTorch would fill in every backward pass.
        """

        def save(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.needed = [(each.shape, each.dtype, each.device) for each in outputs[:gradients]]
            setup_context(ctx, inputs, output)

        def differentiate(ctx: Any, *grads: torch.Tensor | None) -> Any:
            needed = [
                torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
                for grad, (shape, dtype, device) in zip(grads, ctx.needed, strict=False)
            ]
            return backward(ctx, *needed, *grads[gradients:])

        self._operator.register_autograd(differentiate, setup_context=save)
        body = self._body

        def forward(ctx: Any, *arguments: Any) -> Any:
            # One function, not `setup_context`, for which PyTorch would inspect the signature at every call.
            output = body(*arguments)
            save(ctx, arguments, output)
            return output

        parts = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        self._function = type(body.__name__, (torch.autograd.Function,), parts)

    def __call__(self, *arguments: Any) -> Any:
        """Returns the body's result, differentiably."""
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        if _is_traced() or not all(type(argument) in _PLAIN for argument in tensors):
            return self._operator(*arguments)
        if torch.is_grad_enabled() and any(argument.requires_grad for argument in tensors):
            # Without a gradient, as in a second derivative, the operator refuses; the body would drop it silently.
            return self._operator(*arguments) if self._function is None else self._function.apply(*arguments)
        return self._body(*arguments)


def _is_traced() -> bool:
    """Returns whether operations are traced: by the compiler, or by a mode such as selective checkpointing or FakeTensor."""
    return torch.compiler.is_compiling() or _in_mode()


# Private: without it all calls use the operator.
_in_mode: Callable[[], bool] = getattr(_python_dispatch, "is_in_torch_dispatch_mode", lambda: True)


def operation(name: str) -> Callable[[Callable[..., Any]], Operation]:
    """Decorates a body that neither mutates nor returns its arguments as an operation."""
    return lambda body: Operation(name, body)
