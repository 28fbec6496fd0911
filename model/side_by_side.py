"""Batched computation of several networks over one frozen base, each with its own adapters (multi-LoRA).

Tokens of all networks pass the base as one batch; each layer then adds to a network's tokens the delta of its own adapter.
Losses and gradients stay separate: no adapter sees another network's tokens.

    second = share_base(first)                                # one base in memory; `attach_adapters` adds its own adapters
    losses = SideBySide([first, second]).compute_losses([0, 1], inputs, targets)  # [(loss_sum, counted), ...]
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from raystride.model.linear import Linear, is_bf16_allowed
from raystride.model.lora import AdaptedLinear, Adapter, base_parameters, iterate_adapters
from raystride.model.shape import UnfitError
from raystride.model.transformer import Decoder, PackedDecoder


def share_base(network: nn.Module) -> nn.Module:
    """Returns a network without adapters over the base of another: the same parameters, without further memory."""
    shared: dict[int, Any] = {id(parameter): parameter for _, parameter in base_parameters(network)}
    shared |= {id(part): part for name in ("products", "shape") if (part := getattr(network, name, None)) is not None}
    copy = deepcopy(network, shared)
    for name in {name for name, *_ in iterate_adapters(copy)}:
        parent, _, child = name.rpartition(".")
        layer: Any = copy.get_submodule(name)
        setattr(copy.get_submodule(parent), child, layer.without_adapters())
    return copy


class _TokenCounts:
    """Layout of the current batch: its networks and their token counts."""

    def __init__(self) -> None:
        self.numbers: Sequence[int] = ()
        """Indices of the networks, in the order of their tokens."""
        self.sizes: list[int] = []
        """Tokens of each network."""


class SideBySideLinear(nn.Module):
    """A layer of the base with the adapters of each network, None for a network without one."""

    def __init__(self, layers: Sequence[Linear], shares: _TokenCounts) -> None:
        super().__init__()
        self._layers, self._shares = (
            tuple(layers),
            shares,
        )  # a tuple registers nothing: parameters are the networks' own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x (B, T, in), the networks' tokens concatenated, to (B, T, out)."""
        y = Linear.forward(self._layers[0], x)
        layers = [self._layers[number] for number in self._shares.numbers]
        flat, rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        if _have_equal_shapes(layers) and len(set(self._shares.sizes)) == 1 and not is_bf16_allowed():
            return _apply_batched_adapters(layers, flat, rows).view(y.shape)
        parts = zip(layers, flat.split(self._shares.sizes), rows.split(self._shares.sizes), strict=True)
        found = [layer.apply_adapters(*part) if isinstance(layer, AdaptedLinear) else part[1] for layer, *part in parts]
        return torch.cat(found).view(y.shape)


def _have_equal_shapes(layers: Sequence[Linear]) -> bool:
    """Returns whether all layers have adapters of equal shapes, so that batched products apply."""
    shapes = set()
    for layer in layers:
        if not isinstance(layer, AdaptedLinear):
            return False
        shapes.add(tuple((name, *rows, tuple(_get_adapter(layer, name).a.shape)) for name, rows in _adapter_bounds(layer)))
    return len(shapes) == 1


def _adapter_bounds(layer: AdaptedLinear) -> list[tuple[str, tuple[int, int]]]:
    return [(name, (rows.start, rows.stop)) for name, rows in layer.rows.items()]


def _get_adapter(layer: Any, name: str) -> Adapter:
    adapter: Adapter = layer.adapters[name]
    return adapter


def _apply_batched_adapters(layers: Sequence[Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Adds all networks' deltas by batched products: x (N M, in), y (N M, out) -> (N M, out)."""
    count = len(layers)
    own = x.view(count, -1, x.shape[-1])
    columns, done = [], 0
    for name, (start, stop) in _adapter_bounds(layers[0]):
        parts = [_get_adapter(layer, name) for layer in layers]
        a, b = torch.stack([adapter.a for adapter in parts]), torch.stack([adapter.b for adapter in parts])
        scale = torch.tensor([adapter.scale for adapter in parts], device=x.device, dtype=b.dtype)
        change = own @ a.transpose(1, 2) @ b.transpose(1, 2) * scale[:, None, None]
        # Under autocast a delta may have more bits than the output it is added to.
        columns += [y[:, done:start]] * (start > done) + [y[:, start:stop] + change.reshape(len(y), -1).to(y.dtype)]
        done = stop
    columns += [y[:, done:]] * (done < y.shape[1])
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


class SideBySide:
    """Decoders over one base, computed as one batch. No dropout: its masks would differ from a run's alone."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Raises ValueError if a network is no decoder, or one with its own loss."""
        first: Any = networks[0]
        known: Any = (Decoder.forward, PackedDecoder.forward)
        if not all(isinstance(network, Decoder) and type(network).forward in known for network in networks):
            message = "lora.adapters is above 1: it must be 1 but for tasks that train a decoder on words that follow"
            raise UnfitError(message, setting="lora.adapters", value=len(networks))
        self._shares = _TokenCounts()
        # Its own blocks hold the layers of all networks; every parameter belongs to one of the networks.
        shared = {id(parameter): parameter for parameter in first.parameters()}
        shared |= {id(part): part for name in ("products", "shape") if (part := getattr(first, name)) is not None}
        self._network: Any = deepcopy(first, shared)
        for name, layers in _layers_by_name(networks).items():
            parent, _, child = name.rpartition(".")
            setattr(self._network.get_submodule(parent), child, SideBySideLinear(layers, self._shares))

    def compute_losses(
        self, numbers: Sequence[int], inputs: Sequence[tuple[torch.Tensor, ...]], targets: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (loss sum, counted targets) of the networks at these indices, each on its own inputs and targets."""
        shapes = {tensors[0].shape[1] for tensors in inputs}
        if not isinstance(self._network, PackedDecoder) and len(shapes) > 1:
            single = zip(numbers, inputs, targets, strict=True)
            return [self.compute_losses([number], [own], [aims])[0] for number, own, aims in single]
        self._shares.numbers, self._shares.sizes = numbers, [tensors[0].numel() for tensors in inputs]
        ids, documents = _join_batches(inputs)
        hidden = self._network.hidden(ids, documents=documents).flatten(0, 1)
        parts = zip(hidden.split(self._shares.sizes), targets, strict=True)
        return [self._network.loss(states.view(*aims.shape, -1), aims) for states, aims in parts]


def _layers_by_name(networks: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Returns all networks' layers by name, for each name with an adapter in some network."""
    names = {name for network in networks for name, module in network.named_modules() if isinstance(module, AdaptedLinear)}
    return {name: [network.get_submodule(name) for network in networks] for name in sorted(names)}


def _join_batches(inputs: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the ids of all networks as one batch; packed documents as one row, with the offset of each document."""
    if len(inputs[0]) == 1:
        return torch.cat([ids for (ids,) in inputs]), None
    begun, starts = 0, []
    for ids, documents in inputs:
        starts.append(documents[:-1] + begun)
        begun += ids.numel()
    end = inputs[0][1].new_full((1,), begun)
    return torch.cat([ids.reshape(-1) for ids, _ in inputs])[None], torch.cat([*starts, end])
