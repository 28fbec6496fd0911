"""Tensor parallelism: who has which heads, units, words and tokens, and what goes between two workers, beside plain sums."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raystride.model.block import Block
from raystride.model.cross_attention import CrossAttention
from raystride.model.cut import get_cut
from raystride.model.dropout import Dropout
from raystride.model.linear import Linear, Products
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.train.strategies.mesh import tensor as tensor_parallel
from raystride.pipelines.train.strategies.mesh.tensor import (
    FeedForwardParallel,
    GatherTokens,
    HeadParallel,
    ScatterTokens,
    TokenParallelDropout,
    TokenParallelNorm,
    TokenShards,
    VocabularyParallel,
    even_range,
)
from tests.distributed import run_distributed
from tests.forwards import GroupPlace

TOKENS, WORDS = 5, 7


def shards_of(rank: int, workers: int = 2) -> TokenShards:
    """The stream of a worker that sends nothing."""
    return TokenShards(GroupPlace(rank, workers))  # type: ignore[arg-type]


def ranges_of(parameter: torch.Tensor) -> tuple[int, list[list[int]]]:
    """Along which dimension a parameter is cut, and what of it is here."""
    cut = get_cut(parameter)
    assert cut is not None
    assert tuple(parameter.shape) == cut.shape
    return cut.dimension, [list(each) for each in cut.ranges]


@given(length=st.integers(0, 100), size=st.integers(1, 9))
def test_neighbouring_ones_are_shared_out_evenly(length: int, size: int) -> None:
    ranges = [even_range(length, rank, size) for rank in range(size)]
    assert [each for own in ranges for each in own] == list(range(length))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def block(**changes: Any) -> Block:
    """One of four heads of two numbers, two of them for keys."""
    settings = {"architecture": "llama", "layers": 1, "heads": 4, "kv_heads": 2, "hidden_size": 8, "context": 4} | changes
    shape = ModelConfig(**settings)
    return Block(shape, Products(shape.linear), layer=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_has_its_queries_and_their_keys_and_values(rank: int) -> None:
    attention = block(qk_norm=True, qkv_bias=True, out_bias=True).attention
    HeadParallel(shards_of(rank))._apply(attention, None)  # type: ignore[arg-type]
    queries, keys, values = [[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]]
    own = [queries[rank], keys[rank], values[rank]]
    assert ranges_of(attention.qkv.weight) == (0, own)
    assert ranges_of(attention.qkv.bias) == (0, own)
    assert ranges_of(attention.out.weight) == (1, [queries[rank]])
    assert (attention.heads, attention.kv_heads, attention.first_head) == (2, 1, 2 * rank)
    assert get_cut(attention.out.bias) is None
    assert attention.out.adds_bias is (rank == 0), "the bias of a sum is added once"
    norms = (attention.q_norm.weight, attention.k_norm.weight, attention.out.bias)
    assert [getattr(parameter, "summed_over_tensor", False) for parameter in norms] == [True] * 3
    assert not hasattr(attention.qkv.weight, "summed_over_tensor")


def test_cross_attention_has_its_queries_and_the_memorys_keys_and_values() -> None:
    attention = CrossAttention(width=8, heads=4, kv_heads=2, products=Products("torch"))
    HeadParallel(shards_of(1))._apply(attention, None)  # type: ignore[arg-type]
    assert ranges_of(attention.q.weight) == (0, [[4, 5, 6, 7]])
    assert ranges_of(attention.kv.weight) == (0, [[2, 3], [6, 7]])
    assert ranges_of(attention.out.weight) == (1, [[4, 5, 6, 7]])


@pytest.mark.parametrize("flavour", ["llama", "gpt2"])
def test_a_feed_forward_has_its_hidden_units(flavour: str) -> None:
    module = block(architecture=flavour, kv_heads=0, ffn_size=6, bias=flavour == "gpt2").feed_forward
    FeedForwardParallel(shards_of(1, 3))._apply(module, None)  # type: ignore[arg-type]
    for name in ("gate", "up") if flavour == "llama" else ("up",):
        assert ranges_of(getattr(module, name).weight) == (0, [[2, 3]])
    assert ranges_of(module.down.weight) == (1, [[2, 3]])
    if flavour == "gpt2":
        assert ranges_of(module.up.bias) == (0, [[2, 3]])
        assert module.down.adds_bias is False


def test_words_of_a_head_are_rows_and_a_norm_is_summed() -> None:
    head, norm = Linear(8, WORDS, products=Products("torch")), nn.LayerNorm(8)
    VocabularyParallel(shards_of(1))._apply(head, None)  # type: ignore[arg-type]
    TokenParallelNorm(shards_of(1))._apply(norm, None)  # type: ignore[arg-type]
    assert ranges_of(head.weight) == (0, [[3, 4, 5, 6]])
    assert all(parameter.summed_over_tensor for parameter in norm.parameters())  # type: ignore[attr-defined]
    assert len(list(norm.parameters())) == 2


@pytest.mark.parametrize(("rank", "own"), [(0, [0, 1, 2]), (1, [3, 4, None])])
def test_a_dropout_sees_this_workers_tokens_of_a_padded_mask(rank: int, own: list[int | None]) -> None:
    dropout, shards = Dropout(0.5), shards_of(rank)
    TokenParallelDropout(shards)._apply(dropout, None)  # type: ignore[arg-type]
    shards.tokens = TOKENS
    assert dropout.part is not None
    shape, cut = dropout.part((2, 3, 4), None)
    assert shape == (2, TOKENS, 4)
    mask = torch.arange(1.0, 41.0).view(2, TOKENS, 4)
    expected = torch.stack([torch.zeros(2, 4) if token is None else mask[:, token] for token in own], 1)
    assert torch.equal(cut(mask), expected)


def test_each_part_of_a_stream_has_its_style() -> None:
    model = Decoder(
        ModelConfig(architecture="llama", norm="sandwich", layers=2, heads=2, hidden_size=8, context=4, dropout=0.1), WORDS
    )
    shards = shards_of(0)
    plan = tensor_parallel._stream_plan(model, "blocks", "norm", shards)
    children = {name.rstrip("1234") for name, _ in model.blocks[0].named_children()}
    assert {"norm", "attention", "feed_forward", "dropout"} <= children
    styles = {
        "norm": TokenParallelNorm,
        "attention": HeadParallel,
        "feed_forward": FeedForwardParallel,
        "dropout": TokenParallelDropout,
    }
    for name, _ in model.blocks[0].named_children():
        if (kind := name.rstrip("1234")) in styles:
            assert type(plan[f"blocks.*.{name}"]) is styles[kind]
    assert (type(plan["blocks.0"]), type(plan["norm"])) == (ScatterTokens, GatherTokens)
    assert plan["norm"]._gather == shards.gather_tokens  # type: ignore[attr-defined]
    is_replicated = tensor_parallel._stream_plan(model, "blocks", "norm", shards, is_replicated=True)["norm"]
    assert is_replicated._gather == shards.gather_replicated  # type: ignore[attr-defined]


def test_a_network_without_a_plan_is_refused() -> None:
    class Mesh:
        def get_group(self) -> GroupPlace:
            return GroupPlace(0, 2)

    with pytest.raises(ValueError, match=r"Linear cannot .* scaling\.tensor 1"):
        tensor_parallel.parallelize(nn.Linear(2, 2), Mesh())  # type: ignore[arg-type]


def random_integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers, so that sums are exact."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def _exchange(rank: int, world: int) -> dict[str, Any]:
    """Returns the output of each operation, and the gradient that it sends back for this worker's own weights."""
    group = dist.group.WORLD
    assert group is not None
    shards, part = TokenShards(group), -(-TOKENS // world)
    found: dict[str, Any] = {}

    def note(name: str, x: torch.Tensor, y: torch.Tensor, seed: int) -> None:
        y.backward(random_integers(*y.shape, seed=seed + rank))
        assert x.grad is not None
        found[name] = (y.detach(), x.grad)

    whole = random_integers(2, TOKENS, 3).requires_grad_()
    note("split_tokens", whole, shards.split_tokens(whole), 10)
    found["tokens"] = shards.tokens
    for name in ("gather_tokens", "gather_replicated"):
        own = random_integers(2, part, 3, seed=20 + rank).requires_grad_()
        note(name, own, getattr(shards, name)(own), 30)
    partial = random_integers(2, TOKENS, 3, seed=40 + rank).requires_grad_()
    note("reduce_scatter", partial, shards.reduce_scatter(partial), 50)

    table = nn.Embedding(WORDS, 3)
    table.weight = nn.Parameter(random_integers(WORDS, 3, seed=60))
    VocabularyParallel(shards)._apply(table, None)  # type: ignore[arg-type]
    own_words = even_range(WORDS, rank, world)
    with torch.no_grad():
        table.weight.copy_(random_integers(WORDS, 3, seed=60)[own_words.start : own_words.stop])
    rows = table(torch.arange(WORDS).flip(0)[None])
    rows.backward(random_integers(1, WORDS, 3, seed=70))
    found["embedding"] = (rows.detach(), table.weight.grad)

    head = random_integers(WORDS, 3, seed=80)[own_words.start : own_words.stop]
    logits = tensor_parallel._gather_logits(lambda x: x @ head.T, WORDS, shards, random_integers(2, 1, 3, seed=90))
    found["logits"] = logits
    return found


def zero_padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """(B, T, C) with zeros up to so many tokens."""
    return torch.cat((x, x.new_zeros(x.shape[0], tokens - x.shape[1], x.shape[2])), 1)


@pytest.mark.parametrize("world", [2, 3])
def test_what_goes_between_workers_is_what_plain_sums_say(world: int) -> None:
    every = run_distributed(_exchange, world)
    part = -(-TOKENS // world)
    parts = [slice(rank * part, (rank + 1) * part) for rank in range(world)]

    def together(seed: int, tokens: int = part) -> list[torch.Tensor]:
        return [random_integers(2, tokens, 3, seed=seed + rank) for rank in range(world)]

    whole, joined = random_integers(2, TOKENS, 3), torch.cat(together(20), 1)[:, :TOKENS]
    total = zero_padded(torch.stack(together(40, TOKENS)).sum(0), world * part)
    gathered = zero_padded(torch.stack(together(30, TOKENS)).sum(0), world * part)
    for rank, (found, own) in enumerate(zip(every, parts, strict=True)):
        assert found["tokens"] == TOKENS
        expected = {
            "split_tokens": (zero_padded(whole, world * part)[:, own], torch.cat(together(10), 1)[:, :TOKENS]),
            "gather_tokens": (joined, gathered[:, own]),
            "gather_replicated": (joined, zero_padded(together(30, TOKENS)[rank], world * part)[:, own]),
            "reduce_scatter": (total[:, own], torch.cat(together(50), 1)[:, :TOKENS]),
        }
        for name, (value, gradient) in expected.items():
            assert torch.equal(found[name][0], value), name
            assert torch.equal(found[name][1], gradient), name
        rows, gradient = found["embedding"]
        words = even_range(WORDS, rank, world)
        assert torch.equal(rows, random_integers(WORDS, 3, seed=60).flip(0)[None])
        assert torch.equal(gradient, random_integers(1, WORDS, 3, seed=70)[0].flip(0)[words.start : words.stop])
        assert torch.equal(found["logits"], random_integers(2, 1, 3, seed=90) @ random_integers(WORDS, 3, seed=80).T)
