"""Which memory tensors hold at each moment, followed operation by operation through what PyTorch dispatches.

Every storage that an operation makes is noted when it appears, when FSDP resizes it and when it goes. What an operation
takes for itself while it runs is not seen, nor is what a custom operator does inside; on GPUs the allocator's peak has both.

    with Storages(before=[...]) as alive:                     # tensors that are there already and may go
        loss_sum, counted = model(ids, targets); loss_sum.backward()
    alive.most()                                              # bytes at the worst moment
    alive.most(besides=[p.grad for p in model.parameters()])  # the same without these tensors' memory
"""

import weakref
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):  # type: ignore[misc]
    """Notes storages that come and go in its block."""

    def __init__(self, before: Iterable[torch.Tensor] = (), ignoring: Iterable[torch.Tensor] = ()) -> None:
        """`before`: tensors that are counted from the start; `ignoring`: tensors that are never counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[tuple[int, int]] = []
        """Whose memory grew or shrank, by how many bytes."""
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By a storage's identity, itself and its number; -1: not counted."""
        self._sizes: dict[int, int] = {}
        for tensor in ignoring:
            self._remember(tensor, -1)
        for tensor in before:
            self._record_storage(tensor)
        self._before = len(self._sizes)

    def __enter__(self) -> "Storages":
        self._resize = torch.UntypedStorage.resize_
        alive = self

        def resize(storage: Any, size: int) -> Any:
            result = alive._resize(storage, size)
            alive._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and notes what it returns."""
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._record_storage(leaf)
        return result

    def most(self, besides: Iterable[torch.Tensor] = ()) -> int:
        """The most bytes alive at a moment, as `moments` has them."""
        return max(self.moments(besides), default=0)

    def moments(self, besides: Iterable[torch.Tensor] = ()) -> list[int]:
        """The bytes alive after each change, in order.

        `besides`: what lies in the memory of these tensors is left out, and with it what was counted from the start.
        """
        left_out = {self._number(plain(tensor).untyped_storage()) for tensor in besides}
        if left_out:
            left_out |= set(range(self._before))
        return list(accumulate(0 if number in left_out else change for number, change in self._events))

    def _record_storage(self, tensor: torch.Tensor) -> None:
        tensor = plain(tensor)
        if self._number(tensor.untyped_storage()) is None:
            number = len(self._sizes)
            self._remember(tensor, number)
            self._sizes[number] = tensor.untyped_storage().nbytes()
            self._events.append((number, self._sizes[number]))

    def _remember(self, tensor: torch.Tensor, number: int) -> None:
        storage = plain(tensor).untyped_storage()
        self._known[id(storage)] = weakref.ref(storage, lambda _: self._record_freed(number)), number

    def _number(self, storage: torch.UntypedStorage) -> int | None:
        reference, number = self._known.get(id(storage), (None, None))
        return number if reference is not None and reference() is storage else None

    def _resized(self, storage: torch.UntypedStorage) -> None:
        number = self._number(storage)
        if number is not None and number >= 0:
            self._events.append((number, storage.nbytes() - self._sizes[number]))
            self._sizes[number] = storage.nbytes()

    def _record_freed(self, number: int) -> None:
        if number >= 0:
            self._events.append((number, -self._sizes[number]))
            self._sizes[number] = 0


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor that lies in shards, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, shared memory once."""
    storages = {id(storage): storage for storage in (plain(tensor).untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
