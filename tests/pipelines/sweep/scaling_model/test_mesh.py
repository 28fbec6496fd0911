"""A mesh's formulas against simulated schedules, attention's own count of bytes, and published tables."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mesh_traffic import bytes_exchanged, bytes_sent
from benchmarks.scaling_model import TABLES, described, read
from raystride.model.shape import DecoderShape
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.sweep.observed import head_in_blocks
from raystride.pipelines.sweep.scaling_model import (
    ClusterDescription,
    NetworkLink,
    NotPredicted,
    Prediction,
    ScalingModel,
    TrialError,
    Work,
    WorkMesh,
    hold_out,
)
from raystride.pipelines.sweep.scaling_model.mesh import LOSS_BYTES
from raystride.pipelines.sweep.scaling_model.terms import Route, bubble_fraction, step_traffic
from raystride.pipelines.train.strategies.mesh.pipeline_plan import assign_stages, split_into_stages
from raystride.triton_kernels.context_plan import context_plan
from tests.pipelines.sweep.scaling_model.synthetic import LARGE, SMALL, TRUTH, measure, seconds, step_parts
from tests.pipelines.train.strategies.mesh.test_pipeline_plan import order_of

TABLE, STRONG = "Megatron-LM, GPT 1.7B to 1T on A100", "Megatron-LM, GPT 175B and 530B on A100 with ever fewer micro-batches"
NET = {"layers": 24, "width": 1024, "queries": 1024, "keys": 2048}


def with_mesh(work: Work, workers: int, slots: int, **sizes: Any) -> Work:
    """Returns the same work over a mesh."""
    return replace(work, workers=workers, slots=slots, mesh=WorkMesh(**(NET | sizes)))


def simulate_schedule(schedule: str, workers: int, stages: int, count: int, times: tuple[float, float, float]) -> float:
    """Returns the seconds of a step in PyTorch's order; `times` are a forward, a backward for inputs and one for weights."""
    from torch.distributed.pipelining.schedules import _ComputationType as Kind

    orders = [order_of(schedule, workers, stages, count, rank) for rank in range(workers)]
    forward, for_inputs, for_weights = (duration / stages for duration in times)
    takes = {Kind.FORWARD: forward, Kind.BACKWARD_INPUT: for_inputs, Kind.BACKWARD_WEIGHT: for_weights}
    takes[Kind.FULL_BACKWARD] = for_inputs + for_weights
    ended: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * workers
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                stage, kind, number = order[0].stage_index, order[0].computation_type, order[0].microbatch_index
                needs = {
                    Kind.FORWARD: [(stage - 1, "F", number)] * (stage > 0),
                    Kind.BACKWARD_WEIGHT: [(stage, "B", number)],
                }.get(kind, [(stage, "F", number), *[(stage + 1, "B", number)] * (stage + 1 < stages * workers)])
                if any(need not in ended for need in needs):
                    break
                begins = max([clocks[rank], *(ended[need] for need in needs)])
                clocks[rank] = begins + takes[kind]
                what = {Kind.FORWARD: "F", Kind.BACKWARD_WEIGHT: "W"}.get(kind, "B")
                ended[stage, what, number] = clocks[rank]
                order.pop(0)
    return max(clocks)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("workers", "count"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_bubble_matches_pytorch_schedules(workers: int, count: int, recompute: bool) -> None:
    times = (1.0, 1.0 + recompute, 1.0)
    for name, stages, order in (
        ("1f1b", 1, "ScheduleInterleaved1F1B"),
        ("interleaved", 2, "ScheduleInterleaved1F1B"),
        ("zbv", 2, "ScheduleZBVZeroBubble"),
    ):
        mesh = WorkMesh(pipeline=workers, stages_per_worker=stages, schedule=name)  # type: ignore[arg-type]
        computed = count * sum(times)
        expected = 1 + mesh.bubble(count, recompute=recompute)
        assert simulate_schedule(order, workers, stages, count, times) == pytest.approx(computed * expected), name


def test_1f1b_bubble_matches_the_papers() -> None:
    share = WorkMesh(pipeline=8).bubble(24, recompute=False)
    assert share / (1 + share) == pytest.approx(7 / (24 + 7))
    share = WorkMesh(pipeline=8, stages_per_worker=2, schedule="interleaved").bubble(24, recompute=False)
    assert share / (1 + share) == pytest.approx(7 / (2 * 24 + 7))


@given(layers=st.integers(1, 40), pipeline=st.sampled_from([1, 2, 4]), words=st.sampled_from([50, 5_000, 50_000]))
def test_the_costliest_worker_is_that_of_the_cut(layers: int, pipeline: int, words: int) -> None:
    shape: DecoderShape = ModelConfig(layers=layers, heads=2, hidden_size=64, context=64)
    if layers < pipeline:
        return
    head = head_in_blocks(shape, words)
    ranges = split_into_stages(shape, words, pipeline)
    costs = [0.0] * pipeline
    for number, (worker, blocks) in enumerate(zip(assign_stages(pipeline, pipeline, "1f1b"), ranges, strict=True)):
        costs[worker] += len(blocks) + head * (number == pipeline - 1)
    mesh = WorkMesh(pipeline=pipeline, layers=layers, head_blocks=head)
    assert mesh.imbalance == pytest.approx(max(costs) * pipeline / sum(costs))


@pytest.mark.parametrize("form", ["ring", "keys", "heads"])
@pytest.mark.parametrize(("ranks", "documents"), [(2, 1), (4, 1), (8, 1), (4, 2), (8, 4), (2, 2), (4, 8)])
def test_context_traffic_matches_attention(form: Any, ranks: int, documents: int) -> None:
    tokens = 512
    plan = context_plan(tuple(range(0, tokens * (documents + 1), tokens)), ranks)
    rules: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_size": 16, "itemsize": 2}
    num_bytes = sum(max(bytes_sent(plan, form, backward=backward, **rules)) for backward in (False, True))
    mesh = WorkMesh(context=ranks, context_exchange=form, queries=128, keys=128, documents=documents, product_bytes=2)
    (sent,) = mesh.list_exchanges(tokens=documents * tokens, micro_batches=1, recompute=False)
    assert sent.size == pytest.approx(num_bytes)
    assert sent.is_overlapped == (form == "ring")
    (twice,) = replace(mesh, tensor=1, layers=2).list_exchanges(tokens=documents * tokens, micro_batches=3, recompute=False)
    assert twice.size == pytest.approx(6 * num_bytes)


def test_tensor_traffic_is_four_gathers_and_four_scatters_a_block() -> None:
    work = with_mesh(LARGE, 8, 4, tensor=8)
    stream = work.tokens_per_slot * 1024 * 4
    ends = 5 * stream + 2 * 2048 * bytes_exchanged(1)
    sent = step_traffic(work).blocking.intra_bytes
    assert sent == pytest.approx(7 / 8 * 4 * (8 * 24 * stream + ends))
    assert bytes_exchanged(1) == LOSS_BYTES
    again = step_traffic(replace(work, recompute=True)).blocking.intra_bytes
    assert again - sent == pytest.approx(7 / 8 * 4 * 4 * 24 * stream)
    halves = replace(work, workers=16, mesh=replace(work.mesh, context=2))  # type: ignore[type-var]
    mesh = halves.mesh
    assert mesh
    tensor = [
        exchange.size
        for exchange in mesh.list_exchanges(tokens=2048, micro_batches=4, recompute=False)
        if exchange.dimension == "tensor"
    ]
    assert sum(tensor) == pytest.approx(4 * (8 * 24 * stream + 5 * stream + 2048 * LOSS_BYTES) / 2)


def test_pipeline_traffic_crosses_each_border_twice() -> None:
    work = with_mesh(SMALL, 2, 16, pipeline=2)
    stream = 2048 * 1024 * 4
    assert step_traffic(work).blocking == Route(intra_bytes=2 * 17 * stream, intra_hops=2 * 17)
    apart = step_traffic(replace(work, workers_per_node=1)).blocking
    assert apart == Route(inter_bytes=2 * 17 * stream, inter_hops=2 * 17)


def test_each_worker_sums_the_gradients_of_its_parameters() -> None:
    """Over groups and context; if a node holds a tensor group, all of its workers share its link."""
    plain = replace(LARGE, workers=4, slots=4, workers_per_node=1)
    work = with_mesh(LARGE, 64, 4, tensor=8, pipeline=2, context=1)
    assert work.groups == 4
    assert step_traffic(work).ring.inter_bytes == pytest.approx(8 / 16 * step_traffic(plain).ring.inter_bytes)
    shared = with_mesh(LARGE, 64, 2, tensor=8, pipeline=2, context=2)
    assert step_traffic(shared).ring.inter_bytes == pytest.approx(step_traffic(work).ring.inter_bytes)
    sharded = replace(with_mesh(LARGE, 16, 4, tensor=2, pipeline=2), strategy="fsdp")
    gathered = step_traffic(sharded).gathers
    assert gathered.intra_bytes + gathered.inter_bytes == pytest.approx(2 * 3 / 4 * 4e9 / 4)


@given(*(st.sampled_from([1, 2, 4]) for _ in range(4)), st.sampled_from([2, 4, 8, 16]))
def test_sums_of_gradients_cross_nodes_where_the_ranks_that_share_them_do(
    tensor: int, context: int, shards: int, copies: int, per_node: int
) -> None:
    """Ranks count tensor first, then context, shards and copies; sums are over context, and then over copies."""
    group, workers = tensor * context, tensor * context * shards * copies
    meshed = with_mesh(replace(LARGE, workers_per_node=per_node), workers, shards * copies, tensor=tensor, context=context)
    found = step_traffic(replace(meshed, strategy="fsdp", shard_workers=shards))
    nodes = [rank // per_node for rank in range(workers)]
    over_context = any(len({*nodes[first : first + group : tensor]}) > 1 for first in range(0, workers, group))
    over_copies = any(len({*nodes[first :: group * shards]}) > 1 for first in range(group * shards))
    assert (found.ring.inter_bytes > 0) is (over_context or over_copies)


def test_nodes_split_the_pipeline_first_and_tensor_last() -> None:
    inside = step_traffic(with_mesh(LARGE, 16, 8, tensor=8, pipeline=2)).blocking
    across = step_traffic(replace(with_mesh(LARGE, 16, 8, tensor=8, pipeline=2), workers_per_node=4)).blocking
    only_pipeline = 2 * 9 * 2048 * 1024 * 4
    assert inside.inter_bytes == pytest.approx(only_pipeline)
    assert across.inter_bytes > 10 * only_pipeline / 2


def test_operations_are_shared_by_a_group_and_a_group_has_its_slots() -> None:
    work = with_mesh(SMALL, 16, 8, tensor=2, pipeline=2)
    assert (work.group_workers, work.groups, work.micro_batches, work.tokens_per_worker) == (4, 4, 2, 1024)
    on_one_worker = work.on_one_worker()
    assert (on_one_worker.workers, on_one_worker.slots, on_one_worker.mesh) == (1, 2, None)
    assert step_parts(work, TRUTH).bubble[0, 0] == pytest.approx(
        step_parts(work, TRUTH).compute[0, 0] * bubble_fraction(work)
    )
    assert bubble_fraction(work) == 1 / 2
    assert bubble_fraction(on_one_worker) == 0


def test_a_wider_mesh_computes_less_and_sends_more() -> None:
    two, four = (with_mesh(LARGE, size, 4, tensor=size) for size in (2, 4))
    assert step_parts(four, TRUTH).compute[0, 0] < 0.6 * step_parts(two, TRUTH).compute[0, 0]
    assert step_parts(four, TRUTH).exposed[0, 0] > step_parts(two, TRUTH).exposed[0, 0]
    assert seconds(replace(four, backend="gloo"), TRUTH) >= seconds(four, TRUTH)


@pytest.mark.parametrize(
    ("change", "name", "value", "allowed"),
    [
        ({"workers": 6}, "workers", 6, "group's, 4"),
        ({"workers": 16, "slots": 3}, "workers", 16, "slots, 3, .* 4 groups"),
        ({"workers": 16, "slots": 4, "shard_workers": 3}, "shard_workers", 3, "groups, 4"),
    ],
)
def test_impossible_meshes_are_named(change: dict[str, int], name: str, value: int, allowed: str) -> None:
    work = with_mesh(SMALL, 4, 4, tensor=2, pipeline=2)
    with pytest.raises(TrialError, match=f"^{name} is {value}: .*{allowed}") as raised:
        replace(work, **change)
    assert (raised.value.name, raised.value.value) == (name, value)


def test_predictions_keep_a_groups_mesh_or_take_the_one_asked_for() -> None:
    trials = [with_mesh(LARGE, size, size, tensor=2, pipeline=2) for size in (4, 8, 16)]
    cluster = ClusterDescription("V100", 8, NetworkLink(50, 7), NetworkLink(18, 27))
    model = ScalingModel.fit(measure(trials), cluster, steps=200)
    few, more = model.predict(trials[0], target_tokens=1e9, workers=[2, 64])
    assert isinstance(few, NotPredicted)
    assert "workers is 2: it must be a multiple of a group's, 4" in str(few)
    assert isinstance(more, Prediction)
    assert more.step_seconds.middle == pytest.approx(seconds(trials[0].scale_to(64, 8), TRUTH), rel=0.1)
    assert more.shares["filling and draining the pipeline"] > 0.05
    other = replace(trials[0].mesh, pipeline=1, tensor=4)  # type: ignore[type-var]
    (asked,) = model.predict(trials[0], target_tokens=1e9, workers=[64], mesh=other)
    assert isinstance(asked, Prediction)
    assert "filling and draining the pipeline" not in asked.shares
    assert 0 < asked.efficiency.middle < 1


@pytest.mark.parametrize(("name", "most"), [(f"{TABLE}, by a roofline", 0.05), (STRONG, 0.02)])
def test_megatrons_larger_runs_are_predicted_from_its_smaller_ones(name: str, most: float) -> None:
    stated = yaml.safe_load(TABLES.read_text())[name]
    found = hold_out(read(stated), described(stated), above_workers=stated["fit_up_to"])
    assert len(found.trials) == (5 if "speed" in stated else 4)
    assert found.median < most
