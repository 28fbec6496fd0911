"""Networks that share a frozen base and differ in their adapters, computed together: the base's products once for all.

Tokens of all networks go through the base as one batch; each layer then adds to each network's tokens what its own adapter
changes. Losses are each network's own, and so are its gradients: no adapter sees another network's tokens.

    second = over_same_base(first)                            # one base in memory; `attach` gives it adapters of its own
    losses = SideBySide([first, second]).losses([0, 1], inputs, targets)  # [(loss_sum, counted), ...]
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from raystride.model.linear import Linear, in_bf16
from raystride.model.lora import AdaptedLinear, Adapter, adapted, base_parameters
from raystride.model.shape import UnfitError
from raystride.model.transformer import Decoder, PackedDecoder


def over_same_base(network: nn.Module) -> nn.Module:
    """A network without adapters over the base of one with them: the same parameters, which take no more memory."""
    shared: dict[int, Any] = {id(each): each for _, each in base_parameters(network)}
    shared |= {id(each): each for name in ("products", "shape") if (each := getattr(network, name, None)) is not None}
    copy = deepcopy(network, shared)
    for name in {name for name, *_ in adapted(copy)}:
        parent, _, child = name.rpartition(".")
        layer: Any = copy.get_submodule(name)
        setattr(copy.get_submodule(parent), child, layer.without_adapters())
    return copy


class _Shares:
    """Whose tokens lie where in the batch that is being computed."""

    def __init__(self) -> None:
        self.numbers: Sequence[int] = ()
        """Networks, in the order of their tokens."""
        self.sizes: list[int] = []
        """How many tokens each has."""


class SideBySideLinear(nn.Module):
    """A layer of the base, with the adapters that each network has there, or None where it has none."""

    def __init__(self, layers: Sequence[Linear], shares: _Shares) -> None:
        super().__init__()
        self._layers, self._shares = tuple(layers), shares  # a tuple registers nothing: parameters are the networks' own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, in), of all networks one after another -> (B, T, out)."""
        y = Linear.forward(self._layers[0], x)
        layers = [self._layers[number] for number in self._shares.numbers]
        flat, rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        if _alike(layers) and len(set(self._shares.sizes)) == 1 and not in_bf16():
            return _together(layers, flat, rows).view(y.shape)
        parts = zip(layers, flat.split(self._shares.sizes), rows.split(self._shares.sizes), strict=True)
        found = [layer.changed(*part) if isinstance(layer, AdaptedLinear) else part[1] for layer, *part in parts]
        return torch.cat(found).view(y.shape)


def _alike(layers: Sequence[Linear]) -> bool:
    """Whether all have adapters of the same shapes, which can be multiplied at once."""
    shapes = set()
    for layer in layers:
        if not isinstance(layer, AdaptedLinear):
            return False
        shapes.add(tuple((name, *rows, tuple(_part(layer, name).a.shape)) for name, rows in _ends(layer)))
    return len(shapes) == 1


def _ends(layer: AdaptedLinear) -> list[tuple[str, tuple[int, int]]]:
    return [(name, (rows.start, rows.stop)) for name, rows in layer.rows.items()]


def _part(layer: Any, name: str) -> Adapter:
    adapter: Adapter = layer.adapters[name]
    return adapter


def _together(layers: Sequence[Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All networks' changes by batched products: x (N M, in), y (N M, out) -> (N M, out)."""
    count = len(layers)
    own = x.view(count, -1, x.shape[-1])
    columns, done = [], 0
    for name, (start, stop) in _ends(layers[0]):
        parts = [_part(layer, name) for layer in layers]
        a, b = torch.stack([each.a for each in parts]), torch.stack([each.b for each in parts])
        scale = torch.tensor([each.scale for each in parts], device=x.device, dtype=b.dtype)
        change = own @ a.transpose(1, 2) @ b.transpose(1, 2) * scale[:, None, None]
        # Under autocast a change may be in more bits than what it is added to.
        columns += [y[:, done:start]] * (start > done) + [y[:, start:stop] + change.reshape(len(y), -1).to(y.dtype)]
        done = stop
    columns += [y[:, done:]] * (done < y.shape[1])
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


class SideBySide:
    """Decoders over one base, computed together. Without dropout: masks would be another run's."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Raises ValueError where one is no decoder, or one with a loss of its own."""
        first: Any = networks[0]
        known: Any = (Decoder.forward, PackedDecoder.forward)
        if not all(isinstance(each, Decoder) and type(each).forward in known for each in networks):
            message = "lora.adapters is above 1: it must be 1 but for tasks that train a decoder on words that follow"
            raise UnfitError(message, setting="lora.adapters", value=len(networks))
        self._shares = _Shares()
        # Blocks of its own, in which layers stand side by side; every parameter is one of the networks'.
        shared = {id(each): each for each in first.parameters()}
        shared |= {id(each): each for name in ("products", "shape") if (each := getattr(first, name)) is not None}
        self._network: Any = deepcopy(first, shared)
        for name, layers in _layers(networks).items():
            parent, _, child = name.rpartition(".")
            setattr(self._network.get_submodule(parent), child, SideBySideLinear(layers, self._shares))

    def losses(
        self, numbers: Sequence[int], inputs: Sequence[tuple[torch.Tensor, ...]], targets: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of the networks of these numbers, each on inputs and targets of its own: loss sums, and how many targets count."""
        shapes = {each[0].shape[1] for each in inputs}
        if not isinstance(self._network, PackedDecoder) and len(shapes) > 1:
            single = zip(numbers, inputs, targets, strict=True)
            return [self.losses([number], [own], [aims])[0] for number, own, aims in single]
        self._shares.numbers, self._shares.sizes = numbers, [each[0].numel() for each in inputs]
        ids, documents = _joined(inputs)
        hidden = self._network.hidden(ids, documents=documents).flatten(0, 1)
        parts = zip(hidden.split(self._shares.sizes), targets, strict=True)
        return [self._network.loss(each.view(*aims.shape, -1), aims) for each, aims in parts]


def _layers(networks: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """By name, the layers that have an adapter in some network: those of all networks."""
    names = {name for each in networks for name, module in each.named_modules() if isinstance(module, AdaptedLinear)}
    return {name: [each.get_submodule(name) for each in networks] for name in sorted(names)}


def _joined(inputs: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids of all networks as one batch; of packed documents as one row, with where each document begins in it."""
    if len(inputs[0]) == 1:
        return torch.cat([ids for (ids,) in inputs]), None
    begun, starts = 0, []
    for ids, documents in inputs:
        starts.append(documents[:-1] + begun)
        begun += ids.numel()
    end = inputs[0][1].new_full((1,), begun)
    return torch.cat([ids.reshape(-1) for ids, _ in inputs])[None], torch.cat([*starts, end])
