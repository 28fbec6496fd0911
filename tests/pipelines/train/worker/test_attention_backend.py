"""Who computes plain attention: what the settings say, what a run did before, or what a timing found."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from raystride.pipelines.config import Config, ModelConfig, TrainConfig
from raystride.pipelines.train.worker.attention_backend import (
    choose_attention,
    choose_faster,
    previous_choice,
    reason_for_own_kernel,
    time_attention,
)
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import (
    attention_packed,
    attention_packed_reference,
    packed_library_reason,
)
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels, use_library

SMALL = ModelConfig(layers=1, heads=4, kv_heads=2, hidden_size=64, context=16, attention="auto")
CONFIG = Config(model=SMALL, train=TrainConfig(slot_size=2, precision="bf16"))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Kernels run in the interpreter, where a GPU would run them."""
    use_kernels("triton")
    yield
    use_library(False)
    use_kernels("auto")


def test_on_cpus_there_is_nothing_to_choose() -> None:
    use_library(True)
    said: list[str] = []
    assert (
        choose_attention(CONFIG.model, CONFIG.train, None, device=torch.device("cpu"), rank=0, world=1, log=said.append)
        == {}
    )
    attention(*torch.randn(3, 1, 2, 4, 16).half(), causal=True)
    assert (kernels_ran()["attention"], said) == ("triton", [])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": replace(SMALL, attention="triton")}, "the settings say so"),
        ({"model": replace(SMALL, kernels="torch")}, "the settings say so"),
        ({"train": replace(CONFIG.train, exact=True, precision="fp32")}, "exact bits"),
        ({"model": replace(SMALL, dropout=0.1)}, "no call is plain"),
        ({"model": replace(SMALL, softcap=30.0)}, "no call is plain"),
        ({"train": replace(CONFIG.train, packing="documents")}, ""),
        ({"train": replace(CONFIG.train, precision="fp32")}, "no library is faster here"),
        ({}, ""),
        ({"model": replace(SMALL, attention="library"), "train": replace(CONFIG.train, precision="fp32")}, ""),
    ],
)
def test_when_it_is_ours_without_a_timing(changes: dict[str, Any], why: str) -> None:
    config = replace(CONFIG, **changes)
    assert reason_for_own_kernel(config.model, config.train, "sm_90") == why


def test_older_gpus_time_nothing() -> None:
    assert reason_for_own_kernel(CONFIG.model, CONFIG.train, "sm_80") == "no library is faster here"


def test_the_library_must_gain_something() -> None:
    assert choose_faster({"triton": 1.0, "library": 0.5}) == {"attention": "library", "attention_gain": 2.0}
    assert choose_faster({"triton": 1.0, "library": 0.98}) == {"attention": "triton", "attention_gain": 0.98}
    assert choose_faster({"triton": 1.0, "library": float("inf")})["attention"] == "triton"


def test_a_run_stays_with_its_choice_on_the_same_gpu() -> None:
    before = {"attention": "library", "attention_gain": 1.3, "gpu": "A", "products": "torch"}
    assert previous_choice(before, "A") == {"attention": "library", "attention_gain": 1.3}
    assert previous_choice(before, "B") == previous_choice({"gpu": "A"}, "A") == {}


class CountLibraryCalls(TorchFunctionMode):
    """Counts PyTorch's attention."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.nn.functional.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.parametrize("packing", ["none", "documents"])
def test_both_are_timed(packing: Any) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, packing=packing))
    with CountLibraryCalls() as calls:  # on a clock on which nothing but a call of PyTorch's takes time
        assert time_attention(config.model, config.train, torch.device("cpu"), lambda: float(calls.count)) == {
            "triton": 0,
            "library": 1,
        }
    assert all(0 < each < float("inf") for each in time_attention(config.model, config.train, torch.device("cpu")).values())


def test_a_library_that_refuses_a_call_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this head size")

    monkeypatch.setattr("raystride.triton_kernels.attention.attention_reference", refuse)
    seconds = time_attention(CONFIG.model, CONFIG.train, torch.device("cpu"))
    assert seconds["library"] == float("inf")
    assert choose_faster(seconds)["attention"] == "triton"


def test_plain_packed_calls_go_to_the_library() -> None:
    use_library(True)
    q, k, v = torch.randn(12, 4, 16).half(), *torch.randn(2, 12, 2, 16).half()
    offsets = torch.tensor([0, 5, 5, 12])
    for rules in ({}, {"causal": True}, {"causal": True, "scale": 0.3, "longest": 7}):
        found = attention_packed(q, k, v, offsets, offsets, **rules)  # type: ignore[arg-type]
        rules.pop("longest", None)
        assert torch.equal(found, attention_packed_reference(q, k, v, offsets, offsets, **rules))  # type: ignore[arg-type]
        assert kernels_ran()["attention_packed"] == "library"
    for rules in ({"causal": True, "window": 4}, {"causal": True, "dropout": 0.5}, {"softcap": 9.0}):
        attention_packed(q, k, v, offsets, offsets, **rules)  # type: ignore[arg-type]
        assert kernels_ran()["attention_packed"] == "triton"


def test_pytorchs_packed_attention_has_what_ours_asks_of_it() -> None:
    """By the installed PyTorch; on a GPU it is called, on CPUs it has no kernel."""
    assert packed_library_reason(torch.device("cuda")) == ""


def test_plain_calls_alone_go_to_the_library() -> None:
    use_library(True)
    q, k, v = torch.randn(2, 4, 9, 16).half(), *torch.randn(2, 2, 2, 9, 16).half()
    for rules in ({}, {"causal": True}, {"causal": True, "scale": 0.3}):
        assert torch.equal(attention(q, k, v, **rules), attention_reference(q, k, v, **rules))  # type: ignore[arg-type]
        assert kernels_ran()["attention"] == "library"
    lengths = torch.tensor([3, 9])
    for rules in ({"causal": True, "window": 4}, {"key_lengths": lengths}, {"dropout": 0.5}):
        attention(q, k, v, **rules)  # type: ignore[arg-type]
        assert kernels_ran()["attention"] == "triton"
    attention(q[:, :, :5], k, v, causal=True)
    attention(q.float(), k.float(), v.float(), causal=True)
    assert kernels_ran()["attention"] == "triton"
