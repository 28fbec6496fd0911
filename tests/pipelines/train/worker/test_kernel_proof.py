"""No kernel is believed before it is proved: by the interpreter, on stand-ins of a GPU's facts, with kernels made wrong."""

import importlib.util
import inspect
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, SettingError, TokenizerConfig, TrainConfig
from raystride.pipelines.system.node_folder import CACHE_VARIABLE
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker import kernel_proof
from raystride.pipelines.train.worker.kernel_choice import (
    UNPROVED,
    choose_kernels,
    describe_choice,
    merge_reasons,
    read_reasons,
)
from raystride.pipelines.train.worker.kernel_needs import Need, list_needs
from raystride.pipelines.train.worker.kernel_proof import (
    Gpu,
    ProofItem,
    general_items,
    is_slower,
    kernel_table,
    list_open,
    prove,
    run_proof_item,
    time_call,
)
from raystride.triton_kernels import gelu as gelu_module
from raystride.triton_kernels.dispatch import NotRun, kernels_ran, only_kernels, use_kernels
from raystride.triton_kernels.gelu import gelu
from tests.distributed import run_distributed
from tests.end_to_end.test_networks_on_kernels import CASES, IDS

MODEL = ModelConfig(architecture="gpt2", layers=1, heads=2, hidden_size=16, context=16)
CONFIG = Config(
    model=MODEL,
    train=TrainConfig(slot_size=1, precision="fp32"),
    tokenizer=TokenizerConfig(kind="bytes", vocabulary_size=300),
)
H100, A100 = Gpu("NVIDIA H100", "570.1", "3.7.1"), Gpu("NVIDIA A100", "570.1", "3.7.1")
CPU = torch.device("cpu")
OPERATIONS = ["adamw", "layer_norm", "add_layer_norm", "gelu", "attention", "linear_cross_entropy"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    yield
    use_kernels("auto")


def small_items(need: Need, device: str) -> list[ProofItem]:
    """General checks as small as the interpreter needs them."""
    assert need.checked
    return [ProofItem(device, need.dtype, need.key, need.operation, need.checked)]


def gelu_items(need: Need, device: str) -> list[ProofItem]:
    return small_items(need, device) if need.operation == "gelu" else []


def broken_gelu(old: str, new: str) -> Any:
    """Returns the kernel of GELU's forward with a part of its source replaced."""
    source = inspect.getsource(gelu_module._gelu_forward_kernel.fn)
    assert old in source
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write("from raystride.triton_kernels.gelu import *\nfrom raystride.triton_kernels.gelu import jit, tl\n")
        file.write("import raystride.triton_kernels.gelu as own\nglobals().update(vars(own))\n" + source.replace(old, new))
    spec = importlib.util.spec_from_file_location(Path(file.name).stem, file.name)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._gelu_forward_kernel


def run_broken(item: ProofItem) -> Any:
    gelu_module._gelu_forward_kernel = broken_gelu("x * phi", "x * phi * 1.01")
    return run_proof_item(item)


def run_crashing(item: ProofItem) -> Any:
    if item.call.startswith("gelu"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return kernel_proof.DeviceCheck(item.call, 0.4, True)


def run_refusing(item: ProofItem) -> Any:
    if item.timed is not None:
        return {"triton": [1.0], "torch": [1.0]}
    return run_proof_item(item) if item.dtype == torch.float64 else kernel_proof.DeviceCheck(item.call, 0.4, True)


def run_slowly(item: ProofItem) -> Any:
    time.sleep(600)


def choose(config: Config = CONFIG, before: dict[str, Any] | None = None, **more: Any) -> tuple[dict[str, Any], str]:
    said: list[str] = []
    given: dict[str, Any] = {"device": CPU, "world": 1, "storage": None, "gpu": H100, "log": said.append} | more
    return choose_kernels(config, before, **given), "\n".join(said)


def store_proof(storage: Folder | None = None, gpu: Gpu = H100, wrong: str = "", slow: str = "layer_norm") -> None:
    """Writes the verdicts that a proof of CONFIG would have."""
    with kernel_table(storage, gpu) as table:
        for need in list_needs(CONFIG):
            problem = "31 times the allowed error" if need.operation == wrong else ""
            table[need.key] = {"error": 0.4, "problem": problem, "checks": 1, "date": "2026-11-30"}
            if need.own_key:
                ours = [3.0, 3.1, 3.0] if need.operation == slow else [1.0, 1.0, 1.0]
                table[need.own_key] = table[need.key] | {"triton_s": ours, "torch_s": [2.0, 2.1, 2.0]}


def test_the_needs_of_a_run_are_its_operations_in_its_dtypes() -> None:
    assert [need.operation for need in list_needs(CONFIG)] == OPERATIONS
    assert {need.dtype for need in list_needs(CONFIG)} == {torch.float32}
    mixed = replace(
        CONFIG,
        model=replace(MODEL, architecture="llama", kv_heads=1),
        train=replace(CONFIG.train, precision="bf16", packing="documents"),
    )
    found = {need.key: need.own_key for need in list_needs(mixed)}
    assert found == {
        "adamw float32": "adamw 64x16 64x16 64x16 64x16, float32",
        "rms_norm float32": "rms_norm 16x16 16, float32",
        "add_rms_norm float32": "add_rms_norm 16x16 16x16 16, float32",
        "swiglu bfloat16": found["swiglu bfloat16"],
        "rope bfloat16": "rope 1x2x16x8 1x1x16x8, bfloat16",
        "attention_packed bfloat16": "attention_packed causal 16x2x8 16x1x8 16x1x8, bfloat16",
        "attention bfloat16": "",
        "linear_cross_entropy bfloat16": "linear_cross_entropy 16x16 300x16, bfloat16",
    }
    for need in list_needs(mixed):
        assert general_items(need, "cuda"), "an operation without checks would never be proved"


def test_without_a_proof_all_is_pytorch_and_after_one_what_passed_is_not(tmp_path: Path) -> None:
    bits, said = choose()
    assert bits == {"kernels": []}
    assert said.startswith("PyTorch for all operations: no kernel is proved on this GPU yet")
    x = torch.randn(3, 8)
    gelu(x)
    assert kernels_ran() == {"gelu": "torch"}

    table = prove(CONFIG, None, H100, device="cpu", limit_s=500.0, processes=2, items_of=small_items)
    assert {key: row["problem"] for key, row in table.items()} == dict.fromkeys(table, "")
    assert set(table) == {key for need in list_needs(CONFIG) for key in (need.key, need.own_key) if key}
    exact = replace(CONFIG, train=replace(CONFIG.train, exact=True))
    bits, said = choose(exact)
    assert said == "Triton for six operations"
    assert bits == {"kernels": sorted(f"{name} float32" for name in OPERATIONS)}
    gelu(x)
    gelu(x.bfloat16())
    assert kernels_ran() == {"gelu": "torch"}, "in another dtype nothing is proved"
    gelu(x)
    assert kernels_ran() == {"gelu": "triton"}
    _, said = choose()
    assert "slower" in said, "the interpreter is a thousand times slower than PyTorch, as the times say"


def test_a_kernel_made_wrong_is_found_wrong_and_not_taken() -> None:
    for run, what in ((run_broken, "times the allowed error"), (run_crashing, "its process ended with -11")):
        table = prove(CONFIG, None, H100, device="cpu", limit_s=200.0, processes=1, items_of=gelu_items, run=run)
        assert what in table["gelu float32"]["problem"]
        bits, said = choose()
        assert "gelu float32" not in bits["kernels"]
        assert "gelu: wrong here" in said
        for file in Path(os.environ[CACHE_VARIABLE]).parent.rglob("kernels-*.json"):
            file.unlink()


def test_a_call_that_the_kernel_refuses_is_not_run_and_not_tried_again() -> None:
    def refused(need: Need, device: str) -> list[ProofItem]:
        return [ProofItem(device, torch.float64, need.key, "gelu", need.checked)] if need.operation == "gelu" else []

    table = prove(CONFIG, None, H100, device="cpu", limit_s=200.0, processes=1, items_of=refused, run=run_refusing)
    assert table["gelu float32"]["problem"] == "not run: gelu runs in PyTorch: dtype torch.float64"
    assert "gelu: not run: gelu runs in PyTorch" in choose()[1]
    assert "gelu float32" not in list_open(list_needs(CONFIG), table, exact=False)


def test_what_is_slower_is_pytorch_unless_exact_and_the_line_says_why() -> None:
    store_proof()
    bits, said = choose()
    assert said == "Triton for five operations, PyTorch for one (layer_norm: slower, 1.50 times PyTorch's time)"
    assert "layer_norm float32" not in bits["kernels"]
    assert choose(replace(CONFIG, train=replace(CONFIG.train, exact=True)))[1] == "Triton for six operations"
    assert not is_slower({"triton_s": [2.0, 2.4, 2.1], "torch_s": [2.0, 1.9, 2.0]}), "within the spread"


def test_a_difference_is_timed_in_turns() -> None:
    clock = iter(range(1000))
    found = time_call(gelu, [(2, 3)], torch.float32, CPU, lambda: float(next(clock)))
    assert found == {"triton": [1.0] * 3, "torch": [1.0] * 3}


def test_a_proof_is_of_one_gpu_driver_and_triton_and_lies_in_the_storage_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Folder(str(tmp_path / "runs"))
    store_proof(storage)
    for other in (A100, H100._replace(driver="580"), H100._replace(triton="3.8.0")):
        assert choose(storage=storage, gpu=other)[0] == {"kernels": []}
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "another machine"))
    assert choose()[0] == {"kernels": []}
    assert len(choose(storage=storage)[0]["kernels"]) == 5
    monkeypatch.setattr(kernel_proof, "_hash_kernels", lambda: "other kernels")
    assert choose(storage=storage)[0] == {"kernels": []}


def test_a_proof_is_made_once_and_one_cut_short_goes_on(tmp_path: Path) -> None:
    assert prove(CONFIG, None, H100, device="cpu", limit_s=0.5, processes=1, items_of=small_items, run=run_slowly) == {}
    assert choose()[0] == {"kernels": []}
    store_proof()
    with kernel_table(None, H100) as table:
        first = dict(table)
    again = prove(CONFIG, None, H100, device="cpu", limit_s=1.0, processes=1, items_of=small_items, run=run_slowly)
    assert again == first, "nothing is left to prove"


def test_two_nodes_that_differ_take_what_is_proved_on_both() -> None:
    store_proof()
    needs = list_needs(CONFIG)
    here, there = (read_reasons(needs, gpu, None, exact=True) for gpu in (H100, A100))
    assert set(merge_reasons(here, there).values()) == {"not proved yet"}
    store_proof(gpu=A100, wrong="gelu")
    there = read_reasons(needs, A100, None, exact=True)
    for merged in (merge_reasons(here, there), merge_reasons(there, here)):
        assert {key.split()[0] for key, reason in merged.items() if reason} == {"gelu"}
    assert merge_reasons({"rope bfloat16": ""}, {}) == {"rope bfloat16": "not proved on every node"}


def choose_on_rank(rank: int, world: int, cache: str) -> tuple[dict[str, Any], list[str]]:
    os.environ[CACHE_VARIABLE] = cache
    said: list[str] = []
    gpu = (H100, A100)[rank]
    return choose_kernels(CONFIG, None, device=CPU, world=world, storage=None, log=said.append, gpu=gpu), said


def test_all_workers_of_nodes_that_differ_have_one_choice(tmp_path: Path) -> None:
    store_proof(slow="")
    store_proof(gpu=A100, wrong="gelu")
    (one, said), other = run_distributed(choose_on_rank, 2, os.environ[CACHE_VARIABLE])
    assert other == (one, said)
    assert said == [
        "Triton for four operations, PyTorch for two (layer_norm: slower, 1.50 times PyTorch's time; gelu: wrong here, 31 "
        "times the allowed error)"
    ]
    assert len(one["kernels"]) == 4


NETWORKS = {
    **{name: ("classification", *CASES[name]) for name in ("classifier", "bert")},
    "translator": ("translation", *CASES["translator"]),
    "convnet": ("images", *CASES["convnet"]),
    **{
        name: ("language_model", partial(Decoder, replace(MODEL, architecture=name), 11), (IDS, IDS))
        for name in ("gpt2", "llama")
    },
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_network_calls_is_among_the_needs_of_its_run(name: str) -> None:
    """An operation that is not would stay PyTorch's for good, whatever is proved."""
    task, build, batch = NETWORKS[name]
    use_kernels("triton")
    model = build()
    model(*batch)[0].backward()
    shape = getattr(model, "shape", MODEL)
    shape = replace(MODEL, architecture={"classifier": "original"}.get(name, shape.architecture))
    needs = {need.operation for need in list_needs(replace(CONFIG, task=task, model=shape))}
    assert set(kernels_ran()) <= needs


def test_a_triton_that_no_report_knows_is_named() -> None:
    assert choose(gpu=H100._replace(triton="3.10.0"))[1].startswith(
        "Triton 3.10: kernels are compiled and looked at with 3.6 to 3.8; here they may be slower\nPyTorch for all"
    )
    assert "looked at" not in choose()[1]


def test_a_run_keeps_its_choice() -> None:
    began = {"kernels": ["gelu float32"], "device": "cuda"}
    bits, said = choose(before=began)
    assert bits == {"kernels": []}, "what is not proved where it goes on is not taken"
    store_proof()
    bits, said = choose(before=began)
    assert bits == {"kernels": ["gelu float32"]}
    assert "attention: this run began without it" in said
    assert len(choose(before={"products": "torch", "device": "cpu"})[0]["kernels"]) == 5, "it was no choice on a CPU"


def test_an_exact_run_does_not_lose_a_kernel_silently() -> None:
    exact = replace(CONFIG, train=replace(CONFIG.train, exact=True))
    with pytest.raises(SettingError, match=r"gelu float32 \(not proved yet\).*raystride check --kernels"):
        choose(exact, {"kernels": ["gelu float32"], "device": "cuda"})


def test_a_run_of_0_3_keeps_triton_and_says_that_it_is_unproved() -> None:
    bits, said = choose(before={"products": "torch", "device": "cuda"})
    assert bits == {"kernels": UNPROVED}
    assert "unproved" in said
    assert choose(before=bits | {"device": "cuda"})[0] == bits
    gelu(torch.randn(3, 8))
    assert kernels_ran() == {"gelu": "triton"}


def test_the_setting_triton_takes_kernels_unproved_and_says_so() -> None:
    bits, said = choose(replace(CONFIG, model=replace(MODEL, kernels="triton")))
    assert bits == {}
    assert "unproved here: adamw float32 (not proved yet)" in said
    gelu(torch.randn(3, 8))
    assert kernels_ran() == {"gelu": "triton"}


def test_on_cpus_there_is_nothing_to_choose_or_to_say() -> None:
    assert choose(gpu=None) == ({}, "")
    gelu(torch.randn(3, 8))
    assert kernels_ran() == {"gelu": "torch"}


def test_only_kernels_runs_nothing_else() -> None:
    x = torch.randn(3, 8)
    use_kernels("torch")
    with only_kernels():
        gelu(x)
        with pytest.raises(NotRun, match=r"gelu runs in PyTorch: dtype torch\.float64"):
            gelu(x.double())
    gelu(x)
    assert kernels_ran() == {"gelu": "torch"}


def test_the_line_names_what_is_pytorch() -> None:
    reasons = {f"{name} bfloat16": "" for name in "abcdefghi"} | {
        "rope bfloat16": "wrong here, 31 times",
        "adamw float32": "slower",
    }
    assert (
        describe_choice(reasons) == "Triton for nine operations, PyTorch for two (rope: wrong here, 31 times; adamw: slower)"
    )


def test_a_table_is_sealed_and_dated(tmp_path: Path) -> None:
    storage = Folder(str(tmp_path / "runs"))
    store_proof(storage)
    (file,) = (storage / ".machines").names()
    damaged = (storage / ".machines").read(file).replace(b"0.4", b"0.1")
    with kernel_table(storage, H100) as table:
        assert table["gelu float32"] == {"error": 0.4, "problem": "", "checks": 1, "date": "2026-11-30"}
    (storage / ".machines").put(file, damaged)
    os.environ[CACHE_VARIABLE] = str(tmp_path / "another machine")
    with kernel_table(storage, H100) as table:
        assert table == {}
