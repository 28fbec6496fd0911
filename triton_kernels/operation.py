"""Operations as PyTorch knows them, at the price of a function where nobody but autograd looks.

An operator of torch.library is what torch.compile, selective checkpointing, DTensor and FakeTensor see, and what carries the
gradient there. Through it a call passes the dispatcher and two layers of Python, some 35 microseconds for a forward and a
backward; a training of a small model on a fast GPU waits for that. So plain tensors in eager mode take the same body through
an autograd.Function, and everybody else the operator. It is a drop-in for `torch.library.custom_op`:

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
    """A function of tensors that is an operator, too."""

    def __init__(self, name: str, body: Callable[..., Any]) -> None:
        self._body = body
        self._operator = torch.library.custom_op(name, body, mutates_args=())
        self._function: Any = None
        self.register_fake = self._operator.register_fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Gives it a gradient; both arguments as `torch.library.register_autograd` has them."""
        self._operator.register_autograd(backward, setup_context=setup_context)
        body = self._body

        def forward(ctx: Any, *arguments: Any) -> Any:
            # In one with `setup_context`, for which PyTorch would take the signature apart at every call.
            output = body(*arguments)
            setup_context(ctx, arguments, output)
            return output

        parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(body.__name__, (torch.autograd.Function,), parts)

    def __call__(self, *arguments: Any) -> Any:
        """The body's result, with its gradient."""
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        if _looked_at() or not all(type(each) in _PLAIN for each in tensors):
            return self._operator(*arguments)
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            # One without a gradient, such as a backward in a second derivative: the operator says so, a body would lose it.
            return self._operator(*arguments) if self._function is None else self._function.apply(*arguments)
        return self._body(*arguments)


def _looked_at() -> bool:
    """Whether somebody follows operations: the compiler, or a mode such as selective checkpointing's or FakeTensor's."""
    return torch.compiler.is_compiling() or _in_mode()


# Private: where it is gone, all calls take the operator.
_in_mode: Callable[[], bool] = getattr(_python_dispatch, "is_in_torch_dispatch_mode", lambda: True)


def operation(name: str) -> Callable[[Callable[..., Any]], Operation]:
    """Makes an operation of a body that changes none of its arguments, and gives none of them back."""
    return lambda body: Operation(name, body)
