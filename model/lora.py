"""LoRA adapters: small matrices A and B beside a frozen linear layer (Hu et al., 2021), y = W x + b + s B A x.

If Hugging Face has several layers for one of ours (queries, keys and values), each of theirs gets its own adapter, so that
PEFT's layout can hold them. If a weight is sharded over workers (`model.cut`), A and B are sharded with it: rows of B for a
layer with sharded outputs, columns of A for a layer with sharded inputs. Gradients of the unsharded matrix are summed over
the workers with the rest.

    attach_adapters(model, config.lora, names)                # freezes the base; `names`: module name -> HF names
    start_adapters(model, config.lora, seed=0)                # after the base has its values
    merge_adapters(model)                                     # back to a plain network with the same logits
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from raystride.model.cut import Cut, fill_parameter, full_shape, get_cut
from raystride.model.dropout import Dropout
from raystride.model.linear import Linear, linear
from raystride.model.shape import UnfitError

Names = Callable[[str], tuple[str, ...]]
"""Maps a module name to its Hugging Face names: several if they share its rows in order, none if there is no counterpart."""


class AdapterShape(Protocol):
    """Settings of adapters; `raystride.pipelines.config.lora.Lora` documents each."""

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
    def named_layers(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TargetLinear:
    """Rows of a linear layer that an adapter can be attached to."""

    module: str
    part: str
    """Name of these rows within the module."""
    rows: range
    """Rows of the full weight."""
    hf_name: str
    """Name in the Hugging Face layout, or ""."""

    @property
    def our_name(self) -> str:
        """Name in our layout: that of the layer, or of the rows within it."""
        return self.module if self.part == _ALL_ROWS else f"{self.module.rpartition('.')[0]}.{self.part}"

    def matches(self, target: str) -> bool:
        """Returns whether a target names it, by a full name or by its end after a dot."""
        return any(name == target or name.endswith(f".{target}") for name in (self.our_name, self.hf_name) if name)


_ALL_ROWS = "all"
_FUSED_PARTS = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}


class Adapter(nn.Module):
    """LoRA matrices A (rank, in) and B (rows, rank) for some rows of a layer; with DoRA also a magnitude (rows)."""

    def __init__(self, shape: AdapterShape, inputs: int, rows: int) -> None:
        super().__init__()
        self.scale, self.rank = shape.scale, shape.rank
        self.a = nn.Parameter(torch.zeros(shape.rank, inputs))
        self.b = nn.Parameter(torch.zeros(rows, shape.rank))
        self.magnitude = nn.Parameter(torch.zeros(rows)) if shape.dora else None
        self.dropout = Dropout(shape.dropout)
        # The initial delta is kept, so that a resumed run subtracts the same from the weight.
        away = shape.init in ("pissa", "olora")
        self.a0, self.b0 = (_frozen_zeros_like(matrix) if away else None for matrix in (self.a, self.b))

    def forward(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """Maps x (..., in) to the scaled delta (..., rows), without the magnitude."""
        low = linear(self.dropout(x), self.a, products=layer.products)
        return linear(low, self.b, products=layer.products) * self.scale

    def delta_weight(self) -> torch.Tensor:
        """Returns s B A (rows, in) in fp64."""
        return self.scale * (self.b.detach().double() @ self.a.detach().double())

    def row_norms(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the norms (rows) of the adapted weight's rows, constants in the backward (DoRA, section 4.3)."""
        changed = weight.float() + self.scale * (self.b.detach() @ self.a.detach())
        return torch.linalg.vector_norm(changed, dim=1)  # type: ignore[no-any-return]

    def dora_delta(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the DoRA delta of the layer's output y (..., rows) for x (..., in)."""
        assert self.magnitude is not None
        weight = weight.detach().float()
        factor = self.magnitude / self.row_norms(weight)
        dropped = self.dropout(x)
        plain = y if bias is None else y - bias
        if self.training and self.dropout.probability:
            plain = F.linear(dropped, weight)
        change = F.linear(F.linear(dropped, self.a), self.b)
        return (factor - 1) * plain + factor * change * self.scale


def _frozen_zeros_like(like: torch.Tensor) -> nn.Parameter:
    kept = nn.Parameter(torch.zeros_like(like), requires_grad=False)
    kept.kept = True  # type: ignore[attr-defined]
    return kept


class AdaptedLinear(Linear):
    """A frozen linear layer with adapters on some or all of its rows."""

    def __init__(self, layer: Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.products = layer.weight, layer.bias, layer.products
        self.adds_bias = layer.adds_bias
        self.adapters = nn.ModuleDict()
        self.rows: dict[str, range] = {}
        """Local output rows of each adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return self.apply_adapters(x, super().forward(x))

    def apply_adapters(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output y (..., out) for x (..., in) plus the deltas of the adapters."""
        parts, done = [], 0
        for name, rows in self.rows.items():
            if rows.start > done:
                parts.append(y[..., done : rows.start])
            own = y if len(rows) == y.shape[-1] else y[..., rows.start : rows.stop]
            # Under autocast a delta may have more bits than the output it is added to.
            parts.append(own + self._adapter_delta(self.adapters[name], x, own, rows).to(own.dtype))
            done = rows.stop
        if done < y.shape[-1]:
            parts.append(y[..., done:])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _adapter_delta(self, adapter: Any, x: torch.Tensor, y: torch.Tensor, rows: range) -> torch.Tensor:
        if adapter.magnitude is None:
            return adapter(x, self)  # type: ignore[no-any-return]
        own = slice(rows.start, rows.stop)
        bias = None if self.bias is None else self.bias[own]
        return adapter.dora_delta(x, y, self.weight[own], bias)  # type: ignore[no-any-return]

    def without_adapters(self) -> Linear:
        """Returns a plain layer with this one's weight and bias."""
        plain = Linear(0, 0)
        plain.weight, plain.bias, plain.adds_bias = self.weight, self.bias, self.adds_bias
        plain.products = self.products
        return plain

    def add_adapter(self, name: str, shape: AdapterShape, whole_rows: range) -> None:
        """Adds an adapter for these rows of the full weight, or for the local ones among them."""
        inputs = full_shape(self.weight)[1]
        cut = get_cut(self.weight)
        adapter = Adapter(shape, inputs, len(whole_rows))
        self.rows[name] = whole_rows
        if cut is not None and cut.dimension == 0:
            here, self.rows[name] = _local_rows(cut, whole_rows)
            _replace_by_part(adapter, "b", Cut((len(whole_rows), shape.rank), 0, here))
            _mark_summed_over_tensor(adapter.a)
        elif cut is not None:
            _replace_by_part(adapter, "a", Cut((shape.rank, inputs), 1, cut.ranges))
            _mark_summed_over_tensor(adapter.b)
            adapter.dropout.part = partial(_column_mask, cut)
        self.adapters[name] = adapter
        # In the weight's order, whatever the order of the targets.
        self.rows = dict(sorted(self.rows.items(), key=lambda item: item[1].start))


def _local_rows(cut: Cut, wanted: range) -> tuple[tuple[range, ...], range]:
    """Returns the wanted rows that the part holds, counted from the first wanted one, and their range within the part.

    That range is contiguous: a part has queries, keys and values one after another.
    """
    found: list[range] = []
    first = done = 0
    for own_range in cut.ranges:
        both = range(max(own_range.start, wanted.start), min(own_range.stop, wanted.stop))
        if len(both):
            first = first if found else done + both.start - own_range.start
            found.append(range(both.start - wanted.start, both.stop - wanted.start))
        done += len(own_range)
    return tuple(found), range(first, first + sum(map(len, found)))


def _replace_by_part(adapter: Adapter, name: str, cut: Cut) -> None:
    parameter = nn.Parameter(torch.zeros(cut.shape))
    parameter.cut = cut  # type: ignore[attr-defined]
    setattr(adapter, name, parameter)


def _mark_summed_over_tensor(parameter: nn.Parameter) -> None:
    """Marks a parameter that is replicated in a tensor group; see `strategies.mesh.tensor.mark_summed_over_tensor`."""
    parameter.summed_over_tensor = True  # type: ignore[attr-defined]


def _column_mask(cut: Cut, shape: tuple[int, ...], _: Any) -> tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the shape of the full input, and a function that cuts the worker's columns out of a mask for it."""
    return (*shape[:-1], cut.full_shape[1]), lambda mask: torch.cat(
        [mask[..., columns.start : columns.stop] for columns in cut.ranges], -1
    )


def find_targets(model: nn.Module, names: Names) -> list[TargetLinear]:
    """Returns all rows of a network that an adapter can be attached to, in order.

    The head is excluded, since the loss never sees its outputs, and so are the fully trained modules of a classifier.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or name in ("head", *fully_trained_modules(model)):
            continue
        rows = full_shape(module.weight)[0]
        theirs = names(name)
        apart = _FUSED_PARTS.get(name.rpartition(".")[2], ())
        if len(theirs) > 1 or (not theirs and apart and _is_llama(model)):
            sizes = _qkv_sizes(model, name, len(apart))
            for part, start, size, their in zip(
                apart, _start_offsets(sizes), sizes, theirs or ("",) * len(apart), strict=True
            ):
                found.append(TargetLinear(name, part, range(start, start + size), their))
        else:
            found.append(TargetLinear(name, _ALL_ROWS, range(rows), theirs[0] if theirs else ""))
    return found


def _is_llama(model: nn.Module) -> bool:
    return getattr(getattr(model, "shape", None), "architecture", "") == "llama"


def _qkv_sizes(model: nn.Module, name: str, parts: int) -> list[int]:
    """Returns the rows of queries, keys and values (or of the last two) in the full weight."""
    shape: Any = model.shape
    size = shape.head_size or shape.hidden_size // shape.heads
    keys = (shape.kv_heads or shape.heads) * size
    return [shape.heads * size, keys, keys][-parts:]


def _start_offsets(sizes: list[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def select_targets(found: list[TargetLinear], shape: AdapterShape, *, has_experts: bool = False) -> list[TargetLinear]:
    """Returns the targets that the settings name. Raises ValueError, with the setting's name, for an unknown name."""
    if shape.all_linear:
        return found
    for target in shape.named_layers:
        if not any(target_linear.matches(target) for target_linear in found):
            known = sorted({(target_linear.hf_name or target_linear.our_name).rpartition(".")[2] for target_linear in found})
            raise UnfitError(
                f"lora.targets names {target!r}: it must be a linear layer of this network other than the head, one of "
                f"{', '.join(known)}, or `all-linear`" + ("; experts have no adapters" if has_experts else ""),
                setting="lora.targets",
                value=target,
            )
    return [target_linear for target_linear in found if any(target_linear.matches(target) for target in shape.named_layers)]


def attach_adapters(model: nn.Module, shape: AdapterShape, names: Names) -> None:
    """Freezes a network except its fully trained modules, and adds uninitialized adapters to the targeted layers.

    Raises ValueError, with the setting's name, for a name that no layer has, or a rank above the maximum of a layer.
    """
    has_experts = getattr(model, "routing", None) is not None
    wanted = select_targets(find_targets(model, names), shape, has_experts=has_experts)
    model.has_frozen_base = True  # type: ignore[assignment]  # which checkpoints leave out
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in fully_trained_modules(model).values():
        module.requires_grad_(True)
    for target_linear in wanted:
        parent, _, child = target_linear.module.rpartition(".")
        layer = model.get_submodule(target_linear.module)
        if not isinstance(layer, AdaptedLinear):
            assert isinstance(layer, Linear)
            layer = AdaptedLinear(layer)
            setattr(model.get_submodule(parent), child, layer)
        most = min(len(target_linear.rows), full_shape(layer.weight)[1])
        if shape.init in ("pissa", "olora") and shape.rank > most:
            layer_name = target_linear.hf_name or target_linear.our_name
            message = f"lora.rank is {shape.rank}: it must be at most {most}, the rank of {layer_name}"
            raise UnfitError(message, setting="lora.rank", value=shape.rank)
        layer.add_adapter(target_linear.part, shape, target_linear.rows)


def fully_trained_modules(model: nn.Module) -> Mapping[str, nn.Module]:
    """Returns the modules trained beside the adapters, by name: a classifier's head over an encoder that has none."""
    found: Mapping[str, nn.Module] = getattr(model, "fully_trained_modules", {})
    return found


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Returns the parameters of a network without those of its adapters, by name."""
    own = {id(parameter) for _, _, _, adapter in iterate_adapters(model) for parameter in adapter.parameters()}
    return ((name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in own)


def iterate_adapters(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear, str, Adapter]]:
    """Yields every adapter as (layer name, layer, name of the adapter in the layer, adapter)."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            for part in module.rows:
                adapter: Any = module.adapters[part]
                yield name, module, part, adapter


@torch.no_grad()
def start_adapters(model: nn.Module, shape: AdapterShape, seed: int) -> None:
    """Initializes adapters from the base's values or from a generator of this seed: the same for any number of workers."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer, part, adapter in iterate_adapters(model):
        rows = layer.rows[part]
        weight = layer.weight.detach()[rows.start : rows.stop].float()
        if shape.init == "kaiming":
            fill_parameter(adapter.a, partial(nn.init.kaiming_uniform_, a=math.sqrt(5), generator=generator))
        elif shape.init == "gaussian":
            fill_parameter(adapter.a, partial(nn.init.normal_, std=1 / shape.rank, generator=generator))
        else:
            a, b = (_pissa_factors if shape.init == "pissa" else _olora_factors)(weight, shape)
            for parameter, value in ((adapter.a, a), (adapter.b, b), (adapter.a0, a), (adapter.b0, b)):
                assert parameter is not None
                parameter.copy_(value)
        if adapter.magnitude is not None:
            adapter.magnitude.copy_(adapter.row_norms(weight))


def _pissa_factors(weight: torch.Tensor, shape: AdapterShape) -> tuple[torch.Tensor, torch.Tensor]:
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = (values[: shape.rank] / shape.scale).sqrt()
    return root[:, None] * right[: shape.rank], left[:, : shape.rank] * root


def _olora_factors(weight: torch.Tensor, shape: AdapterShape) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = torch.linalg.qr(weight)
    return r[: shape.rank], q[:, : shape.rank]


@torch.no_grad()
def subtract_initial_delta(model: nn.Module) -> None:
    """Subtracts the initial delta of PiSSA and OLoRA adapters from the weights, so that the network starts as its base."""
    for _, layer, part, adapter in iterate_adapters(model):
        if adapter.a0 is not None and adapter.b0 is not None:
            rows = layer.rows[part]
            layer.weight[rows.start : rows.stop] -= adapter.scale * (adapter.b0 @ adapter.a0)


def cast_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Stores the frozen matrices in another dtype; computation keeps its dtype."""
    whole = {id(module) for module in fully_trained_modules(model).values()}
    for module in model.modules():
        if isinstance(module, Linear | nn.Embedding) and id(module) not in whole:
            module.weight.data = module.weight.data.to(dtype)
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, rows: rows.float())


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Merges the adapters into the weights, in fp64, and leaves a plain network in fp32."""
    for name, layer in [(name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear)]:
        weight = layer.weight.detach().double()
        for part, rows in layer.rows.items():
            adapter: Any = layer.adapters[part]
            own = weight[rows.start : rows.stop]
            own += adapter.delta_weight()
            if adapter.magnitude is not None:
                own *= (adapter.magnitude.double() / own.norm(dim=1))[:, None]
        plain = layer.without_adapters()
        plain.weight.data = weight.float()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
