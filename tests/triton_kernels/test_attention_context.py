"""attention_context: every form on real processes gives what attention_packed gives on one, and sends what it says."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, get_args

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.mesh_traffic import bytes_sent
from raystride.triton_kernels import attention_context as module
from raystride.triton_kernels.attention_context import Form, attention_context
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.context_plan import ContextPlan, context_plan
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from tests.distributed import run_distributed
from tests.some import some

FORMS: tuple[Form, ...] = get_args(Form)


class Case(NamedTuple):
    """A case that is computed in every form."""

    offsets: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    rules: dict[str, Any] = {}  # noqa: RUF012  nobody changes it
    dtype: torch.dtype = torch.float64
    planned_window: int = 0


PACKED = (0, 3, 3, 40, 57, 58, 96)
UNEVEN = (0, 1, 90, 92, 96)
CASES = {
    "dense": Case((0, 48, 96)),
    "one document": Case((0, 96)),
    "whole rows": Case(tuple(range(0, 97, 24))),
    "packed": Case(PACKED),
    "very uneven": Case(UNEVEN),
    "grouped": Case(PACKED, kv_heads=2),
    "one key head": Case(UNEVEN, kv_heads=1),
    "a head a rank": Case(UNEVEN, heads=2, kv_heads=2),
    "window": Case(PACKED, rules={"window": 11}),
    "window of a long document": Case((0, 96), rules={"window": 20}),
    "window of one": Case(UNEVEN, rules={"window": 1}),
    "window, planned": Case((0, 96), rules={"window": 5}, planned_window=5),
    "cap": Case(PACKED, rules={"softcap": 1.5, "scale": 0.7}),
    "dropout": Case(PACKED, kv_heads=2, rules={"dropout": 0.3, "seed": -77}),
    "dropout, window, cap": Case(UNEVEN, rules={"dropout": 0.3, "seed": 5, "window": 13, "softcap": 2.0}),
    "other heads": Case(PACKED, rules={"dropout": 0.3, "seed": 5, "first_head": 4}),
    "fp32": Case(PACKED, kv_heads=2, dtype=torch.float32),
    "fp32 dropout": Case((0, 96), rules={"dropout": 0.1, "seed": 9}, dtype=torch.float32),
    "bf16": Case(UNEVEN, kv_heads=2, dtype=torch.bfloat16),
    "bf16 window": Case((0, 96), rules={"window": 20}, dtype=torch.bfloat16),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Tolerances relative to the largest number. In bf16, inputs and exchanged tensors are rounded to 2^-9."""


def _inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    rows = case.offsets[-1]
    inputs = [torch.randn(rows, heads, 8).to(case.dtype) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    rules = {name: torch.tensor([value]) if name == "seed" else value for name, value in case.rules.items()}
    return inputs, torch.randn(rows, case.heads, 8).to(case.dtype), rules


def _expected(case: Case) -> list[torch.Tensor]:
    """Returns result and gradients of one process."""
    inputs, grad, rules = _inputs(case)
    leaves = [x.requires_grad_() for x in inputs]
    offsets = torch.tensor(case.offsets)
    o = attention_packed(*leaves, offsets, offsets, causal=True, **rules)
    return [o.detach(), *torch.autograd.grad(o, leaves, grad)]


def _found(
    case: Case,
    form: Form,
    plan: ContextPlan,
    group: Any,
    *,
    recompute: bool = False,
    between: Callable[[], object] = lambda: 0,
) -> list[torch.Tensor]:
    """Returns result and gradients of this rank."""
    inputs, grad, rules = _inputs(case)
    rows = torch.from_numpy(plan.rows[dist.get_rank(group)])
    leaves = [x[rows].requires_grad_() for x in inputs]
    call: Callable[..., torch.Tensor] = partial(attention_context, plan=plan, form=form, group=group, **rules)
    o = checkpoint(call, *leaves, use_reentrant=False) if recompute else call(*leaves)
    between()
    assert o.is_contiguous(), "callers view it as rows of all heads"
    return [o.detach(), *torch.autograd.grad(o, leaves, grad[rows])]


def _differences(case: Case, group: Any, kernels: str = "auto") -> dict[str, Any]:
    """By form, how far value and gradients are from those of one process, beside the largest number."""
    ranks, results = dist.get_world_size(group), {}
    plan = context_plan(case.offsets, ranks, case.planned_window)
    wanted = _expected(case)
    use_kernels(kernels)
    rows = torch.from_numpy(plan.rows[dist.get_rank(group)])
    for form in FORMS:
        try:
            with _counted() as (forward, backward, turn):
                found = _found(case, form, plan, group, between=turn)
        except ValueError as error:
            results[form] = str(error)
            continue
        assert all(x.dtype == case.dtype for x in found)
        results[form] = [
            float((a.double() - b[rows].double()).abs().max() / max(1.0, float(b.abs().max())))
            for a, b in zip(found, wanted, strict=True)
        ]
        window = case.rules.get("window", 0)
        said = partial(
            bytes_sent,
            plan,
            form,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_size=8,
            itemsize=case.dtype.itemsize,
            window=window,
        )
        results[form, "bytes"] = (
            (forward["bytes"], said()[dist.get_rank(group)]),
            (backward["bytes"], said(backward=True)[dist.get_rank(group)]),
        )
    return results


@contextmanager
def _counted() -> Iterator[tuple[Counter[str], Counter[str], Callable[[], None]]]:
    """Bytes that this process sends to others: before a call of the third, and after it."""
    counts: list[Counter[str]] = [Counter(), Counter()]
    at = [0]
    batch, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def batched(operations: list[dist.P2POp]) -> Any:
        for each in operations:
            counts[at[0]]["bytes"] += (each.op is dist.isend) * each.tensor.numel() * each.tensor.element_size()
        return batch(operations)

    def exchanged(
        output: torch.Tensor, x: torch.Tensor, arriving: Any = None, leaving: Any = None, group: Any = None
    ) -> Any:
        own = leaving[dist.get_rank(group)] if leaving else len(x) // dist.get_world_size(group)
        counts[at[0]]["bytes"] += (x.numel() - own * x[0].numel() if len(x) else 0) * x.element_size()
        return exchange(output, x, arriving, leaving, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.dist, "batch_isend_irecv", batched)
        patch.setattr(module.dist, "all_to_all_single", exchanged)
        yield counts[0], counts[1], lambda: at.__setitem__(0, 1)


def _all(rank: int, world: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: _differences(case, None) for name, case in CASES.items()}
    results["random"] = [_differences(case, None) for case in _random_cases()]
    results["checkpoint"] = _checkpointed()
    results["autocast"] = _under_autocast()
    results["no gradient"] = _without_gradients()
    results["drawn"] = _drawn()
    results["twice"] = _twice()
    results["errors"] = _errors()
    if world == 2:
        results["kernels"] = _on_kernels()
    else:
        pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
        results["in pairs"] = _differences(CASES["packed"], pairs[rank // 2])
    return results


def _random_cases() -> list[Case]:
    """The same on all ranks."""
    dice = random.Random(0)
    cases = []
    for _ in range(12):
        ends = sorted(dice.choices(range(97), k=dice.randrange(6)))
        rules = {"window": dice.choice([0, 0, 1, 4, 30])}
        cases.append(Case((0, *ends, 96), kv_heads=dice.choice([1, 2, 4]), rules=rules, planned_window=dice.choice([0, 8])))
    return cases


def _checkpointed() -> bool:
    case = CASES["dropout"]
    plan = context_plan(case.offsets, dist.get_world_size())
    return all(
        torch.equal(a, b)
        for form in FORMS
        if form != "heads" or case.kv_heads % plan.ranks == 0
        for a, b in zip(_found(case, form, plan, None), _found(case, form, plan, None, recompute=True), strict=True)
    )


def _under_autocast() -> bool:
    """Inputs in fp32 are summed in fp32."""
    case = CASES["fp32 dropout"]
    plan = context_plan(case.offsets, dist.get_world_size())
    expected = [_found(case, form, plan, None) for form in ("ring", "keys")]
    with torch.autocast("cpu", torch.bfloat16):
        found = [_found(case, form, plan, None) for form in ("ring", "keys")]
    return all(torch.equal(a, b) for one, two in zip(expected, found, strict=True) for a, b in zip(one, two, strict=True))


def _without_gradients() -> bool:
    case = CASES["packed"]
    plan = context_plan(case.offsets, dist.get_world_size())
    (q, k, v), _, _ = _inputs(case)
    rows = torch.from_numpy(plan.rows[dist.get_rank()])
    with torch.no_grad():
        alone = [attention_context(q[rows], k[rows], v[rows], plan, form=form, group=None) for form in FORMS]
    return all(torch.equal(o, _found(case, form, plan, None)[0]) for o, form in zip(alone, FORMS, strict=True))


def _drawn() -> float:
    """Without a seed, all ranks and forms draw the same from generators in the same state."""
    plan = context_plan(PACKED, dist.get_world_size())
    results = []
    for form in FORMS:
        (q, k, v), _, _ = _inputs(CASES["packed"])
        rows = torch.from_numpy(plan.rows[dist.get_rank()])
        torch.manual_seed(3)
        results.append(attention_context(q[rows], k[rows], v[rows], plan, form=form, group=None, dropout=0.4))
    return max(float((o - results[0]).abs().max()) for o in results)


def _twice() -> bool:
    """The same bits each time."""
    plan = context_plan(UNEVEN, dist.get_world_size())
    case = CASES["very uneven"]._replace(dtype=torch.float32)
    runs = [[_found(case, form, plan, None) for form in FORMS] for _ in range(2)]
    return all(torch.equal(a, b) for one, two in zip(*runs, strict=True) for a, b in zip(one, two, strict=True))


def _on_kernels() -> dict[str, Any]:
    """In Triton's interpreter, which takes seconds for a few rows."""
    case = Case((0, 1, 20, 24), 2, 2, dtype=torch.float32)
    results = {"packed": _differences(case, None, "triton")}
    results["window"] = _differences(case._replace(offsets=(0, 24), rules={"window": 7}), None, "triton")
    plan, rank = context_plan((0, 24), 2), dist.get_rank()
    q, v, seed = torch.zeros(12, 2, 8), torch.ones(24, 2, 8)[plan.rows[rank]], torch.tensor([1])
    for form in FORMS:
        # Scores of zero and values of one: what is left of a row tells how many of its weights are.
        o = attention_context(q, q, v, plan, form=form, group=None, dropout=0.25, seed=seed)
        results[f"{form} dropout"] = o[..., 0] * torch.from_numpy(plan.positions[plan.rows[rank]] + 1)[:, None] * 0.75
    results["ran"] = kernels_ran()
    use_kernels("auto")
    return results


def _errors() -> list[str]:
    plan, q = context_plan((0, 96), dist.get_world_size()), torch.zeros(96 // dist.get_world_size(), 3, 8)
    found = []
    for change in (
        {"form": "round"},
        {"causal": False},
        {"plan": context_plan((0, 96), 6)},
        {"q": q[1:]},
        {"v": q.double()},
        {"form": "heads"},
        {"window": -1},
        {"dropout": 2.0},
    ):
        arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "plan": plan, "form": "ring", "group": None} | change
        with pytest.raises(ValueError, match="attention_context") as raised:
            attention_context(**arguments)
        found.append(str(raised.value))
    return found


@pytest.fixture(scope="module", params=[pytest.param(world, marks=pytest.mark.long) for world in (2, 4)])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the results of each process."""
    return run_distributed(_all, request.param)


@pytest.mark.parametrize("name", CASES)
def test_every_form_gives_what_one_process_gives(results: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    for result in results:
        for form in FORMS:
            if form == "heads" and case.kv_heads % len(results):
                assert "cannot share" in result[name][form]
                continue
            assert max(result[name][form]) <= TOLERANCES[case.dtype], form


@pytest.mark.parametrize("name", CASES)
def test_a_rank_sends_as_many_bytes_as_is_said(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        for form in FORMS:
            for counted, said in result[name].get((form, "bytes"), ()):
                assert counted == said, form


def test_documents_and_windows_of_any_kind(results: list[dict[str, Any]]) -> None:
    for case, *by_rank in some(zip(_random_cases(), *(result["random"] for result in results), strict=True)):
        for found in by_rank:
            for form in FORMS:
                if (form, "bytes") in found:
                    assert max(found[form]) < 1e-10, case
                    assert all(counted == said for counted, said in some(found[form, "bytes"])), case


def test_what_is_not_seen_is_not_sent(results: list[dict[str, Any]]) -> None:
    for result in results:
        for form in ("ring", "keys"):
            assert result["whole rows"][form, "bytes"] == ((0, 0), (0, 0))
            assert result["window, planned"][form, "bytes"][0][0] <= 4 * (2 * 4 * 8) * 8


def test_under_checkpointing_and_without_gradients_bits_are_the_same(results: list[dict[str, Any]]) -> None:
    assert all(result["checkpoint"] and result["no gradient"] and result["twice"] for result in results)


def test_autocast_leaves_bits_as_they_are(results: list[dict[str, Any]]) -> None:
    assert all(result["autocast"] for result in results)


def test_a_seed_that_is_drawn_is_the_same_in_every_form(results: list[dict[str, Any]]) -> None:
    assert max(result["drawn"] for result in results) < 1e-12


def test_groups_of_some_processes(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "in pairs" not in result or max(max(result["in pairs"][form]) for form in FORMS) < 1e-10


def test_the_kernels_give_the_same(results: list[dict[str, Any]]) -> None:
    for result in results:
        if kernels := result.get("kernels"):
            assert set(kernels["ran"].values()) == {"triton"}
            assert all(max(kernels[name][form]) < 1e-5 for name in ("packed", "window") for form in FORMS)


def test_the_kernels_drop_whole_weights(results: list[dict[str, Any]]) -> None:
    """As many as were to be dropped, and others in each head."""
    for form in FORMS:
        left = [result["kernels"][f"{form} dropout"] for result in results if "kernels" in result]
        for o in left:
            torch.testing.assert_close(o, o.round(), atol=1e-4, rtol=0)
            assert not torch.equal(o[:, 0].round(), o[:, 1].round())
        if left:
            assert abs(float(torch.cat(left).sum()) / (2 * 24 * 25 / 2 * 0.75) - 1) < 0.1


def test_what_does_not_go_together_is_named(results: list[dict[str, Any]]) -> None:
    words = ["none of ring", "causal", "for 6 ranks", "q has", "v must be of", "cannot share 3", "window", "dropout"]
    for result in results:
        assert all(word in message for word, message in some(zip(words, result["errors"], strict=True)))


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_alone_computes_as_if_there_were_no_ranks(form: Form) -> None:
    use_kernels("torch")
    for name in ("packed", "dropout", "cap", "bf16", "other heads"):
        case = CASES[name]
        (q, k, v), _, rules = _inputs(case)
        o = attention_context(q, k, v, context_plan(case.offsets, 1), form=form, group=None, **rules)
        assert torch.equal(o, _expected(case)[0])
