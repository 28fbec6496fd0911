"""How many numbers the adapters of a run have, told from its settings alone.

adapter_numbers(config)                                   # of all adapters that it trains
"""

from dataclasses import dataclass

from raystride.model.shape import head_size, hidden_width
from raystride.pipelines.config import Config, Model


@dataclass(frozen=True)
class BlockSite:
    """A linear layer of a block that can have an adapter."""

    names: tuple[str, ...]
    """The last parts of the names by which `lora.targets` may mean it."""
    inputs: int
    outputs: int


def block_sites(shape: Model) -> list[BlockSite]:
    """Those of a block, without attention to another network's results."""
    width, hidden, size = shape.width, hidden_width(shape), head_size(shape)
    queries, keys = shape.heads * size, (shape.kv_heads or shape.heads) * size
    if shape.flavour == "llama":
        return [
            BlockSite(("q", "q_proj"), width, queries),
            BlockSite(("k", "k_proj"), width, keys),
            BlockSite(("v", "v_proj"), width, keys),
            BlockSite(("out", "o_proj"), queries, width),
            BlockSite(("gate", "gate_proj"), width, hidden),
            BlockSite(("up", "up_proj"), width, hidden),
            BlockSite(("down", "down_proj"), hidden, width),
        ]
    return [
        BlockSite(("qkv", "c_attn"), width, queries + 2 * keys),
        BlockSite(("out", "c_proj"), queries, width),
        BlockSite(("up", "c_fc"), width, hidden),
        BlockSite(("down", "c_proj"), hidden, width),
    ]


def chosen_sites(config: Config) -> list[BlockSite]:
    """Those of a block that get an adapter; of a name that only some blocks have, as if all had it."""
    found = block_sites(config.model)
    if config.lora.all_linear:
        return found
    named = {name.rpartition(".")[2] for name in config.lora.named}
    return [site for site in found if named & set(site.names)]


def adapter_numbers(config: Config) -> int:
    """Numbers in A and B of all blocks, a translator's twice: its encoder's and its decoder's, whose attention is double."""
    rank, sites = config.lora.rank, chosen_sites(config)
    of_block = sum(rank * (site.inputs + site.outputs) + config.lora.dora * site.outputs for site in sites)
    blocks = config.model.layers
    if config.task == "translation":
        blocks = 2 * blocks + (config.model.encoder_layers or blocks)
    return of_block * blocks


def held_low(config: Config, tokens: int) -> float:
    """Bytes that the adapters save for their backward of so many tokens, and hold beside it for a moment."""
    sites = chosen_sites(config)
    widest = max((site.outputs for site in sites), default=0)
    return 4.0 * tokens * (config.model.layers * len(sites) * config.lora.rank + 2 * widest)
