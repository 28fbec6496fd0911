"""The experts' block against a plain loop over tokens' experts, its losses against their formulas, its loads."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.block import build_feed_forward
from raystride.model.experts import Experts, Routing, expert_products, expert_products_loop, grouped_mm_supports
from raystride.model.linear import Products, bf16_products
from raystride.model.shape import flops_per_token, idle_weights
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig, SettingError

SHAPE = ModelConfig(
    architecture="llama", layers=2, heads=2, hidden_size=16, context=12, experts=5, experts_per_token=2, expert_ffn_size=24
)
ROUTERS = ("softmax", "softmax_normalized", "sigmoid")


def build_experts(shape: ModelConfig, seed: int = 0) -> Experts:
    """A block of experts with drawn weights."""
    torch.manual_seed(seed)
    block = build_feed_forward(shape, Products("torch"))
    assert isinstance(block, Experts)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return block


def plain_experts(block: Experts, shape: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    """The same function, token by token and expert by expert, in plain PyTorch."""
    act = (lambda g: F.gelu(g, approximate="tanh")) if shape.gate == "gelu" else F.silu
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = block.router.weight @ token
        scores = torch.sigmoid(logits) if shape.router == "sigmoid" else torch.softmax(logits, -1)
        biased = scores if block.router.bias is None else scores + block.router.bias
        chosen = sorted(range(shape.experts), key=lambda expert: -float(biased[expert].detach()))[: shape.experts_per_token]
        total = 1.0 if shape.router == "softmax" else scores[chosen].sum()
        y = torch.zeros_like(token)
        for expert in chosen:
            hidden = act(block.gate.weight[expert] @ token) * (block.up.weight[expert] @ token)
            y = y + scores[expert] / total * (block.down.weight[expert] @ hidden)
        if block.shared is not None:
            shared = block.shared
            y = y + shared.down.weight @ (act(shared.gate.weight @ token) * (shared.up.weight @ token))
        rows.append(y)
    return torch.stack(rows).view(x.shape)


def gradients(block: Experts, y: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a weighted sum of y, by name; zeros where there is none."""
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    named = {name: p for name, p in block.named_parameters() if p.requires_grad} | {"x": x}
    found = torch.autograd.grad((weights * y).sum(), list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


@settings(max_examples=30, deadline=None)
@given(
    router=st.sampled_from(ROUTERS),
    experts=st.integers(1, 9),
    chosen=st.integers(1, 4),
    shared=st.integers(0, 2),
    width=st.sampled_from([4, 6, 16]),
    hidden=st.sampled_from([4, 10, 24]),
    gate=st.sampled_from(["silu", "gelu"]),
    tokens=st.integers(1, 11),
)
def test_block_is_the_plain_loop_forward_and_gradients(
    router: str, experts: int, chosen: int, shared: int, width: int, hidden: int, gate: str, tokens: int
) -> None:
    shape = replace(
        SHAPE, router=router, experts=experts, experts_per_token=min(chosen, experts), shared_experts=shared, heads=1,
        hidden_size=width, expert_ffn_size=hidden, gate=gate,
    )  # fmt: skip
    block = build_experts(shape, tokens)
    x = torch.randn(1, tokens, width, requires_grad=True)
    y, plain = block(x), plain_experts(block, shape, x)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)
    wanted = gradients(block, plain, x)
    for name, gradient in gradients(block, y, x).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4 * max(1.0, float(wanted[name].abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 3, 0, 4, 0], [7, 0, 0, 0, 0], [1, 2, 1, 2, 1], [0, 0, 0, 0, 0]])
def test_grouped_product_is_the_loop_with_empty_experts(dtype: torch.dtype, counts: list[int]) -> None:
    torch.manual_seed(1)
    rows = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(5, 24, 16, dtype=dtype, requires_grad=True)
    assert grouped_mm_supports(rows, weight, dtype) == (sum(counts) > 0)
    grad = torch.randn(24, sum(counts), dtype=dtype).t()  # of other strides than grouped products take
    found = [product(rows, weight, torch.tensor(counts)) for product in (expert_products, expert_products_loop)]
    torch.testing.assert_close(found[0], found[1])
    for one, other in zip(*(torch.autograd.grad(y, [rows, weight], grad) for y in found), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("width", "dtype", "taken"), [(16, torch.float32, True), (18, torch.float32, False),
                                                       (12, torch.bfloat16, False), (16, torch.float64, False)])  # fmt: skip
def test_widths_and_types_that_a_grouped_product_does_not_take_use_the_loop(
    width: int, dtype: torch.dtype, taken: bool
) -> None:
    rows, weight = torch.randn(7, width, dtype=dtype), torch.randn(3, 16, width, dtype=dtype)
    counts = torch.tensor([2, 0, 5])
    assert grouped_mm_supports(rows, weight, dtype) == taken
    torch.testing.assert_close(expert_products(rows, weight, counts), expert_products_loop(rows, weight, counts))


def test_products_are_in_bfloat16_where_linear_layers_are_so_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raystride.model.linear.has_bf16", lambda: True)
    rows, weight, counts = torch.randn(6, 16), torch.randn(2, 8, 16), torch.tensor([4, 2])
    with bf16_products():
        y = expert_products(rows, weight, counts)
    rounded = torch.cat([part @ w.t() for part, w in zip(rows.bfloat16().split([4, 2]), weight.bfloat16(), strict=True)])
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, rounded.float())


def test_a_frozen_weight_in_bfloat16_is_widened_for_its_product() -> None:
    rows, weight = torch.randn(6, 16), torch.randn(2, 8, 16, dtype=torch.bfloat16)
    y = expert_products(rows, weight, torch.tensor([4, 2]))
    torch.testing.assert_close(y, expert_products_loop(rows, weight.float(), torch.tensor([4, 2])))


def balance_by_hand(model: Decoder, ids: torch.Tensor, mask: torch.Tensor, slots: list[int]) -> tuple[float, float]:
    """Balance loss and z-loss summed over targets, slot by slot, from each layer's own decisions."""
    model.hidden(ids)
    balance = squares = 0.0
    for block in model.blocks:
        routed = block.feed_forward.routed
        logits, chosen = routed.logits.view(*ids.shape, -1).detach(), routed.chosen.view(*ids.shape, -1)
        first = 0
        for rows in slots:
            kept = mask[first : first + rows]
            slot_logits, slot_chosen = logits[first : first + rows][kept], chosen[first : first + rows][kept]
            first += rows
            if not len(slot_logits):
                continue
            shares = torch.bincount(slot_chosen.flatten(), minlength=slot_logits.shape[-1]) / slot_chosen.numel()
            chances = slot_logits.softmax(-1).mean(0)
            balance += float(len(slot_logits) * slot_logits.shape[-1] * (shares * chances).sum()) / len(model.blocks)
            squares += float(slot_logits.logsumexp(-1).square().sum()) / len(model.blocks)
    return balance, squares


def test_losses_are_those_of_each_slot_by_their_formulas_and_not_in_the_reported_loss() -> None:
    torch.manual_seed(0)
    shape = replace(SHAPE, balance_loss=0.5, router_z_loss=0.25)
    model = Decoder(shape, 11)
    ids, slots = torch.randint(0, 11, (5, 12)), [2, 1, 2]
    targets = ids.roll(-1, 1).clone()
    (
        targets[0, 3:],
        targets[2],
    ) = -100, -100
    assert model.routing is not None
    model.routing.slot_rows = slots
    loss, _ = model(ids, targets)
    plain = Decoder.loss(model, model.hidden(ids), targets)[0]
    assert float(loss.detach()) == float(plain.detach())
    balance, squares = balance_by_hand(model, ids, targets != -100, slots)
    assert min(balance, squares) > 0
    # The value that is differentiated, by a step along the router's gradient.
    router = model.blocks[0].feed_forward.router.weight
    (whole,), (without,) = (torch.autograd.grad(value, router, retain_graph=True) for value in (loss, plain))
    direction = (whole - without) / (whole - without).norm()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            router += sign * 1e-2 * direction
            found = balance_by_hand(model, ids, targets != -100, slots)
            router -= sign * 1e-2 * direction
        values.append(0.5 * found[0] + 0.25 * found[1])
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(float((whole - without).norm()), rel=2e-2)


@pytest.mark.parametrize("router", ROUTERS)
def test_joined_slots_have_the_gradients_of_one_after_the_other(router: str) -> None:
    shape = replace(SHAPE, router=router, balance_loss=0.3, router_z_loss=0.1)
    torch.manual_seed(0)
    model = Decoder(shape, 11)
    ids = torch.randint(0, 11, (5, 12))
    targets = ids.roll(-1, 1).clone()
    targets[1, 2:] = -100
    assert model.routing is not None
    found = []
    for parts in ([[2, 1, 2]], [[2], [1], [2]], [[2, 1], [2]]):
        model.zero_grad()
        model.routing.begin_step()
        first = 0
        for slots in parts:
            rows = slice(first, first + sum(slots))
            first = rows.stop
            model.routing.slot_rows = slots
            model(ids[rows], targets[rows])[0].backward()
        model.routing.finish_step(lambda values: values, torch.tensor(True))  # the bias stays
        loads = model.routing.take_loads(lambda values: values)
        found.append((loads, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    assert found[0][0].sum(1).tolist() == [2 * int((targets != -100).sum())] * 2  # each token has its two experts
    for loads, grads in found[1:]:
        assert torch.equal(loads, found[0][0])
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-4, atol=1e-5)


def test_the_bias_moves_towards_even_loads_once_a_step_unless_the_step_was_bad() -> None:
    model = Decoder(replace(SHAPE, router="sigmoid", router_bias_rate=0.01), 11)
    routing = model.routing
    assert routing is not None
    assert len(routing.biases) == 2
    ids = torch.randint(0, 11, (4, 12))
    for bad in (True, False):
        routing.begin_step()
        model.hidden(ids)
        chosen = model.blocks[1].feed_forward.routed.chosen
        model(ids, ids)
        before = routing.biases[1].clone()
        routing.finish_step(lambda values: 2 * values, torch.tensor(bad))
        loads = torch.bincount(chosen.flatten(), minlength=5).float()
        moved = 0.0 if bad else 0.01 * (loads.mean() - loads).sign()
        torch.testing.assert_close(routing.biases[1].detach(), before + moved)


def test_frozen_routers_have_no_losses_and_no_moves() -> None:
    for router in ("softmax", "sigmoid"):
        model = Decoder(replace(SHAPE, router=router, balance_loss=1.0), 11)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        routing = model.routing
        assert routing is not None
        ids = torch.randint(0, 11, (2, 12))
        loss = model(ids, ids)[0]
        assert not loss.requires_grad
        routing.finish_step(lambda values: values, torch.tensor(False))
        assert all(not bias.any() for bias in routing.biases)


def test_parameters_and_flops_count_the_experts_that_a_token_uses() -> None:
    shape = replace(SHAPE, shared_experts=1)
    model = Decoder(shape, 11)
    total = sum(p.numel() for p in model.parameters())
    dense = replace(shape, experts=0, shared_experts=0, expert_ffn_size=0, ffn_size=3 * 24)
    routers = 2 * 5 * 16
    assert total - idle_weights(shape) == sum(p.numel() for p in Decoder(dense, 11).parameters()) + routers
    assert flops_per_token(shape, 11) == flops_per_token(dense, 11) + 6 * routers


def test_a_network_that_has_trained_can_be_copied() -> None:
    model = Decoder(SHAPE, 11)
    ids = torch.randint(0, 11, (2, 12))
    model(ids, ids)[0].backward()
    copied = deepcopy(model)
    assert torch.equal(copied.hidden(ids), model.hidden(ids))


def test_initial_values_are_those_of_a_feed_forward() -> None:
    torch.manual_seed(0)
    experts = Decoder(replace(SHAPE, hidden_size=64, shared_experts=1), 11).blocks[0].feed_forward
    assert float(experts.gate.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(experts.down.weight.detach().std()) == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(2 x 2 layers)
    assert float(experts.shared.down.weight.detach().std()) == pytest.approx(0.01, rel=0.1)


def test_settings_of_experts_are_refused_where_they_cannot_hold() -> None:
    with pytest.raises(SettingError, match=r"experts_per_token is 6: it must be at most model\.experts, 5"):
        replace(SHAPE, experts_per_token=6)
    with pytest.raises(SettingError, match=r"shared_experts"):
        ModelConfig(architecture="llama", shared_experts=1)
    with pytest.raises(SettingError, match=r"model\.experts"):
        ModelConfig(architecture="gpt2", experts=4)
    with pytest.raises(SettingError, match=r"qk_norm_joint"):
        ModelConfig(architecture="llama", qk_norm_joint=True)
    assert Routing(Decoder(SHAPE, 11), SHAPE).biases == []
