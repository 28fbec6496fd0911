"""The translator: PyTorch's own transformer with the same weights, padding on either side, its loss, its sizes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raystride.model.block import sinusoidal_positions
from raystride.model.shape import translator_flops_per_token
from raystride.model.translator import Translator
from raystride.pipelines.config import ModelConfig, TrainConfig
from raystride.pipelines.train.strategies.recompute import recompute
from tests.some import some

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "hidden_size": 32, "context": 16}
SHAPES = [
    ModelConfig(**SIZES, architecture="original"),
    ModelConfig(**SIZES, architecture="original", norm="pre", encoder_layers=1),
    ModelConfig(**SIZES, architecture="gpt2", encoder_layers=3),
    ModelConfig(**SIZES, architecture="llama", kv_heads=2, head_size=6, qkv_bias=True, qk_norm=True),
    ModelConfig(**SIZES, architecture="llama", norm="post"),
    ModelConfig(**SIZES, architecture="llama", head_size=6, qkv_bias=True, qk_norm=True),
]
SOURCES, TARGETS = 19, 23


def _model(shape: ModelConfig, target_vocabulary: int | None = TARGETS, **changes: Any) -> Translator:
    """One in fp64 whose parameters are all large enough to matter."""
    torch.manual_seed(0)
    model = Translator(shape, SOURCES, target_vocabulary, **changes).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


MODELS = [_model(shape) for shape in SHAPES]


def _batch(words: int = TARGETS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    targets = torch.randint(0, words, (3, 7))
    targets[1, 4:] = -100
    inputs = targets.roll(1, 1).clamp(min=0)
    return torch.randint(0, SOURCES, (3, 6)), torch.tensor([6, 2, 4]), inputs, targets


def test_the_papers_base_model_has_its_published_size() -> None:
    """65 million (table 3), with 37,000 shared words (section 5.1)."""
    shape = ModelConfig(architecture="original", layers=6, heads=8, hidden_size=512)
    with torch.device("meta"):
        model = Translator(shape, 37000)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) in range(63, 66)


def _peer(model: Translator, *, pre: bool) -> nn.Transformer:
    """PyTorch's transformer with the weights of an `original` model."""
    sizes: dict[str, Any] = {"d_model": 32, "nhead": 4, "dim_feedforward": 128, "dropout": 0.0}
    options: dict[str, Any] = {"batch_first": True, "norm_first": pre, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**sizes, **options),
        len(model.encoder),
        nn.LayerNorm(32, dtype=torch.float64) if pre else None,
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(**sizes, **options),
        len(model.decoder),
        nn.LayerNorm(32, dtype=torch.float64) if pre else None,
    )
    peer = nn.Transformer(32, 4, custom_encoder=encoder, custom_decoder=decoder, batch_first=True, dtype=torch.float64)
    peer.load_state_dict(_renamed(dict(model.named_parameters())))
    return peer


def _renamed(ours: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Our tensors, parameters or gradients, by PyTorch's names; embeddings, which it does not have, left out."""
    last = {
        "norm1": "norm1",
        "norm2": "norm2",
        "norm3": "norm3",
        "feed_forward.up": "linear1",
        "feed_forward.down": "linear2",
    }
    last |= {"attention.qkv": "self_attn.in_proj", "attention.out": "self_attn.out_proj"}
    last |= {"cross_attention.out": "multihead_attn.out_proj", "cross_attention.q": "multihead_attn.in_proj"}
    found = {}
    for name, value in ours.items():
        side, *rest, kind = name.split(".")
        if side in ("encoder_norm", "norm"):
            found[f"{'encoder' if side == 'encoder_norm' else 'decoder'}.norm.{kind}"] = value
        elif side in ("encoder", "decoder") and rest[1:] != ["cross_attention", "kv"]:
            if rest[1:] == ["cross_attention", "q"]:
                value = torch.cat((value, ours[name.replace(".q.", ".kv.")]))
            theirs = last[".".join(rest[1:])]
            found[f"{side}.layers.{rest[0]}.{theirs}{'_' if theirs.endswith('in_proj') else '.'}{kind}"] = value
    return found


@pytest.mark.parametrize("target_vocabulary", [None, TARGETS])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_loss_and_gradients_are_those_of_pytorchs_transformer(shape: ModelConfig, target_vocabulary: int | None) -> None:
    model = _model(shape, target_vocabulary, label_smoothing=0.1).train()
    source, lengths, inputs, targets = _batch(target_vocabulary or SOURCES)
    peer = _peer(model, pre=shape.norm == "pre")
    weights = [model.embedding.weight.detach().clone().requires_grad_()]
    if model.target_embedding is not None:
        weights.append(model.target_embedding.weight.detach().clone().requires_grad_())
    padding = torch.arange(6) >= lengths[:, None]
    hidden = peer(
        F.embedding(source, weights[0]) * 32**0.5 + sinusoidal_positions(torch.arange(6)[None], 32),
        F.embedding(inputs, weights[-1]) * 32**0.5 + sinusoidal_positions(torch.arange(7)[None], 32),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    logits = hidden @ weights[-1].t()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1, reduction="sum")
    expected.backward()
    loss_sum, counted = model(source, lengths, inputs, targets)
    loss_sum.backward()
    assert counted == 3 * 7 - 3
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-12)
    ours = {name: p.grad for name, p in model.named_parameters()}
    pairs = [(_renamed(ours)[name], p.grad) for name, p in peer.named_parameters()]
    embeddings = [ours["embedding.weight"]] + ([ours["target_embedding.weight"]] if target_vocabulary else [])
    pairs += list(zip(embeddings, (weight.grad for weight in weights), strict=True))
    for mine, theirs in pairs:
        assert mine is not None
        assert theirs is not None
        # fp64, 2^-53: some hundred additions a layer, relative to the largest of a tensor, as small ones cancel.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11 * float(theirs.abs().max()))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
def test_padding_of_either_side_changes_nothing(model: Translator, sizes: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(words: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, words, shape, generator=generator)

    source, inputs = draw(SOURCES, len(sizes), 10), draw(TARGETS, len(sizes), 10)
    targets = torch.full_like(inputs, -100)
    alone = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for row, (words, others) in enumerate(sizes):
            targets[row, :others] = draw(TARGETS, others)
            one = slice(row, row + 1)
            loss, _ = model(source[one, :words], torch.tensor([words]), inputs[one, :others], targets[one, :others])
            alone += loss
        together, counted = model(source, torch.tensor([words for words, _ in sizes]), inputs, targets)
    assert counted == sum(others for _, others in sizes)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_labels_are_smoothed_in_training_alone() -> None:
    plain, smoothed = _model(SHAPES[0]), _model(SHAPES[0], label_smoothing=0.2)
    batch = _batch()
    assert plain(*batch)[0] == smoothed(*batch)[0]
    assert plain.train()(*batch)[0] != smoothed.train()(*batch)[0]


def test_a_shared_vocabulary_is_one_matrix() -> None:
    names = [name for name, p in _model(SHAPES[0], None).named_parameters() if SOURCES in p.shape]
    assert names == ["embedding.weight"]
    names = [name for name, p in MODELS[0].named_parameters() if {SOURCES, TARGETS} & set(p.shape)]
    assert names == ["embedding.weight", "target_embedding.weight"]


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
def test_gradients_are_the_same_when_activations_are_computed_again(shape: ModelConfig) -> None:
    found = []
    for way in ("none", "full"):
        model = recompute(_model(shape, None).train(), TrainConfig(activation_checkpointing=way))  # type: ignore[arg-type]
        model(*_batch(SOURCES))[0].backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in some(zip(*found, strict=True)))  # type: ignore[arg-type]


def test_operations_are_counted_as_pytorch_counts_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    shape = ModelConfig(**(SIZES | {"linear": "torch"}), architecture="gpt2", encoder_layers=3)
    model, ids = Translator(shape, SOURCES, TARGETS), torch.zeros(1, 16, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(ids, torch.tensor([16]), ids, ids)
    assert model.flops_per_token() == translator_flops_per_token(shape, TARGETS)
    assert 16 * model.flops_per_token() == 3 * counter.get_total_flops()


@pytest.mark.long
def test_it_compiles_whole() -> None:
    model, batch = _model(SHAPES[0], None).float(), _batch(SOURCES)
    expected, _ = model(*batch)
    loss_sum, _ = torch.compile(model, backend="aot_eager", fullgraph=True)(*batch)
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
