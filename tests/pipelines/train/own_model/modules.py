"""Networks of kinds that a trainer may get wrong: lazy, tied, parametrised, compiled, hooked, with parts shared or unused.

make = MODULES["tied"]                                    # (width) -> nn.Module, of inputs (n, width) and outputs (n, 3)
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations

Make = Callable[[int], nn.Module]


class Net(nn.Module):
    """A linear network; `build` gives it further parts, `use` computes its outputs with them."""

    def __init__(self, width: int, build: Callable[[Any], None], use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.width, self.body, self.head = width, nn.Linear(width, width), nn.Linear(width, 3)
        self.use = use
        build(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


class Heads(nn.Module):
    """A block with blocks of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList([nn.Linear(width, 4), nn.Linear(width, 4)]), nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], 1))  # type: ignore[no-any-return]


def _net(build: Callable[[Any], None], use: Callable[[Any, torch.Tensor], torch.Tensor]) -> Make:
    return lambda width: Net(width, build, use)


def _plain(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.head(torch.tanh(net.body(x)))  # type: ignore[no-any-return]


def _parametrised(wrap: Callable[[nn.Module], nn.Module]) -> Make:
    def make(width: int) -> nn.Module:
        return nn.Sequential(wrap(nn.Linear(width, width)), nn.Tanh(), nn.Linear(width, 3))

    return make


def _lazy(width: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(width), nn.Tanh(), nn.Linear(width, 3))


def _lazy_after_a_sample(width: int) -> nn.Module:
    model = _lazy(width)
    model(torch.zeros(1, width))
    return model


def _tie(net: Any) -> None:
    net.again = nn.Linear(net.width, net.width)
    net.again.weight = net.body.weight


def _share(net: Any) -> None:
    net.blocks = nn.ModuleList([net.body, nn.Tanh(), net.body])


def _nest(net: Any) -> None:
    net.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(net.width, net.width), Heads(net.width)]), nn.ModuleList()])


def _tie_blocks(net: Any) -> None:
    net.blocks = nn.ModuleList([nn.Linear(net.width, net.width) for _ in range(3)])
    net.blocks[2].weight = net.blocks[0].weight


def _use_blocks(net: Any, x: torch.Tensor) -> torch.Tensor:
    for block in net.blocks:
        x = torch.tanh(block(x))
    return net.head(net.body(x))  # type: ignore[no-any-return]


def _add_unused(net: Any) -> None:
    net.idle = nn.Linear(net.width, 2)


def _slice(net: Any) -> None:
    base = torch.randn(net.width + 2, net.width) / 4
    net.upper, net.lower = nn.Parameter(base[:-2]), nn.Parameter(base[2:])


def _slice_apart(net: Any) -> None:
    base = torch.randn(net.width, 2 * net.width) / 4
    net.upper, net.lower = nn.Parameter(base[:, : net.width]), nn.Parameter(base[:, net.width :])


def _use_slices(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.head(torch.tanh(linear(linear(net.body(x), net.upper), net.lower)))  # type: ignore[no-any-return]


def _add_collections(net: Any) -> None:
    net.scales = nn.ParameterList([nn.Parameter(torch.ones(net.width)), nn.Parameter(torch.zeros(net.width))])
    net.named = nn.ParameterDict({"in": nn.Parameter(torch.ones(net.width)), "bias": nn.Parameter(torch.zeros(3))})


def _use_collections(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.head(net.body(x * net.named["in"]) * net.scales[0] + net.scales[1]) + net.named["bias"]  # type: ignore[no-any-return]


def _alias(net: Any) -> None:
    net.register_buffer("seen", net.body.weight.data)


def _count_in(persistent: bool) -> Callable[[Any], None]:
    def build(net: Any) -> None:
        net.register_buffer("calls", torch.zeros(()), persistent=persistent)

    return build


def _use_count(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.training:
        net.calls += 1
    return _plain(net, x) * (1 + 0.1 * net.calls)


def _add_cache(net: Any) -> None:
    net.register_buffer("cache", None, persistent=False)


def _use_cache(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.cache is None or len(net.cache) < len(x):
        net.cache = torch.arange(float(len(x)))
    return _plain(net, x + net.cache[: len(x), None] / 100)


def _hook(on: str) -> Callable[[Any], None]:
    def build(net: Any) -> None:
        net.body.register_buffer("mean", torch.zeros(net.width))
        state = {"calls": 0}

        def forward(module: Any, _: Any, out: torch.Tensor) -> torch.Tensor:
            state["calls"] += on == "closure" and module.training
            if on == "buffer" and module.training:
                module.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
            return out * (1 + 0.1 * state["calls"]) + module.mean

        def backward(module: Any, inward: Any, outward: Any) -> Any:
            module.mean.mul_(0.9).add_(outward[0].detach().mean(0), alpha=0.1)
            return inward

        net.body.register_forward_hook(forward)
        if on == "backward":
            net.body.register_full_backward_hook(backward)

    return build


def _hook_itself(net: Any) -> None:
    net.body.register_forward_hook(lambda _, inputs, out: out * net.head.bias.sum())


def _add_teacher(net: Any) -> None:
    net.teacher = copy.deepcopy(net.body).requires_grad_(False)


def _use_teacher(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.training:
        with torch.no_grad():
            for slow, fast in zip(net.teacher.parameters(), net.body.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)
    return _plain(net, x) + net.teacher(x)[:, :3]  # type: ignore[no-any-return]


def _add_table(net: Any) -> None:
    net.table = nn.Embedding(5, net.width, max_norm=0.5)


def _use_table(net: Any, x: torch.Tensor) -> torch.Tensor:
    return _plain(net, x + net.table((x[:, 0].abs() * 3).long().clamp(max=4)))


class Slotted(Net):
    """State in a slot, which is not in `vars`."""

    __slots__ = ("counted",)

    def __init__(self, width: int) -> None:
        super().__init__(width, lambda _: None, _plain)
        self.counted = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted += self.training
        return super().forward(x) * (1 + 0.1 * self.counted)


class Propertied(Net):
    """A parameter behind a property."""

    def __init__(self, width: int) -> None:
        super().__init__(width, lambda _: None, _plain)
        self.raw = nn.Parameter(torch.zeros(()))

    @property
    def scale(self) -> torch.Tensor:
        """A positive scale."""
        return self.raw.exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Attention(nn.Module):
    """Attention of all parts of an input to each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.lift(x[:, :, None])
        return self.head(self.attention(hidden, hidden, hidden, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A network with flat weights of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x[:, :, None])[0][:, -1])  # type: ignore[no-any-return]


def _compiled(width: int) -> nn.Module:
    return torch.compile(Net(width, lambda _: None, _plain), backend="eager")  # type: ignore[return-value]


def _compiled_part(width: int) -> nn.Module:
    return nn.Sequential(torch.compile(nn.Linear(width, width), backend="eager"), nn.Tanh(), nn.Linear(width, 3))  # type: ignore[arg-type]


def _compiled_in_place(width: int) -> nn.Module:
    net = Net(width, lambda _: None, _plain)
    net.body.compile(backend="eager")
    return net


MODULES: dict[str, Make] = {
    "lazy": _lazy,
    "lazy after a sample": _lazy_after_a_sample,
    "tied": _net(_tie, lambda net, x: net.head(net.again(torch.tanh(net.body(x))))),
    "weight_norm": _parametrised(parametrizations.weight_norm),
    "spectral_norm": _parametrised(parametrizations.spectral_norm),
    "orthogonal": _parametrised(parametrizations.orthogonal),
    "old weight_norm": _parametrised(nn.utils.weight_norm),
    "old spectral_norm": _parametrised(nn.utils.spectral_norm),
    "compiled": _compiled,
    "compiled part": _compiled_part,
    "compiled in place": _compiled_in_place,
    "forward hook": _net(_hook("buffer"), _plain),
    "backward hook": _net(_hook("backward"), _plain),
    "hook with a closure": _net(_hook("closure"), _plain),
    "hook with the model": _net(_hook_itself, _plain),
    "shared": _net(_share, lambda net, x: net.head(net.blocks[2](net.blocks[1](net.blocks[0](x))))),
    "nested": _net(_nest, lambda net, x: net.head(net.body(net.blocks[0][1](net.blocks[0][0](x))))),
    "tied blocks": _net(_tie_blocks, _use_blocks),
    "unused": _net(_add_unused, _plain),
    "overlapping": _net(_slice, _use_slices),
    "slices": _net(_slice_apart, _use_slices),
    "collections": _net(_add_collections, _use_collections),
    "aliased": _net(_alias, _plain),
    "persistent": _net(_count_in(True), _use_count),
    "not persistent": _net(_count_in(False), _use_count),
    "cache": _net(_add_cache, _use_cache),
    "teacher": _net(_add_teacher, _use_teacher),
    "max_norm": _net(_add_table, _use_table),
    "slot": Slotted,
    "property": Propertied,
    "attention": Attention,
    "recurrent": Recurrent,
}
"""Networks by kind."""
REFUSED_KINDS = {
    "lazy": r"model must have the shapes of its parameters: call it with a sample once.*0\.weight has none",
    "overlapping": r"model must have memory of its own for each parameter and buffer.*upper, lower share it",
    "aliased": r"model must have memory of its own for each parameter and buffer.*body\.weight, seen share it",
    "not persistent": "model must train alike after a resume.*attribute calls of module, which no checkpoint holds",
    "hook with a closure": "model must train alike after a resume.*a checkpoint lacks something",
    "slot": "model must train alike after a resume.*attribute counted of module",
}
"""What is said of those that cannot go on."""
