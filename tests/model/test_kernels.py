"""A whole decoder on the Triton kernels, in the interpreter, against the same decoder in PyTorch."""

from collections.abc import Iterator

import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Model, Optimizer
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from tests.distributed import run_distributed

STEPS = 6


@pytest.fixture(autouse=True)
def choose_again_afterwards() -> Iterator[None]:
    """Leaves the process as it was."""
    yield
    use_kernels("auto")


def _train(shape: Model, kernels: str) -> tuple[list[float], Decoder, dict[str, str]]:
    """Losses of some steps on one batch, the model, and what ran."""
    use_kernels(kernels)
    torch.manual_seed(0)
    model = Decoder(shape, 61)
    optimizer = build_optimizer(Optimizer(weight_decay=0.1), model)
    ids = torch.randint(0, 61, (2, shape.context + 1))
    targets = ids[:, 1:].clone()
    targets[0, :3] = -100
    losses = []
    for _ in range(STEPS):
        loss_sum, counted = model(ids[:, :-1], targets)
        for parameter in model.parameters():
            parameter.grad = None
        (loss_sum / counted).backward()
        optimizer.update(1e-2)
        losses.append(loss_sum.item() / counted.item())
    return losses, model, kernels_ran()


@pytest.mark.parametrize(
    "shape",
    [
        Model(layers=2, heads=2, width=32, context=19, bias=True),
        Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=48, context=19),
    ],
    ids=["gpt2", "llama"],
)
def test_same_losses_with_kernels_and_without(shape: Model) -> None:
    expected, reference, ran = _train(shape, "torch")
    assert set(ran.values()) == {"torch"}
    losses, model, ran = _train(shape, "triton")
    assert set(ran.values()) == {"triton"}
    # Both are fp32: a loss is a mean of some forty logarithms, each known to about 100 units in the last place, and AdamW
    # divides by the gradient's own size, so that a step carries relative errors of the gradient over unchanged.
    assert losses == pytest.approx(expected, rel=2e-5)
    assert losses[-1] < 0.8 * losses[0]
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "shape",
    [
        Model(layers=1, heads=2, width=32, context=19, gelu="tanh", norm_eps=1e-3, tied=False, qkv_bias=True),
        Model(flavour="llama", layers=1, heads=4, kv_heads=2, width=48, context=19, head_size=16, qk_norm=True, tied=True),
    ],
    ids=["gpt2 by tanh", "qwen3"],
)
def test_same_gradients_with_kernels_and_without(shape: Model) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 61)
    ids = torch.randint(0, 61, (2, shape.context))
    found = []
    for kernels in ("torch", "triton"):
        use_kernels(kernels)
        loss_sum, _ = model(ids, ids)
        found.append(torch.autograd.grad(loss_sum, list(model.parameters())))
        assert set(kernels_ran().values()) == {kernels}
    for expected, mine in zip(*found, strict=True):
        # Both are fp32: a gradient is a sum over 38 tokens of what has come through ten sums of up to 200 terms.
        torch.testing.assert_close(mine, expected, rtol=0, atol=100 * torch.finfo().eps * float(expected.abs().max()))


def _under_wrappers(rank: int, world: int) -> list[float]:
    """The gradients' squares, summed, of one decoder alone, under DDP, under FSDP2, and under FSDP2 with checkpointing."""
    from torch.distributed._composable import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    use_kernels("triton")
    shape = Model(flavour="llama", layers=2, heads=2, width=16, context=16)
    ids = torch.arange(32).view(2, 16) % 23
    found = []
    for wrapper in ("none", "ddp", "fsdp", "fsdp and checkpointing"):
        torch.manual_seed(0)
        model: torch.nn.Module = Decoder(shape, 23)
        if "checkpointing" in wrapper:
            for block in model.blocks:  # type: ignore[union-attr]
                checkpoint(block)
        if "fsdp" in wrapper:
            mesh = init_device_mesh("cpu", (world,))
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        loss, _ = (DistributedDataParallel(model) if wrapper == "ddp" else model)(ids, ids)
        loss.backward()
        whole = [p.grad.full_tensor() if "fsdp" in wrapper else p.grad for p in model.parameters()]
        found.append(sum(float(grad.double().square().sum()) for grad in whole))
    assert set(kernels_ran().values()) == {"triton"}
    return found


def test_gradients_are_the_same_under_ddp_and_fsdp() -> None:
    for alone, *others in run_distributed(_under_wrappers, 2):
        assert others == pytest.approx([alone] * 3, rel=1e-5)


def test_the_whole_model_compiles_with_kernels() -> None:
    use_kernels("triton")
    torch.manual_seed(0)
    model = Decoder(Model(flavour="llama", layers=1, heads=2, width=32, context=16), 61)
    ids = torch.randint(0, 61, (2, 16))
    expected, _ = model(ids, ids)
    loss, _ = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, ids)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert all(p.grad is not None for p in model.parameters())
