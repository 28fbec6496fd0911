"""linear_cross_entropy_sharded: real processes with some words each get the loss and the gradients of the whole head."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from benchmarks.mesh_traffic import bytes_exchanged
from raystride.triton_kernels import linear_cross_entropy as whole_module
from raystride.triton_kernels import linear_cross_entropy_sharded as module
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from raystride.triton_kernels.linear_cross_entropy import ALIGNMENT, linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.linear_cross_entropy_sharded import WordShard, linear_cross_entropy_sharded
from tests.distributed import run_distributed
from tests.some import some
from tests.triton_kernels.guard import guarded

WORDS, WIDTH = 37, 8
EVEN = {1: (0, 37), 2: (0, 19, 37), 4: (0, 10, 19, 28, 37)}
UNEVEN = {1: (0, 37), 2: (0, 36, 37), 4: (0, 1, 1, 30, 37)}
LAST = {1: (0, 37), 2: (0, 0, 37), 4: (0, 0, 0, 0, 37)}
"""By the number of workers, where each one's words begin, and their end; some have none."""


class Case(NamedTuple):
    """A loss to compute."""

    cuts: dict[int, tuple[int, ...]] = EVEN
    rules: dict[str, float] = {}  # noqa: RUF012  nobody changes it
    tokens: int = 20
    dtype: torch.dtype = torch.float64
    scale: float = 1.0
    ignored: float = 0.3


BOTH = {"label_smoothing": 0.2, "z_loss": 1e-2}
CASES = {
    "plain": Case(),
    "uneven": Case(UNEVEN),
    "one has all": Case(LAST, BOTH),
    "smoothing": Case(UNEVEN, {"label_smoothing": 0.1}),
    "z-loss": Case(EVEN, {"z_loss": 1e-2}),
    "word 3 is ignored": Case(EVEN, {**BOTH, "ignore_index": 3}),
    "chunks": Case(UNEVEN, BOTH, tokens=93),
    "one token": Case(tokens=1, ignored=0.0),
    "no token": Case(tokens=0),
    "nothing counts": Case(EVEN, BOTH, ignored=1.0),
    "large logits": Case(UNEVEN, scale=1e3),
    "fp32": Case(UNEVEN, BOTH, dtype=torch.float32),
    "fp32 chunks": Case(EVEN, BOTH, tokens=93, dtype=torch.float32),
    "bf16": Case(UNEVEN, BOTH, tokens=93, dtype=torch.bfloat16),
}
ON_KERNELS = ("fp32 chunks", "fp32", "bf16")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Tolerances relative to the largest number. In bf16, logits and gradients are rounded to 2^-9."""
CHUNK = 16
"""Tokens, in every process of these tests."""


def _inputs(case: Case) -> list[torch.Tensor]:
    """x (2, tokens / 2, C) where that goes, weight, targets."""
    torch.manual_seed(0)
    halves = (2, case.tokens // 2) if case.tokens % 2 == 0 else (case.tokens,)
    x, weight = torch.randn(*halves, WIDTH) * case.scale, torch.randn(WORDS, WIDTH)
    ignored = int(case.rules.get("ignore_index", -100))
    targets = torch.randint(WORDS, halves).where(torch.rand(halves) >= case.ignored, ignored)
    return [x.to(case.dtype), weight.to(case.dtype), targets]


def _own(case: Case, group: Any = None, **changes: Any) -> tuple[int, list[torch.Tensor], Callable[..., Any]]:
    """This worker's first word; x, its rows and targets, the first two with gradients; and the call."""
    x, weight, targets = _inputs(case)
    first, end = case.cuts[dist.get_world_size(group)][dist.get_rank(group) :][:2]
    arguments: dict[str, Any] = {"first_word": first, "words": WORDS, "group": group, **case.rules, **changes}
    tensors = [x.requires_grad_(), weight[first:end].clone().requires_grad_(), targets]
    return first, tensors, partial(linear_cross_entropy_sharded, **arguments)


def _found(case: Case, group: Any, *, recompute: bool = False, **changes: Any) -> list[Any]:
    """Returns this worker's loss, count, gradient of x (summed over workers) and of its rows."""
    _, tensors, call = _own(case, group, **changes)
    loss, count = checkpoint(call, *tensors, use_reentrant=False) if recompute else call(*tensors)
    grad_x, grad_weight = torch.autograd.grad(0.37 * loss, tensors[:2])
    dist.all_reduce(grad_x, group=group)
    return [loss.detach(), count, grad_x, grad_weight]


def _differences(case: Case, group: Any = None) -> list[Any]:
    """Returns relative differences of loss and gradients to the unsharded ones in float64; and the loss."""
    x, weight, targets = _inputs(case)
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    loss, count = linear_cross_entropy_reference(*leaves, targets, **case.rules)  # type: ignore[arg-type]
    wanted = [loss.detach(), *torch.autograd.grad(0.37 * loss, leaves)]
    found_loss, found_count, *gradients = _found(case, group)
    assert found_count == count
    assert found_loss.dtype == torch.promote_types(case.dtype, torch.float32)
    assert all(each.dtype == case.dtype for each in gradients)
    first = _own(case, group)[0]
    parts = [*wanted[:2], wanted[2][first : first + len(gradients[1])]]
    errors = [
        float((found.double() - part).abs().max() / max(1.0, float(each.abs().max()))) if part.numel() else 0.0
        for found, part, each in zip([found_loss, *gradients], parts, wanted, strict=True)
    ]
    return [max(errors), float(found_loss)]


def _all(rank: int, world: int) -> dict[str, Any]:
    use_kernels("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_module, "_MIN_CHUNK", CHUNK)
        results: dict[str, Any] = {name: _differences(case) for name, case in CASES.items()}
        results["random"] = [_differences(case) for case in _random_cases(world)]
        results["sent"] = [_sent(CASES[name]) for name in ("chunks", "plain", "bf16", "no token")]
        results["without"] = _without_gradients()
        results["one wanted"] = _one_wanted()
        results["checkpoint"] = _same(_found(CASES["chunks"], None), _found(CASES["chunks"], None, recompute=True))
        results["twice"] = _same(_found(CASES["fp32 chunks"], None), _found(CASES["fp32 chunks"], None))
        results["autocast"] = _under_autocast()
        results["products"] = _products()
        results["errors"] = _errors()
        if world == 1:
            results["alone"] = _alone()
        else:
            results["no word"] = [_no_word(wrong) for wrong in (-1, WORDS, 2**40)]
        if world == 2:
            results["kernels"] = _on_kernels()
        if world == 4:
            pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
            results["pairs"] = _differences(CASES["chunks"], pairs[rank // 2])
    return results


def _random_cases(world: int) -> list[Case]:
    """The same on all workers."""
    generator = torch.Generator().manual_seed(world)

    def drawn(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    cases = []
    for _ in range(8):
        inner = sorted(drawn(WORDS + 1) for _ in range(world - 1))
        rules = {"label_smoothing": drawn(3) / 2, "z_loss": drawn(2) / 50}
        cases.append(Case({world: (0, *inner, WORDS)}, rules, tokens=drawn(70), ignored=drawn(3) / 3))
    return cases


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _sent(case: Case) -> tuple[int, int]:
    """Bytes that this process gives to all-reduces of its loss and its gradients, and what is said of it."""
    sent, reduce = [0], dist.all_reduce

    def counting(x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        sent[0] += x.numel() * x.element_size()
        return reduce(x, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.dist, "all_reduce", counting)
        _, _, grad_x, _ = _found(case, None)
    said = bytes_exchanged(case.tokens, case.rules.get("label_smoothing", 0.0), itemsize=max(4, case.dtype.itemsize))
    return sent[0] - grad_x.numel() * grad_x.element_size(), said  # _found adds up the gradient of x itself


def _without_gradients() -> bool:
    """The same bits, and no gradient computed."""
    _, tensors, call = _own(CASES["fp32 chunks"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Chunk, "gradients", None)
        none_wanted, _ = call(*(each.detach() for each in tensors))
        with torch.no_grad():
            switched_off, _ = call(*tensors)
    loss, _ = call(*tensors)
    return not none_wanted.requires_grad and torch.equal(loss, none_wanted) and torch.equal(loss, switched_off)


def _one_wanted() -> bool:
    """The gradient of x alone, or of weight alone, has the bits that it has beside the other."""
    _, (x, own, targets), call = _own(CASES["fp32 chunks"])
    calls = (((x, own), (x, own)), ((x, own.detach()), (x,)), ((x.detach(), own), (own,)))
    found = [torch.autograd.grad(call(*arguments, targets)[0], wanted) for arguments, wanted in calls]
    return torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[2][0])


def _under_autocast() -> bool:
    """As with inputs of the lower precision; gradients in that of the inputs."""
    case = CASES["fp32 chunks"]
    low = _found(case._replace(dtype=torch.bfloat16), None)
    with torch.autocast("cpu", torch.bfloat16):
        found = _found(case, None)
        double = _found(CASES["chunks"], None)
    right = _same(double, _found(CASES["chunks"], None)) and torch.equal(found[0], low[0])
    return right and all(grad.dtype == torch.float32 for grad in found[2:]) and torch.equal(found[3], low[3].float())


def _products() -> tuple[int, int]:
    """Returns the number of products by the model's backend, and the maximum of logits of one."""
    sizes = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x) * len(weight))
        return F.linear(x, weight)

    _found(CASES["fp32 chunks"], None, product=product)
    return len(sizes), max(sizes)


def _no_word(wrong: int) -> list[Any]:
    """Loss, count, rows of x without a gradient that is a number, and whether all of this worker's words have none."""
    _, (x, own, targets), call = _own(Case(tokens=7, ignored=0.0, dtype=torch.float32))
    targets[[1, 3]] = torch.tensor([-100, wrong])
    loss, count = call(x, own, targets)
    of_x, of_weight = torch.autograd.grad(loss, (x, own))
    return [
        float(loss.detach()),
        int(count),
        of_x.isnan().all(1).nonzero().flatten().tolist(),
        bool(of_weight.isnan().all()),
    ]


def _alone() -> bool:
    """One worker: the bits of `linear_cross_entropy`, by PyTorch and by the kernel."""
    same = True
    for kernels in ("torch", "triton"):
        use_kernels(kernels)
        for name in ("fp32 chunks", "bf16"):
            case = CASES[name]
            tensors = _own(case)[1]
            loss, count = linear_cross_entropy(*tensors, **case.rules)  # type: ignore[arg-type]
            same &= _same([loss.detach(), count, *torch.autograd.grad(0.37 * loss, tensors[:2])], _found(case, None))
    use_kernels("torch")
    return same


def _on_kernels() -> dict[str, Any]:
    use_kernels("triton")
    results: dict[str, Any] = {name: _differences(CASES[name]) for name in ON_KERNELS}
    results["one has all"] = _differences(CASES["one has all"]._replace(dtype=torch.float32))
    results["ran"] = kernels_ran()
    results["no word"] = _no_word(2**40)
    results["without"] = _without_gradients()
    results["sent"] = _sent(CASES["bf16"])
    use_kernels("torch")
    return results


def _errors() -> list[str]:
    """Raised before anything is exchanged."""
    x, weight, targets = _inputs(CASES["fp32"])
    found = []
    for change in (
        {"first_word": -1}, {"words": WORDS - 1}, {"label_smoothing": 1.5}, {"weight": weight[:, 1:]},
        {"targets": targets.int()}, {"targets": targets[:1]},
    ):  # fmt: skip
        arguments: dict[str, Any] = {"x": x, "weight": weight, "targets": targets, "first_word": 0, "words": WORDS}
        with pytest.raises(ValueError, match="linear_cross_entropy_sharded") as raised:
            linear_cross_entropy_sharded(**arguments | change, group=None)
        found.append(str(raised.value))
    return found


@pytest.fixture(scope="module", params=[1, *(pytest.param(world, marks=pytest.mark.long) for world in (2, 4))])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the results of each process."""
    return run_distributed(_all, request.param)


@pytest.mark.parametrize("name", CASES)
def test_workers_get_the_loss_and_the_gradients_of_the_whole(results: list[dict[str, Any]], name: str) -> None:
    assert max(result[name][0] for result in results) <= TOLERANCES[CASES[name].dtype]
    assert len({result[name][1] for result in results}) == 1, "the same bits on all workers"


def test_cuts_and_rules_of_any_kind(results: list[dict[str, Any]]) -> None:
    for case, *by_rank in some(zip(_random_cases(len(results)), *(result["random"] for result in results), strict=True)):
        assert max(error for error, _ in by_rank) < 1e-10, case


def test_a_worker_sends_as_many_bytes_as_is_said(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(counted == (said if len(results) > 1 else 0) for counted, said in some(result["sent"]))


@pytest.mark.parametrize("what", ["without", "one wanted", "twice", "checkpoint", "autocast", "alone"])
def test_bits_are_as_they_should_be(results: list[dict[str, Any]], what: str) -> None:
    """Those of `linear_cross_entropy` where a worker is alone."""
    assert all(result.get(what, True) for result in results)


def test_logits_are_there_for_a_chunk_of_tokens_and_own_words_alone(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        first, end = EVEN[len(results)][rank : rank + 2]
        expected = (6, CHUNK * (end - first)) if len(results) > 1 else (1, 93 * WORDS)
        assert result["products"] == expected


def test_a_target_that_is_no_word_makes_the_loss_no_number(results: list[dict[str, Any]]) -> None:
    for result in results:
        for found in result.get("no word", []):
            assert str(found) == "[nan, 6, [3], True]"


def test_the_kernels_give_the_same(results: list[dict[str, Any]]) -> None:
    for result in results:
        if kernels := result.get("kernels"):
            assert kernels["ran"] == {"linear_cross_entropy_sharded": "triton"}
            assert all(kernels[name][0] <= TOLERANCES[CASES[name].dtype] for name in ON_KERNELS)
            assert kernels["one has all"][0] <= 1e-5
            assert str(kernels["no word"]) == "[nan, 6, [3], True]"
            assert kernels["without"]
            assert kernels["sent"][0] == kernels["sent"][1]


def test_groups_of_some_processes(results: list[dict[str, Any]]) -> None:
    assert all(result["pairs"][0] < 1e-10 for result in results if "pairs" in result)


def test_what_does_not_go_together_is_named(results: list[dict[str, Any]]) -> None:
    words = ["rows -1 to 35", "not among 36 words", "between 0 and 1", "weight must be", "torch.int64", "targets must be"]
    for result in results:
        assert all(word in message for word, message in zip(words, result["errors"], strict=True))


def test_without_processes_it_is_the_plain_loss() -> None:
    x, weight, targets = _inputs(CASES["fp32"])
    found = linear_cross_entropy_sharded(x, weight, targets, first_word=0, words=WORDS, group=None, **BOTH)
    assert _same(list(found), list(linear_cross_entropy(x, weight, targets, **BOTH)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="all of one worker"):
        linear_cross_entropy_sharded(x, weight[:9], targets, first_word=0, words=WORDS, group=None)


def _joined(
    logits: torch.Tensor, targets: torch.Tensor, shards: dict[WordShard, slice], kernels: bool
) -> list[torch.Tensor]:
    """Losses and the gradient of the logits by the parts of the words, with the exchange done here.

    For kernels every second part is followed by columns that are no words, with any numbers in them.
    """
    parts = [logits[:, own].clone() for own in shards.values()]
    sizes = [part.shape[1] for part in parts]
    if kernels:
        padding = [-size % ALIGNMENT * (number % 2 == 0) for number, size in enumerate(sizes)]
        parts = [F.pad(part, (0, more), value=1e30) for part, more in zip(parts, padding, strict=True)]
        measured = [module.measure_words(part, targets, *rest) for part, *rest in zip(parts, shards, sizes, strict=True)]
    else:
        measured = [module.measure_words_reference(part, targets, shard) for part, shard in zip(parts, shards, strict=True)]
    largest = torch.stack([own for own, _ in measured]).amax(0)
    for own, sums in measured:
        sums[0] *= (own - largest).exp()
    total = torch.stack([sums for _, sums in measured]).sum(0)
    losses, log_sums = module.compute_word_losses(largest, total, targets, next(iter(shards)))
    for part, shard, size, (own, _) in zip(parts, shards, sizes, measured, strict=True):
        if kernels:
            module.words_gradient(part, targets, log_sums, shard, size)
        else:
            module.words_gradient_reference(part, targets, own, log_sums, shard)
        behind = part[:, size:]  # zeros, but for what a block of so few words does not reach
        assert ((behind == 0) | (behind == 1e30)).all()
    return [losses, torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)]


def _compare(kernels: bool, rows: int, words: int, cuts: list[int], smoothing: float, z_loss: float, seed: int) -> None:
    torch.manual_seed(seed)
    exact = torch.float32 if kernels else torch.float64
    logits = (torch.randn(rows, words, dtype=exact) * 5).requires_grad_()
    with torch.no_grad():
        logits[:, : words // 3].masked_fill_(torch.rand(rows, 1) < 0.2, -float("inf"))  # a worker may have no more
        logits[:, -1] = 1.0
    targets = torch.randint(words // 3, words, (rows,)).where(torch.rand(rows) < 0.8, -100)
    ends = [0, *sorted({cut for cut in cuts if cut < words} - {0}), words]
    finite = 0.0 if logits.isinf().any() else smoothing  # the mean of infinite logits is no number in either
    shards = {WordShard(a, words, -100, finite, z_loss): slice(a, b) for a, b in pairwise(ends)}
    found = _joined(logits.detach(), targets, shards, kernels)
    whole = logits.double()
    losses = F.cross_entropy(whole, targets, label_smoothing=finite, reduction="none")
    losses = losses + z_loss * whole.logsumexp(1).square().where(targets != -100, 0.0)
    wanted = [losses.detach(), torch.autograd.grad(losses.sum(), logits)[0].nan_to_num(0.0)]
    tolerance = 1e-5 if kernels else 1e-11
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=tolerance, rtol=tolerance)


DRAWN = {
    "words": st.one_of(st.sampled_from([1, 2, 127, 128, 129]), st.integers(1, 300)),
    "cuts": st.lists(st.integers(0, 300), max_size=6),
    "smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "z_loss": st.sampled_from([0.0, 1e-2]),
    "seed": st.integers(0, 1000),
}


@given(rows=st.integers(1, 40), **DRAWN)
def test_any_partition_of_the_words_gives_the_whole(**drawn: Any) -> None:
    _compare(False, **drawn)


@settings(max_examples=15)
@given(rows=st.integers(1, 5), **DRAWN)
def test_any_partition_of_the_words_gives_the_whole_by_kernels(**drawn: Any) -> None:
    with guarded() as launched:
        _compare(True, **drawn)
    assert set(launched) == {"_measure_words_kernel", "_words_gradient_kernel"}
