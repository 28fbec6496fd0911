"""Counts the parameters of a run's adapters from its settings alone.

count_adapter_parameters(config)                          # of all adapters that it trains
"""

from dataclasses import dataclass

from raystride.model.shape import ENCODERS, dense_sizes, head_size, hidden_width
from raystride.pipelines.config import Config, ModelConfig


@dataclass(frozen=True)
class BlockLinear:
    """A linear layer of a block that can have an adapter."""

    names: tuple[str, ...]
    """Last parts of the names for its selection by `lora.targets`."""
    inputs: int
    outputs: int


def block_linears(shape: ModelConfig) -> list[BlockLinear]:
    """Returns the linear layers of a block, without cross-attention."""
    width, hidden, size = shape.hidden_size, hidden_width(shape), head_size(shape)
    queries, keys = shape.heads * size, (shape.kv_heads or shape.heads) * size
    if shape.architecture == "llama":
        return [
            BlockLinear(("q", "q_proj"), width, queries),
            BlockLinear(("k", "k_proj"), width, keys),
            BlockLinear(("v", "v_proj"), width, keys),
            BlockLinear(("out", "o_proj"), queries, width),
            BlockLinear(("gate", "gate_proj"), width, hidden),
            BlockLinear(("up", "up_proj"), width, hidden),
            BlockLinear(("down", "down_proj"), hidden, width),
        ]
    if shape.architecture == "modernbert":
        return [
            BlockLinear(("qkv", "Wqkv"), width, queries + 2 * keys),
            BlockLinear(("out", "Wo"), queries, width),
            BlockLinear(("gate", "Wi"), width, hidden),
            BlockLinear(("up", "Wi"), width, hidden),
            BlockLinear(("down", "Wo"), hidden, width),
        ]
    if shape.architecture == "bert":
        projections = (("q", "query", "q_lin"), ("k", "key", "k_lin"), ("v", "value", "v_lin"))
        return [
            *(BlockLinear(names, width, size) for names, size in zip(projections, (queries, keys, keys), strict=True)),
            BlockLinear(("out", "dense", "out_lin"), queries, width),
            BlockLinear(("up", "dense", "lin1"), width, hidden),
            BlockLinear(("down", "dense", "lin2"), hidden, width),
        ]
    return [
        BlockLinear(("qkv", "c_attn"), width, queries + 2 * keys),
        BlockLinear(("out", "c_proj"), queries, width),
        BlockLinear(("up", "c_fc"), width, hidden),
        BlockLinear(("down", "c_proj"), hidden, width),
    ]


def select_targets(config: Config) -> list[BlockLinear]:
    """Returns the linear layers of a block that get an adapter; a name of only some blocks counts as if all had it."""
    linears = block_linears(config.model)
    if config.lora.all_linear:
        return linears
    target_names = {name.rpartition(".")[2] for name in config.lora.named_layers}
    return [site for site in linears if target_names & set(site.names)]


def count_adapter_parameters(config: Config) -> int:
    """Returns the numbers in A and B of all blocks. A translator has those of encoder and decoder, with double attention.

    The dense layer of an encoder before its head is counted, as it is trained whole. The head is not; its labels are
    unknown.
    """
    rank, find_targets = config.lora.rank, select_targets(config)
    per_block = sum(rank * (site.inputs + site.outputs) + config.lora.dora * site.outputs for site in find_targets)
    blocks = config.model.layers
    if config.task == "translation":
        blocks = 2 * blocks + (config.model.encoder_layers or blocks)
    dense = sum(dense_sizes(config.model)) if config.model.architecture in ENCODERS else 0
    return per_block * blocks + dense


def low_rank_activation_bytes(config: Config, tokens: int) -> float:
    """Returns the bytes that the adapters save for the backward of `tokens` tokens, with the peak of temporary ones."""
    find_targets = select_targets(config)
    widest = max((site.outputs for site in find_targets), default=0)
    return 4.0 * tokens * (config.model.layers * len(find_targets) * config.lora.rank + 2 * widest)
