"""Which mesh `scaling.mesh auto` takes for well-known sizes on some clusters, and what the models say of it; nothing is run.

Memory is that of the estimate, and for the worker that needs most. Idle is a pipeline's bubble, of the time that workers
compute. Sent is what the scaling model counts: GiB that a worker sends over links inside its node in a step, and GiB that a
node sends to others. One sample a slot, one slot a GPU, bf16, full activation checkpointing. For some also a mesh that was
not chosen, but given.

    python -m benchmarks.mesh_choice                          # the table of docs/mesh.md, in a second
"""

import sys
from dataclasses import replace

from benchmarks.pairs import command_line
from raystride.pipelines.config import Config, ModelConfig, ScalingConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.launch.preflight.checks import GIB, check_settings, estimate_memory
from raystride.pipelines.launch.preflight.choose_mesh import choose_mesh
from raystride.pipelines.sweep.observed import build_work
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.terms import bubble_fraction, step_traffic

LLAMA = {"architecture": "llama", "tie_embeddings": False}
MODELS = {
    "124M (GPT-2)": ModelConfig(layers=12, heads=12, hidden_size=768, context=1024),
    "1.6B (GPT-2 XL)": ModelConfig(layers=48, heads=25, hidden_size=1600, context=1024),
    "7B (Llama 2)": ModelConfig(layers=32, heads=32, hidden_size=4096, context=4096, ffn_size=11008, **LLAMA),
    "13B (Llama 2)": ModelConfig(layers=40, heads=40, hidden_size=5120, context=4096, ffn_size=13824, **LLAMA),
    "70B (Llama 2)": ModelConfig(layers=80, heads=64, kv_heads=8, hidden_size=8192, context=4096, ffn_size=28672, **LLAMA),
    "7B, context 131,072": ModelConfig(layers=32, heads=32, hidden_size=4096, context=131072, ffn_size=11008, **LLAMA),
}
CLUSTERS = {
    "8 x 24 GiB": (1, 24),
    "8 x 80 GiB": (1, 80),
    "4 nodes of 8 x 80 GiB": (4, 80),
    "16 such nodes": (16, 80),
}
"""Nodes of eight GPUs, and GiB of each."""
EACH, WORDS = 8, 32_000
GIVEN = {"70B (Llama 2)": {"tensor": 8, "pipeline": 4}, "7B, context 131,072": {"context": 8}}
"""Meshes to lay beside those that are chosen."""


def row(name: str, shape: ModelConfig, cluster: str, given: dict[str, int]) -> str:
    """A line of the table; of what is `given`, or else chosen."""
    nodes, gib = CLUSTERS[cluster]
    there = Resources(64.0 * nodes, EACH * nodes, 2**40, gib * GIB, nodes=nodes, node_cpus=(64.0,) * nodes)
    train = TrainConfig(
        slots=EACH * nodes, slot_size=1, micro_batch_slots=1, precision="bf16", activation_checkpointing="full"
    )
    scaling = ScalingConfig(mesh="auto", device="cuda", workers=EACH * nodes, **given)
    config = Config(model=shape, train=train, scaling=scaling, tokenizer=TokenizerConfig(vocabulary_size=WORDS))
    config, share = choose_mesh(config, there, None, lambda _: None)
    scaling = config.scaling
    if not all(check.passed for check in check_settings(config, share, there)):
        return f"| {name} | {cluster} | none fits | | | | |"
    result = Result(
        key="",
        run="",
        settings={},
        label="",
        round=0,
        status="measured",
        workers=share.workers,
        device="GPU",
        places_per_node=EACH,
        tokens_per_step=train.slots * shape.context,
    )
    work = build_work(replace(config, scaling=replace(scaling, strategy=_strategy(scaling))), result)
    traffic, need = step_traffic(work), estimate_memory(config, share)
    assert need
    ways = (traffic.gathers, traffic.ring, traffic.blocking, traffic.passing)
    inside, between = (sum(getattr(way, f"{part}_bytes") for way in ways) / GIB for part in ("intra", "inter"))
    groups = share.workers // scaling.group
    named = ", ".join(f"{each} {n}" for each in ("pipeline", "context", "tensor") if (n := getattr(scaling, each)) > 1)
    between_groups = f" x {groups}, {_strategy(scaling)}" if groups > 1 else ""
    of = f"{named}{between_groups}" if named else _strategy(scaling)
    idle = f"{bubble_fraction(work):.0%}" if scaling.pipeline > 1 else ""
    return f"| {name} | {cluster} | {of} | {need.total / GIB:.1f} | {idle} | {inside:.1f} | {between:.1f} |"


def _strategy(scaling: ScalingConfig) -> str:
    return "ddp" if scaling.strategy == "auto" else scaling.strategy


def main() -> None:
    """Prints the table."""
    command_line("mesh_choice", __doc__).parse_args()
    print("| model | cluster | mesh | GiB a GPU | idle | GiB sent inside | GiB sent between |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, shape in MODELS.items():
        for cluster in CLUSTERS:
            print(row(name, shape, cluster, {}))
            if name in GIVEN and CLUSTERS[cluster][0] > 1:
                print(row(f"{name}, given", shape, cluster, GIVEN[name]))


if __name__ == "__main__":
    sys.exit(main())
