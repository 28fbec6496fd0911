"""Adapters: small matrices A and B beside a frozen linear layer (LoRA, Hu et al., 2021), y = W x + b + s B A x.

Where our network has one layer and Hugging Face's several (queries, keys and values), each of theirs has an adapter of its
own, so that PEFT's layout can hold them. Where workers have parts of a weight (`model.cut`), they have those of A and B that
belong to it: of a layer whose results are spread, rows of B; of one whose inputs are spread, columns of A. What all of them
have whole is summed over them with the rest.

    attach(model, config.lora, names)                         # freezes the base; `names`: their names of one of our layers
    start_adapters(model, config.lora, seed=0)                # when the base has its values
    merge(model)                                              # back to a plain network, which gives the same logits
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from raystride.model.cut import Cut, cut_of, fill, shape_of_whole
from raystride.model.dropout import Dropout
from raystride.model.linear import Linear, linear
from raystride.model.shape import UnfitError

Names = Callable[[str], tuple[str, ...]]
"""From the name of one of our modules to their names of it, several for its rows one after the other; none: it has none."""


class AdapterShape(Protocol):
    """What adapters must be told; `raystride.pipelines.config.lora.Lora` documents each."""

    @property
    def rank(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def dropout(self) -> float: ...
    @property
    def dora(self) -> bool: ...
    @property
    def init(self) -> str: ...
    @property
    def all_linear(self) -> bool: ...
    @property
    def named(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Site:
    """Rows of a linear layer that can have an adapter."""

    module: str
    part: str
    """Its name among those of the module."""
    rows: range
    """Of the whole weight."""
    theirs: str
    """Its name in the other layout, or ""."""

    @property
    def ours(self) -> str:
        """Its name here: that of the layer, or of the part of it."""
        return self.module if self.part == _WHOLE else f"{self.module.rpartition('.')[0]}.{self.part}"

    def named(self, target: str) -> bool:
        """Whether a name means it: a whole one, or its end from a dot on."""
        return any(name == target or name.endswith(f".{target}") for name in (self.ours, self.theirs) if name)


_WHOLE = "all"
_APART = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}


class Adapter(nn.Module):
    """A (rank, in) and B (rows, rank) of some rows of a layer; with DoRA a magnitude (rows) as well."""

    def __init__(self, shape: AdapterShape, inputs: int, rows: int) -> None:
        super().__init__()
        self.scale, self.rank = shape.scale, shape.rank
        self.a = nn.Parameter(torch.zeros(shape.rank, inputs))
        self.b = nn.Parameter(torch.zeros(rows, shape.rank))
        self.magnitude = nn.Parameter(torch.zeros(rows)) if shape.dora else None
        self.dropout = Dropout(shape.dropout)
        # What was taken out of the weight at the start: kept, so that a resumed run takes out the same.
        away = shape.init in ("pissa", "olora")
        self.a0, self.b0 = (_kept(each) if away else None for each in (self.a, self.b))

    def forward(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """(..., in) -> the scaled change (..., rows), before any magnitude."""
        low = linear(self.dropout(x), self.a, products=layer.products)
        return linear(low, self.b, products=layer.products) * self.scale

    def change(self) -> torch.Tensor:
        """s B A (rows, in) in fp64."""
        return self.scale * (self.b.detach().double() @ self.a.detach().double())

    def norms(self, weight: torch.Tensor) -> torch.Tensor:
        """Lengths (rows) of the changed weight's rows, a constant for the backward (DoRA, section 4.3)."""
        changed = weight.float() + self.scale * (self.b.detach() @ self.a.detach())
        return torch.linalg.vector_norm(changed, dim=1)  # type: ignore[no-any-return]

    def with_magnitude(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """What DoRA adds to the layer's result y (..., rows) of x (..., in)."""
        assert self.magnitude is not None
        weight = weight.detach().float()
        factor = self.magnitude / self.norms(weight)
        dropped = self.dropout(x)
        plain = y if bias is None else y - bias
        if self.training and self.dropout.share:
            plain = F.linear(dropped, weight)
        change = F.linear(F.linear(dropped, self.a), self.b)
        return (factor - 1) * plain + factor * change * self.scale


def _kept(like: torch.Tensor) -> nn.Parameter:
    kept = nn.Parameter(torch.zeros_like(like), requires_grad=False)
    kept.kept = True  # type: ignore[attr-defined]
    return kept


class AdaptedLinear(Linear):
    """A frozen linear layer, some rows of which, or all, have adapters."""

    def __init__(self, layer: Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.products = layer.weight, layer.bias, layer.products
        self.adds_bias = layer.adds_bias
        self.adapters = nn.ModuleDict()
        self.rows: dict[str, range] = {}
        """Of the results that are here, those of each adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return self.changed(x, super().forward(x))

    def changed(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The layer's own result y (..., out) of x (..., in), with what the adapters change."""
        parts, done = [], 0
        for name, rows in self.rows.items():
            if rows.start > done:
                parts.append(y[..., done : rows.start])
            own = y if len(rows) == y.shape[-1] else y[..., rows.start : rows.stop]
            # Under autocast a change may be in more bits than what it is added to.
            parts.append(own + self._change(self.adapters[name], x, own, rows).to(own.dtype))
            done = rows.stop
        if done < y.shape[-1]:
            parts.append(y[..., done:])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _change(self, adapter: Any, x: torch.Tensor, y: torch.Tensor, rows: range) -> torch.Tensor:
        if adapter.magnitude is None:
            return adapter(x, self)  # type: ignore[no-any-return]
        own = slice(rows.start, rows.stop)
        bias = None if self.bias is None else self.bias[own]
        return adapter.with_magnitude(x, y, self.weight[own], bias)  # type: ignore[no-any-return]

    def without_adapters(self) -> Linear:
        """A plain layer that has this one's weight and bias."""
        plain = Linear(0, 0)
        plain.weight, plain.bias, plain.adds_bias = self.weight, self.bias, self.adds_bias
        plain.products = self.products
        return plain

    def add(self, name: str, shape: AdapterShape, whole_rows: range) -> None:
        """Adds an adapter for these rows of the whole weight, or for those of them that are here."""
        inputs = shape_of_whole(self.weight)[1]
        cut = cut_of(self.weight)
        adapter = Adapter(shape, inputs, len(whole_rows))
        self.rows[name] = whole_rows
        if cut is not None and cut.dimension == 0:
            here, self.rows[name] = _rows_here(cut, whole_rows)
            _cut(adapter, "b", Cut((len(whole_rows), shape.rank), 0, here))
            _shared(adapter.a)
        elif cut is not None:
            _cut(adapter, "a", Cut((shape.rank, inputs), 1, cut.ranges))
            _shared(adapter.b)
            adapter.dropout.part = partial(_columns, cut)
        self.adapters[name] = adapter
        # In the weight's order, whatever the order of the targets.
        self.rows = dict(sorted(self.rows.items(), key=lambda each: each[1].start))


def _rows_here(cut: Cut, wanted: range) -> tuple[tuple[range, ...], range]:
    """Of the wanted rows of a whole what a part has, counted from the first wanted one; and where they are in the part.

    They are neighbours there: a part has queries, keys and values one after another.
    """
    found: list[range] = []
    first = done = 0
    for each in cut.ranges:
        both = range(max(each.start, wanted.start), min(each.stop, wanted.stop))
        if len(both):
            first = first if found else done + both.start - each.start
            found.append(range(both.start - wanted.start, both.stop - wanted.start))
        done += len(each)
    return tuple(found), range(first, first + sum(map(len, found)))


def _cut(adapter: Adapter, name: str, cut: Cut) -> None:
    parameter = nn.Parameter(torch.zeros(cut.shape))
    parameter.cut = cut  # type: ignore[attr-defined]
    setattr(adapter, name, parameter)


def _shared(parameter: nn.Parameter) -> None:
    """Marks what every worker of a tensor group has whole; see `strategies.tensor_parallel.summed_over_tensor`."""
    parameter.summed_over_tensor = True  # type: ignore[attr-defined]


def _columns(cut: Cut, shape: tuple[int, ...], _: Any) -> tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """The whole input of which a worker has some columns, and what cuts them out of a mask for it."""
    return (*shape[:-1], cut.whole[1]), lambda mask: torch.cat(
        [mask[..., each.start : each.stop] for each in cut.ranges], -1
    )


def sites(model: nn.Module, names: Names) -> list[Site]:
    """Everything in a network that can have an adapter, in its order. The head is none: the loss never sees its results."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or name == "head":
            continue
        rows = shape_of_whole(module.weight)[0]
        theirs = names(name)
        apart = _APART.get(name.rpartition(".")[2], ())
        if len(theirs) > 1 or (not theirs and apart and _is_llama(model)):
            sizes = _sizes(model, name, len(apart))
            for part, start, size, their in zip(apart, _starts(sizes), sizes, theirs or ("",) * len(apart), strict=True):
                found.append(Site(name, part, range(start, start + size), their))
        else:
            found.append(Site(name, _WHOLE, range(rows), theirs[0] if theirs else ""))
    return found


def _is_llama(model: nn.Module) -> bool:
    return getattr(getattr(model, "shape", None), "flavour", "") == "llama"


def _sizes(model: nn.Module, name: str, parts: int) -> list[int]:
    """Rows of queries, keys and values, or of the last two, in the whole."""
    shape: Any = model.shape
    size = shape.head_size or shape.width // shape.heads
    keys = (shape.kv_heads or shape.heads) * size
    return [shape.heads * size, keys, keys][-parts:]


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def chosen(found: list[Site], shape: AdapterShape) -> list[Site]:
    """The places that the settings name. Raises ValueError, with the setting's name, for a name that none has."""
    if shape.all_linear:
        return found
    for target in shape.named:
        if not any(each.named(target) for each in found):
            known = sorted({(each.theirs or each.ours).rpartition(".")[2] for each in found})
            raise UnfitError(
                f"lora.targets names {target!r}: it must be a linear layer of this network other than the head, one of "
                f"{', '.join(known)}, or `all-linear`",
                setting="lora.targets",
                value=target,
            )
    return [each for each in found if any(each.named(target) for target in shape.named)]


def attach(model: nn.Module, shape: AdapterShape, names: Names) -> None:
    """Freezes a network, and gives the layers that the settings name adapters without values.

    Raises ValueError, with the setting's name, for a name that no layer has, or a rank above what a layer can have.
    """
    wanted = chosen(sites(model, names), shape)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for site in wanted:
        parent, _, child = site.module.rpartition(".")
        layer = model.get_submodule(site.module)
        if not isinstance(layer, AdaptedLinear):
            assert isinstance(layer, Linear)
            layer = AdaptedLinear(layer)
            setattr(model.get_submodule(parent), child, layer)
        most = min(len(site.rows), shape_of_whole(layer.weight)[1])
        if shape.init in ("pissa", "olora") and shape.rank > most:
            message = f"lora.rank is {shape.rank}: it must be at most {most}, the rank of {site.theirs or site.ours}"
            raise UnfitError(message, setting="lora.rank", value=shape.rank)
        layer.add(site.part, shape, site.rows)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a network without those of its adapters, by name."""
    own = {id(each) for _, _, _, adapter in adapted(model) for each in adapter.parameters()}
    return ((name, each) for name, each in model.named_parameters() if id(each) not in own)


def adapted(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear, str, Adapter]]:
    """Every adapter, with the name and the layer that it belongs to and its own name there."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            for part in module.rows:
                adapter: Any = module.adapters[part]
                yield name, module, part, adapter


@torch.no_grad()
def start_adapters(model: nn.Module, shape: AdapterShape, seed: int) -> None:
    """First values, from the base's or from a generator of this seed: the same for any number of workers."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer, part, adapter in adapted(model):
        rows = layer.rows[part]
        weight = layer.weight.detach()[rows.start : rows.stop].float()
        if shape.init == "kaiming":
            fill(adapter.a, partial(nn.init.kaiming_uniform_, a=math.sqrt(5), generator=generator))
        elif shape.init == "gaussian":
            fill(adapter.a, partial(nn.init.normal_, std=1 / shape.rank, generator=generator))
        else:
            a, b = (_principal if shape.init == "pissa" else _orthogonal)(weight, shape)
            for parameter, value in ((adapter.a, a), (adapter.b, b), (adapter.a0, a), (adapter.b0, b)):
                assert parameter is not None
                parameter.copy_(value)
        if adapter.magnitude is not None:
            adapter.magnitude.copy_(adapter.norms(weight))


def _principal(weight: torch.Tensor, shape: AdapterShape) -> tuple[torch.Tensor, torch.Tensor]:
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = (values[: shape.rank] / shape.scale).sqrt()
    return root[:, None] * right[: shape.rank], left[:, : shape.rank] * root


def _orthogonal(weight: torch.Tensor, shape: AdapterShape) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = torch.linalg.qr(weight)
    return r[: shape.rank], q[:, : shape.rank]


@torch.no_grad()
def take_out(model: nn.Module) -> None:
    """Takes what PiSSA's and OLoRA's adapters began with out of the weights, so that the network begins as its base."""
    for _, layer, part, adapter in adapted(model):
        if adapter.a0 is not None and adapter.b0 is not None:
            rows = layer.rows[part]
            layer.weight[rows.start : rows.stop] -= adapter.scale * (adapter.b0 @ adapter.a0)


def hold_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Holds the frozen matrices in another type; what is computed with them stays as it was."""
    for module in model.modules():
        if isinstance(module, Linear | nn.Embedding):
            module.weight.data = module.weight.data.to(dtype)
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, rows: rows.float())


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Adds the adapters to the weights, in fp64, and leaves a plain network in fp32."""
    for name, layer in [(name, each) for name, each in model.named_modules() if isinstance(each, AdaptedLinear)]:
        weight = layer.weight.detach().double()
        for part, rows in layer.rows.items():
            adapter: Any = layer.adapters[part]
            own = weight[rows.start : rows.stop]
            own += adapter.change()
            if adapter.magnitude is not None:
                own *= (adapter.magnitude.double() / own.norm(dim=1))[:, None]
        plain = layer.without_adapters()
        plain.weight.data = weight.float()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
