"""The decoder in all flavours: its sizes, initialisation, loss and causality, and the same with Triton's kernels."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.attention import rotation_table
from raystride.model.block import sinusoidal_positions
from raystride.model.transformer import Decoder, PackedDecoder, document_positions
from raystride.pipelines.config import ModelConfig, OptimizerConfig
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from tests.distributed import run_distributed

FLAVOURS = [
    ModelConfig(layers=2, heads=4, hidden_size=32, context=16),
    ModelConfig(layers=2, heads=4, hidden_size=32, context=16, bias=True),
    ModelConfig(architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=32, context=16),
    ModelConfig(norm="post", layers=2, heads=4, hidden_size=32, context=16),
    ModelConfig(architecture="original", layers=2, heads=4, hidden_size=32, context=16),
    ModelConfig(
        layers=2, heads=4, hidden_size=32, context=16, qkv_bias=True, head_size=6, gelu="tanh", tie_embeddings=False
    ),
    ModelConfig(
        architecture="llama",
        layers=2,
        heads=3,
        kv_heads=1,
        hidden_size=32,
        context=16,
        head_size=8,
        qk_norm=True,
        softcap=2.0,
        tie_embeddings=True,
        rope_scaling=(8.0, 1.0, 4.0, 64.0),
    ),
    ModelConfig(
        architecture="llama",
        layers=2,
        heads=4,
        hidden_size=32,
        context=16,
        norm="sandwich",
        gate="gelu",
        softcap=2.0,
        logit_softcap=2.0,
        window=4,
        window_layers=(0,),
        window_rope_theta=100.0,
        query_pre_attn_scalar=5,
        scaled_embedding=True,
        out_bias=True,
    ),
    ModelConfig(
        architecture="llama", layers=2, heads=4, hidden_size=32, context=16, window=3, nope_layers=(0,), rotary_fraction=0.5
    ),
]


LLAMA = ModelConfig(
    architecture="llama", layers=16, heads=32, kv_heads=8, hidden_size=2048, ffn_size=8192, tie_embeddings=True
)
QWEN2 = replace(LLAMA, layers=24, heads=14, kv_heads=2, hidden_size=896, ffn_size=4864, qkv_bias=True)
QWEN3 = replace(LLAMA, layers=28, heads=16, head_size=128, hidden_size=1024, ffn_size=3072, qk_norm=True)
PUBLISHED = {
    "GPT-2": (ModelConfig(layers=12, heads=12, hidden_size=768, context=1024, bias=True), 50_257, 124_439_808),
    "Llama 3.2 1B": (LLAMA, 128_256, 1_235_814_400),
    "Qwen2.5 0.5B": (QWEN2, 151_936, 494_032_768),
    "Qwen3 0.6B": (QWEN3, 151_936, 596_049_920),
}


@pytest.mark.parametrize(("shape", "vocabulary", "published"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_models_have_their_published_sizes(shape: ModelConfig, vocabulary: int, published: int) -> None:
    with torch.device("meta"):
        model = Decoder(shape, vocabulary)
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize("shape", FLAVOURS)
def test_loss_is_the_sum_over_targets_that_count(shape: ModelConfig) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 65)
    ids = torch.randint(0, 65, (3, 16))
    targets = ids.roll(-1, 1)
    targets[0, :5] = -100
    loss_sum, counted = model(ids, targets)
    logits = model.logits(model.hidden(ids))
    log_probabilities = logits.double().log_softmax(-1)
    expected = -sum(log_probabilities[b, t, targets[b, t]] for b in range(3) for t in range(16) if targets[b, t] != -100)
    assert counted == 3 * 16 - 5
    assert loss_sum.item() == pytest.approx(float(expected.detach()), rel=1e-5)
    # A fresh model knows nothing: every id is about equally likely. Logits of `original` begin as N(0, 1), whose exponential
    # has a mean of e^(1/2).
    spread = 0.5 if shape.architecture == "original" else 0.0
    assert float((loss_sum / counted).detach()) == pytest.approx(math.log(65) + spread, rel=0.02)


@pytest.mark.parametrize("shape", FLAVOURS)
def test_no_token_sees_what_comes_after_it(shape: ModelConfig) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 65).eval()
    ids = torch.randint(0, 65, (2, 16))
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 65
    before, after = model.hidden(ids), model.hidden(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("shape", FLAVOURS)
def test_initialisation_is_as_published(shape: ModelConfig) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 1000)
    original = shape.architecture == "original"
    assert float(model.embedding.weight.std()) == pytest.approx(shape.hidden_size**-0.5 if original else 0.02, rel=0.05)
    for block in model.blocks:
        # Glorot and Bengio (2010): variance 2 / (in + out).
        expected = shape.hidden_size**-0.5 if original else 0.02 / math.sqrt(2 * shape.layers)
        assert float(block.attention.out.weight.std()) == pytest.approx(expected, rel=0.1)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_sinusoids_follow_the_formula() -> None:
    table = sinusoidal_positions(torch.arange(50)[None], 6)[0]
    for position in (0, 1, 49):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            # fp32: the angle is known to some units of 2^-24 of itself.
            assert float(table[position, 2 * i]) == pytest.approx(math.sin(angle), abs=2e-5)
            assert float(table[position, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=2e-5)


def test_gpt2_shares_embedding_and_head_and_llama_does_not_unless_told() -> None:
    gpt2, llama = FLAVOURS[0], FLAVOURS[2]
    for shape in (gpt2, replace(gpt2, tie_embeddings=True), replace(llama, tie_embeddings=True)):
        assert Decoder(shape, 65).head is None
    for shape in (llama, replace(llama, tie_embeddings=False), replace(gpt2, tie_embeddings=False)):
        assert Decoder(shape, 65).head is not None


def test_scaled_frequencies_are_kept_divided_or_between() -> None:
    """Radii of a head of 8 are 1, 10, 100, 1000; in a context of 64 they turn 10.2, 1.02, 0.1 and 0.01 times."""
    positions = torch.tensor([[1]])
    cos, sin = rotation_table(positions, 8, 10_000.0, (8.0, 1.0, 4.0, 64.0))
    turns = 64 / (2 * math.pi * 10)
    kept = (turns - 1) / 3
    expected = [1.0, (kept + (1 - kept) / 8) / 10, 1 / 800, 1 / 8000]
    assert torch.atan2(sin, cos).flatten().tolist() == pytest.approx(expected * 2, rel=1e-5)


def test_a_decoder_learns_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = Decoder(FLAVOURS[2], 17)
    ids = torch.randint(0, 17, (1, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):  # twelve seeds are below 0.004 then; after 60 steps three of them are still on their way
        loss_sum, counted = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        (loss_sum / counted).backward()
        optimizer.step()
    assert float(loss_sum / counted) < 0.1


def test_flops_follow_the_published_count() -> None:
    shape = ModelConfig(layers=2, heads=4, hidden_size=32, context=16)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 65 * 32
    assert Decoder(shape, 65).flops_per_token() == 6 * matrices + 12 * 2 * 32 * 16
    # Larger heads make the matrices around attention larger, and attention itself.
    matrices += 2 * 4 * 32 * 32
    assert Decoder(replace(shape, head_size=16), 65).flops_per_token() == 6 * matrices + 12 * 2 * 64 * 16


@pytest.mark.parametrize("shape", [FLAVOURS[0], *(pytest.param(each, marks=pytest.mark.long) for each in FLAVOURS[1:])])
def test_the_model_compiles_whole(shape: ModelConfig) -> None:
    torch.compiler.reset()  # blocks of other shapes are compiled by the same code, which is done so often and no oftener
    torch.manual_seed(0)
    model = Decoder(shape, 65)
    ids = torch.randint(0, 65, (2, 16))
    expected, _ = model(ids, ids)
    loss_sum, _ = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, ids)
    assert loss_sum.item() == pytest.approx(float(expected.detach()), rel=1e-5)


STEPS = 5


@pytest.fixture(autouse=True)
def choose_again_afterwards() -> Iterator[None]:
    """Leaves the process as it was."""
    yield
    use_kernels("auto")


def _train(shape: ModelConfig, kernels: str) -> tuple[list[float], Decoder, dict[str, str]]:
    """Losses of some steps on one batch, the model, and what ran."""
    use_kernels(kernels)
    torch.manual_seed(0)
    model = Decoder(shape, 61)
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1), model)
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


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(ModelConfig(layers=2, heads=2, hidden_size=32, context=19, bias=True), marks=pytest.mark.long),
        ModelConfig(architecture="llama", layers=2, heads=2, kv_heads=1, hidden_size=24, context=19),
    ],
    ids=["gpt2", "llama"],
)
def test_same_losses_with_kernels_and_without(shape: ModelConfig) -> None:
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
        ModelConfig(
            layers=1, heads=2, hidden_size=32, context=19, gelu="tanh", norm_eps=1e-3, tie_embeddings=False, qkv_bias=True
        ),
        ModelConfig(
            architecture="llama",
            layers=1,
            heads=4,
            kv_heads=2,
            hidden_size=48,
            context=19,
            head_size=16,
            qk_norm=True,
            tie_embeddings=True,
        ),
        ModelConfig(
            architecture="llama",
            layers=2,
            heads=2,
            hidden_size=32,
            context=19,
            norm="sandwich",
            gate="gelu",
            softcap=2.0,
            qk_norm=True,
            logit_softcap=2.0,
            window=4,
            window_layers=(0,),
            window_rope_theta=100.0,
            query_pre_attn_scalar=5,
            scaled_embedding=True,
            rotary_fraction=0.5,
        ),
    ],
    ids=["gpt2 by tanh", "qwen3", "gemma"],
)
def test_same_gradients_with_kernels_and_without(shape: ModelConfig) -> None:
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
    shape = ModelConfig(architecture="llama", layers=2, heads=1, hidden_size=8, context=8)
    ids = torch.arange(16).view(2, 8) % 23
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


@pytest.mark.long
def test_gradients_are_the_same_under_ddp_and_fsdp() -> None:
    for alone, *others in run_distributed(_under_wrappers, 2):
        assert others == pytest.approx([alone] * 3, rel=1e-5)


def test_the_whole_model_compiles_with_kernels() -> None:
    torch.compiler.reset()
    use_kernels("triton")
    torch.manual_seed(0)
    model = Decoder(ModelConfig(architecture="llama", layers=1, heads=2, hidden_size=32, context=16), 61)
    ids = torch.randint(0, 61, (2, 16))
    expected, _ = model(ids, ids)
    loss, _ = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, ids)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert all(p.grad is not None for p in model.parameters())


@settings(max_examples=20)
@given(
    shape=st.sampled_from(FLAVOURS),
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_packed_documents_are_read_one_at_a_time(shape: ModelConfig, lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    packed = PackedDecoder(shape, 11).double()
    alone = Decoder(shape, 11).double()
    alone.load_state_dict(packed.state_dict())
    ids, targets = torch.randint(0, 11, (2, 1, sum(lengths)))
    targets[0, ::5] = -100
    edges = [0, *accumulate(lengths)]
    loss, counted = packed(ids, torch.tensor(edges, dtype=torch.int32), targets)
    loss.backward()
    pairs = [alone(ids[:, a:b], targets[:, a:b]) for a, b in pairwise(edges)]
    expected = torch.stack([loss for loss, _ in pairs]).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert int(counted) == sum(int(count) for _, count in pairs)
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_documents_lie_across_rows_and_have_positions_of_their_own() -> None:
    """Two rows of four tokens: documents of 1, 3, 4 begin where they do in one row of eight."""
    torch.manual_seed(0)
    model = PackedDecoder(FLAVOURS[0], 11)
    ids, documents = torch.randint(0, 11, (2, 4)), torch.tensor([0, 1, 4, 8], dtype=torch.int32)
    assert document_positions(documents, 8).tolist() == [0, 0, 1, 2, 0, 1, 2, 3]
    rows, row = model.hidden(ids, documents=documents), model.hidden(ids.view(1, 8), documents=documents)
    torch.testing.assert_close(rows.view(1, 8, -1), row)
