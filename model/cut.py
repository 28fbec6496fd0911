"""Sharded parameters: this worker holds rows or columns of a full parameter.

A network is built with full parameters; their memory is not touched yet. Before they are initialized, `cut_before_init`
lets a plan replace them by parts. Initial values, or those read from a folder, are then made one full tensor at a time, of
which the part is kept. So the values equal those of one worker, and no worker holds them all.

    with cut_before_init(lambda model: cut_parameter(model.embedding, "weight", Cut(whole, 0, (range(0, 128),)))):
        model = Decoder(config.model, vocabulary_size=4096)
    full_shape(model.embedding.weight)                       # (4096, C), of which 128 rows are local
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Cut:
    """The part of a full tensor that a worker holds: ranges along a dimension, concatenated."""

    full_shape: tuple[int, ...]
    """Shape of the full tensor."""
    dimension: int
    ranges: tuple[range, ...]
    """Ranges in the full tensor; empty if nothing of it is local."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        length = sum(map(len, self.ranges))
        return (*self.full_shape[: self.dimension], length, *self.full_shape[self.dimension + 1 :])

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the part of a full tensor."""
        parts = [whole.narrow(self.dimension, rows.start, len(rows)) for rows in self.ranges]
        return torch.cat(parts, self.dimension) if parts else whole.narrow(self.dimension, 0, 0).clone()

    def iter_boxes(self, rows: range) -> Iterator[tuple[range, range, tuple[int, ...]]]:
        """Yields the part's `rows` as boxes of the full tensor: (rows of the part, columns of the part, start of the box).

        Columns are along dimension 1; they are range(0) if the full tensor has one dimension.
        """
        columns = self.shape[1] if len(self.full_shape) > 1 else 0
        rest = (0,) * (len(self.full_shape) - 2)
        done = 0
        for own_range in self.ranges:
            here = range(done, done + len(own_range))
            done = here.stop
            if self.dimension == 1:
                if len(rows) and len(own_range):
                    yield rows, here, (rows.start, own_range.start, *rest)
                continue
            inside = range(max(rows.start, here.start), min(rows.stop, here.stop))
            if inside:
                begin = (own_range.start + inside.start - here.start,)
                yield inside, range(columns), (*begin, 0, *rest) if columns else begin


def cut_parameter(module: nn.Module, name: str, cut: Cut) -> None:
    """Replaces a full parameter by one of the part's shape, without values."""
    before = module.get_parameter(name)
    # Vectors keep their values: they are never drawn, and a network begins with zeros or ones in them.
    first = cut.local_part(before.detach()) if before.dim() < 2 else torch.empty(cut.shape, dtype=before.dtype)
    parameter = nn.Parameter(first, requires_grad=before.requires_grad)
    parameter.cut = cut  # type: ignore[attr-defined]
    setattr(module, name, parameter)


def get_cut(parameter: torch.Tensor) -> Cut | None:
    """Returns the cut of a fresh model's parameter; None if it is unsharded."""
    return getattr(parameter, "cut", None)


def full_shape(parameter: torch.Tensor) -> Sequence[int]:
    """Returns the shape of a fresh model's full parameter: its own if it is unsharded."""
    cut = get_cut(parameter)
    return tuple(parameter.shape) if cut is None else cut.full_shape


@torch.no_grad()
def fill_parameter(parameter: torch.Tensor, values: Callable[[torch.Tensor], object]) -> None:
    """Fills a parameter; `values` writes into a full tensor. Random numbers are drawn as on one worker."""
    if (cut := get_cut(parameter)) is None:
        values(parameter)
        return
    whole = torch.empty(cut.full_shape, dtype=parameter.dtype)
    values(whole)
    parameter.copy_(cut.local_part(whole))


_plan: Callable[[nn.Module], None] | None = None  # of the process: constructors cannot be handed it


@contextmanager
def cut_before_init(plan: Callable[[nn.Module], None]) -> Iterator[None]:
    """Lets `plan` cut the parameters of a network built inside, once, before its matrices are initialized."""
    global _plan
    before, _plan = _plan, plan
    try:
        yield
    finally:
        _plan = before


def apply_cut_plan(model: nn.Module) -> None:
    """Applies the plan to a network with all its modules; called by the network's own constructor."""
    global _plan
    plan, _plan = _plan, None
    if plan is not None:
        plan(model)
