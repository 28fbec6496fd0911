"""Parameters of which this worker holds a part: rows or columns of what the whole model has under that name.

A network is built whole in name alone. Before its first values are drawn, `cut_before_drawn` lets a plan put small
parameters in the place of the whole ones, for which no page of memory has been touched yet; what is drawn, or read from a
folder, is then one whole tensor at a time, of which the part is kept. So the values are those of one worker, and nobody
holds them all.

    with cut_before_drawn(lambda model: cut_parameter(model.embedding, "weight", Cut(whole, 0, (range(0, 128),)))):
        model = Decoder(config.model, vocabulary_size=4096)
    shape_of_whole(model.embedding.weight)                       # (4096, C), of which 128 rows are here
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Cut:
    """Which part of a whole tensor a worker holds: ranges along a dimension, one after another."""

    whole: tuple[int, ...]
    """The whole tensor's shape."""
    dimension: int
    ranges: tuple[range, ...]
    """In the whole; none: nothing of it is here."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        length = sum(map(len, self.ranges))
        return (*self.whole[: self.dimension], length, *self.whole[self.dimension + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, a copy."""
        pieces = [whole.narrow(self.dimension, each.start, len(each)) for each in self.ranges]
        return torch.cat(pieces, self.dimension) if pieces else whole.narrow(self.dimension, 0, 0).clone()

    def pieces(self, rows: range) -> Iterator[tuple[range, range, tuple[int, ...]]]:
        """The part's `rows` as boxes of the whole: (rows of the part, columns of the part, where the box begins).

        Columns are along dimension 1, and there are none to name, range(0), where the whole has one dimension.
        """
        columns = self.shape[1] if len(self.whole) > 1 else 0
        rest = (0,) * (len(self.whole) - 2)
        done = 0
        for each in self.ranges:
            here = range(done, done + len(each))
            done = here.stop
            if self.dimension == 1:
                if len(rows) and len(each):
                    yield rows, here, (rows.start, each.start, *rest)
                continue
            inside = range(max(rows.start, here.start), min(rows.stop, here.stop))
            if inside:
                begin = (each.start + inside.start - here.start,)
                yield inside, range(columns), (*begin, 0, *rest) if columns else begin


def cut_parameter(module: nn.Module, name: str, cut: Cut) -> None:
    """Puts a parameter of the part's shape, without values, in the place of a whole one."""
    before = module.get_parameter(name)
    # Zeros where it was a vector: those are never drawn, and a network begins with zeros or ones in them.
    first = cut.of(before.detach()) if before.dim() < 2 else torch.empty(cut.shape, dtype=before.dtype)
    parameter = nn.Parameter(first, requires_grad=before.requires_grad)
    parameter.cut = cut  # type: ignore[attr-defined]
    setattr(module, name, parameter)


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """Which part of a whole a fresh model's parameter is; None: it is whole."""
    return getattr(parameter, "cut", None)


def shape_of_whole(parameter: torch.Tensor) -> Sequence[int]:
    """The shape of the whole of which a fresh model's parameter is a part, or its own."""
    cut = cut_of(parameter)
    return tuple(parameter.shape) if cut is None else cut.whole


@torch.no_grad()
def fill(parameter: torch.Tensor, values: Callable[[torch.Tensor], object]) -> None:
    """Gives a parameter values; `values` writes them into a whole tensor. Random numbers are drawn as for one worker."""
    if (cut := cut_of(parameter)) is None:
        values(parameter)
        return
    whole = torch.empty(cut.whole, dtype=parameter.dtype)
    values(whole)
    parameter.copy_(cut.of(whole))


_plan: Callable[[nn.Module], None] | None = None  # of the process: constructors cannot be handed it


@contextmanager
def cut_before_drawn(plan: Callable[[nn.Module], None]) -> Iterator[None]:
    """Has `plan` cut the parameters of the network that is built inside, once, before any value of its matrices is drawn."""
    global _plan
    before, _plan = _plan, plan
    try:
        yield
    finally:
        _plan = before


def cut_now(model: nn.Module) -> None:
    """Applies the plan to a network whose modules are all there; it is for the network's own constructor to call."""
    global _plan
    plan, _plan = _plan, None
    if plan is not None:
        plan(model)
