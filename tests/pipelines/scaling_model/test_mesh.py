"""A mesh's formulas against schedules played out, against what attention says it sends, and against published tables."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling_model import TABLES, described, read
from raystride.model.shape import DecoderShape
from raystride.pipelines.config import Model
from raystride.pipelines.scaling_model import (
    ClusterDescription,
    NetworkLink,
    NotPredicted,
    Prediction,
    ScalingModel,
    TrialError,
    Work,
    WorkMesh,
    held_back,
)
from raystride.pipelines.scaling_model.mesh import LOSS_BYTES
from raystride.pipelines.scaling_model.terms import Route, bubble_of, traffic_of
from raystride.pipelines.strategies.stage_plan import cut_stages, stage_workers
from raystride.pipelines.sweep.observed import head_in_blocks
from raystride.triton_kernels.attention_context import bytes_sent
from raystride.triton_kernels.context_plan import context_plan
from raystride.triton_kernels.linear_cross_entropy_sharded import bytes_exchanged
from tests.pipelines.scaling_model.synthetic import LARGE, SMALL, TRUTH, measure, parts, seconds
from tests.pipelines.strategies.test_stage_plan import order_of

TABLE, STRONG = "Megatron-LM, GPT 1.7B to 1T on A100", "Megatron-LM, GPT 175B and 530B on A100 with ever fewer micro-batches"
NET = {"layers": 24, "width": 1024, "queries": 1024, "keys": 2048}


def meshed(work: Work, workers: int, slots: int, **sizes: Any) -> Work:
    """The same work over a mesh."""
    return replace(work, workers=workers, slots=slots, mesh=WorkMesh(**(NET | sizes)))


def played(schedule: str, workers: int, stages: int, count: int, times: tuple[float, float, float]) -> float:
    """Seconds of a step in PyTorch's order; a worker's forward, and backward for inputs and for weights, take `times`."""
    from torch.distributed.pipelining.schedules import _ComputationType as Kind

    orders = [order_of(schedule, workers, stages, count, rank) for rank in range(workers)]
    forward, for_inputs, for_weights = (each / stages for each in times)
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
                if any(each not in ended for each in needs):
                    break
                begins = max([clocks[rank], *(ended[each] for each in needs)])
                clocks[rank] = begins + takes[kind]
                what = {Kind.FORWARD: "F", Kind.BACKWARD_WEIGHT: "W"}.get(kind, "B")
                ended[stage, what, number] = clocks[rank]
                order.pop(0)
    return max(clocks)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("workers", "count"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_a_bubble_is_what_pytorchs_order_leaves_empty(workers: int, count: int, recompute: bool) -> None:
    times = (1.0, 1.0 + recompute, 1.0)
    for name, stages, order in (
        ("1f1b", 1, "ScheduleInterleaved1F1B"),
        ("interleaved", 2, "ScheduleInterleaved1F1B"),
        ("zbv", 2, "ScheduleZBVZeroBubble"),
    ):
        mesh = WorkMesh(pipeline=workers, stages_per_worker=stages, schedule=name)  # type: ignore[arg-type]
        computed = count * sum(times)
        told = 1 + mesh.bubble(count, recompute=recompute)
        assert played(order, workers, stages, count, times) == pytest.approx(computed * told), name


def test_of_the_whole_time_1f1b_loses_what_the_papers_say() -> None:
    share = WorkMesh(pipeline=8).bubble(24, recompute=False)
    assert share / (1 + share) == pytest.approx(7 / (24 + 7))
    share = WorkMesh(pipeline=8, stages_per_worker=2, schedule="interleaved").bubble(24, recompute=False)
    assert share / (1 + share) == pytest.approx(7 / (2 * 24 + 7))


@given(layers=st.integers(1, 40), pipeline=st.sampled_from([1, 2, 4]), words=st.sampled_from([50, 5_000, 50_000]))
def test_the_costliest_worker_is_that_of_the_cut(layers: int, pipeline: int, words: int) -> None:
    shape: DecoderShape = Model(layers=layers, heads=2, width=64, context=64)
    if layers < pipeline:
        return
    head = head_in_blocks(shape, words)
    ranges = cut_stages(shape, words, pipeline)
    costs = [0.0] * pipeline
    for number, (worker, blocks) in enumerate(zip(stage_workers(pipeline, pipeline, "1f1b"), ranges, strict=True)):
        costs[worker] += len(blocks) + head * (number == pipeline - 1)
    mesh = WorkMesh(pipeline=pipeline, layers=layers, head_blocks=head)
    assert mesh.busiest == pytest.approx(max(costs) * pipeline / sum(costs))


@pytest.mark.parametrize("form", ["ring", "keys", "heads"])
@pytest.mark.parametrize(("ranks", "documents"), [(2, 1), (4, 1), (8, 1), (4, 2), (8, 4), (2, 2), (4, 8)])
def test_over_context_as_much_is_sent_as_attention_says(form: Any, ranks: int, documents: int) -> None:
    tokens = 512
    plan = context_plan(tuple(range(0, tokens * (documents + 1), tokens)), ranks)
    rules: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_size": 16, "itemsize": 2}
    most = sum(max(bytes_sent(plan, form, backward=backward, **rules)) for backward in (False, True))
    mesh = WorkMesh(context=ranks, context_exchange=form, queries=128, keys=128, documents=documents, product_bytes=2)
    (sent,) = mesh.exchanges(tokens=documents * tokens, micro_batches=1, recompute=False)
    assert sent.size == pytest.approx(most)
    assert sent.hidden == (form == "ring")
    (twice,) = replace(mesh, tensor=1, layers=2).exchanges(tokens=documents * tokens, micro_batches=3, recompute=False)
    assert twice.size == pytest.approx(6 * most)


def test_over_tensor_each_block_gathers_and_scatters_the_stream_four_times_each() -> None:
    work = meshed(LARGE, 8, 4, tensor=8)
    stream = work.tokens_per_slot * 1024 * 4
    ends = 5 * stream + 2 * 2048 * bytes_exchanged(1)
    sent = traffic_of(work).blocking.intra_bytes
    assert sent == pytest.approx(7 / 8 * 4 * (8 * 24 * stream + ends))
    assert bytes_exchanged(1) == LOSS_BYTES
    again = traffic_of(replace(work, recompute=True)).blocking.intra_bytes
    assert again - sent == pytest.approx(7 / 8 * 4 * 4 * 24 * stream)
    halves = replace(work, workers=16, mesh=replace(work.mesh, context=2))  # type: ignore[type-var]
    mesh = halves.mesh
    assert mesh
    tensor = [each.size for each in mesh.exchanges(tokens=2048, micro_batches=4, recompute=False) if each.along == "tensor"]
    assert sum(tensor) == pytest.approx(4 * (8 * 24 * stream + 5 * stream + 2048 * LOSS_BYTES) / 2)


def test_over_a_pipeline_the_stream_crosses_each_border_twice() -> None:
    work = meshed(SMALL, 2, 16, pipeline=2)
    stream = 2048 * 1024 * 4
    assert traffic_of(work).blocking == Route(intra_bytes=2 * 17 * stream, intra_hops=2 * 17)
    apart = traffic_of(replace(work, workers_per_node=1)).blocking
    assert apart == Route(inter_bytes=2 * 17 * stream, inter_hops=2 * 17)


def test_each_worker_sums_the_gradients_of_what_it_holds() -> None:
    """Over groups and context; where nodes hold a tensor group each, all of a node's workers share its link."""
    plain = replace(LARGE, workers=4, slots=4, workers_per_node=1)
    work = meshed(LARGE, 64, 4, tensor=8, pipeline=2, context=1)
    assert work.groups == 4
    assert traffic_of(work).ring.inter_bytes == pytest.approx(8 / 16 * traffic_of(plain).ring.inter_bytes)
    shared = meshed(LARGE, 64, 2, tensor=8, pipeline=2, context=2)
    assert traffic_of(shared).ring.inter_bytes == pytest.approx(traffic_of(work).ring.inter_bytes)
    sharded = replace(meshed(LARGE, 16, 4, tensor=2, pipeline=2), strategy="fsdp")
    gathered = traffic_of(sharded).gathers
    assert gathered.intra_bytes + gathered.inter_bytes == pytest.approx(2 * 3 / 4 * 4e9 / 4)


def test_nodes_take_apart_the_pipeline_first_and_tensor_last() -> None:
    inside = traffic_of(meshed(LARGE, 16, 8, tensor=8, pipeline=2)).blocking
    across = traffic_of(replace(meshed(LARGE, 16, 8, tensor=8, pipeline=2), workers_per_node=4)).blocking
    only_pipeline = 2 * 9 * 2048 * 1024 * 4
    assert inside.inter_bytes == pytest.approx(only_pipeline)
    assert across.inter_bytes > 10 * only_pipeline / 2


def test_operations_are_shared_by_a_group_and_a_group_has_its_slots() -> None:
    work = meshed(SMALL, 16, 8, tensor=2, pipeline=2)
    assert (work.group_workers, work.groups, work.micro_batches, work.tokens_per_worker) == (4, 4, 2, 1024)
    alone = work.alone()
    assert (alone.workers, alone.slots, alone.mesh) == (1, 2, None)
    assert parts(work, TRUTH).bubble[0, 0] == pytest.approx(parts(work, TRUTH).compute[0, 0] * bubble_of(work))
    assert bubble_of(work) == 1 / 2
    assert bubble_of(alone) == 0


def test_a_wider_mesh_computes_less_and_sends_more() -> None:
    two, four = (meshed(LARGE, size, 4, tensor=size) for size in (2, 4))
    assert parts(four, TRUTH).compute[0, 0] < 0.6 * parts(two, TRUTH).compute[0, 0]
    assert parts(four, TRUTH).exposed[0, 0] > parts(two, TRUTH).exposed[0, 0]
    assert seconds(replace(four, backend="gloo"), TRUTH) >= seconds(four, TRUTH)


@pytest.mark.parametrize(
    ("change", "name", "value", "allowed"),
    [
        ({"workers": 6}, "workers", 6, "group's, 4"),
        ({"workers": 16, "slots": 3}, "workers", 16, "slots, 3, .* 4 groups"),
        ({"workers": 16, "slots": 4, "shard_workers": 3}, "shard_workers", 3, "groups, 4"),
    ],
)
def test_a_mesh_that_cannot_be_is_named(change: dict[str, int], name: str, value: int, allowed: str) -> None:
    work = meshed(SMALL, 4, 4, tensor=2, pipeline=2)
    with pytest.raises(TrialError, match=f"^{name} is {value}: .*{allowed}") as raised:
        replace(work, **change)
    assert (raised.value.name, raised.value.value) == (name, value)


def test_predictions_keep_a_groups_mesh_or_take_the_one_asked_for() -> None:
    trials = [meshed(LARGE, size, size, tensor=2, pipeline=2) for size in (4, 8, 16)]
    cluster = ClusterDescription("V100", 8, NetworkLink(50, 7), NetworkLink(18, 27))
    model = ScalingModel.fit(measure(trials), cluster, steps=200)
    few, more = model.predict(trials[0], target_tokens=1e9, workers=[2, 64])
    assert isinstance(few, NotPredicted)
    assert "workers is 2: it must be a multiple of a group's, 4" in str(few)
    assert isinstance(more, Prediction)
    assert more.step_seconds.middle == pytest.approx(seconds(trials[0].at(64, 8), TRUTH), rel=0.1)
    assert more.shares["filling and draining the pipeline"] > 0.05
    other = replace(trials[0].mesh, pipeline=1, tensor=4)  # type: ignore[type-var]
    (asked,) = model.predict(trials[0], target_tokens=1e9, workers=[64], mesh=other)
    assert isinstance(asked, Prediction)
    assert "filling and draining the pipeline" not in asked.shares
    assert 0 < asked.efficiency.middle < 1


@pytest.mark.parametrize(("name", "most"), [(f"{TABLE}, by a roofline", 0.05), (STRONG, 0.02)])
def test_megatrons_larger_runs_are_predicted_from_its_smaller_ones(name: str, most: float) -> None:
    stated = yaml.safe_load(TABLES.read_text())[name]
    found = held_back(read(stated), described(stated), above_workers=stated["fit_up_to"])
    assert len(found.trials) == (5 if "speed" in stated else 4)
    assert found.median < most
