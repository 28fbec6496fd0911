"""Each check of the preflight fails where it should, and says what was asked, what there is and what to do."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Config, ScalingConfig, SettingError, TrainConfig
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.preflight.checks import Check, check_settings, describe_failures, estimate_memory, preflight
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.memory.estimate import FRAMEWORK_BYTES, MemoryEstimate
from tests.tiny import tiny

ROOT = Path(__file__).resolve().parents[4]
CONFIG = tiny(Path("text.txt"))
TWO_WORKERS = Allocation(2, "cpu", 1)
THERE = Resources(4, 0, 2**36, None)


def _checks(
    storage: Folder,
    share: Allocation = TWO_WORKERS,
    there: Resources = THERE,
) -> dict[str, Check]:
    checks = preflight(CONFIG, share, there, storage)
    return {check.name: check for check in checks}


def _only_failure(checks: dict[str, Check]) -> str:
    """The text of the one check that did not pass."""
    (text,) = describe_failures(list(checks.values()))
    return text


@pytest.fixture
def storage(tmp_path: Path) -> Folder:
    """A storage that can be written."""
    return Folder(str(tmp_path / "runs"))


def test_a_healthy_place_passes_and_no_probe_is_left(storage: Folder) -> None:
    checks = _checks(storage)
    assert set(checks) == {"kernels", "slots", "resources", "memory", "storage"}
    assert not list(describe_failures(list(checks.values())))
    assert storage.names() == []


def test_kernels_without_a_gpu_to_run_on(storage: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    wanting = replace(CONFIG, model=replace(CONFIG.model, kernels="triton"))

    def failures() -> list[str]:
        return list(describe_failures(preflight(wanting, TWO_WORKERS, THERE, storage)))

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not failures()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (text,) = failures()
    assert "model.kernels is triton, the device cpu" in text
    assert "TRITON_INTERPRET=1" in text


def test_an_elastic_run_needs_the_least_of_its_workers(storage: Folder) -> None:
    one_place = Resources(1, 0, 2**36, None)
    assert "resources" in _only_failure(_checks(storage, Allocation(2, "cpu", 1), one_place))
    assert not list(describe_failures(list(_checks(storage, Allocation(2, "cpu", 1, min_workers=1), one_place).values())))
    with pytest.raises(SettingError, match="min_workers"):
        ScalingConfig(workers=2, min_workers=3)


def test_more_workers_than_slots(storage: Folder) -> None:
    text = _only_failure(_checks(storage, Allocation(5, "cpu", 1), replace(THERE, cpus=8)))
    assert text.startswith("slots: 4 slots ")
    assert " 5 workers" in text
    assert "train.slots to 5" in text


def test_more_cores_than_the_cluster_has(storage: Folder) -> None:
    text = _only_failure(_checks(storage, Allocation(3, "cpu", 2)))
    assert text.startswith("resources: CPU: 6 asked, 4 there\n  ")
    assert "scaling.workers or scaling.threads" in text


def test_a_gpu_where_there_is_none(storage: Folder) -> None:
    text = _only_failure(_checks(storage, Allocation(1, "cuda", 1)))
    assert re.match(r"resources: GPU: 1 .* 0 ", text)
    assert "--scaling.device cpu" in text


def test_workers_that_fit_in_the_sum_but_on_no_node(storage: Folder) -> None:
    nodes = replace(THERE, nodes=2, node_cpus=(2.0, 2.0))
    assert _checks(storage, Allocation(2, "cpu", 2), nodes)["resources"].passed
    text = _only_failure(_checks(storage, Allocation(1, "cpu", 3), nodes))
    assert text.startswith("resources: ")
    assert "0 of 1 workers with 3 CPU " in text
    assert "with 2, 2" in text
    assert "scaling.threads" in text


def test_a_model_that_does_not_fit(storage: Folder) -> None:
    text = _only_failure(_checks(storage, there=replace(THERE, memory_bytes=2**29)))
    assert re.search(r" 2 worker\(s\), 0\.5 GiB ", text)
    assert "train.micro_batch_slots" in text
    assert _checks(storage, Allocation(1, "cpu", 1), replace(THERE, memory_bytes=2**29))["memory"].passed


def test_the_memory_of_a_gpu_that_is_not_known_is_no_failure(storage: Folder) -> None:
    check = _checks(storage, Allocation(1, "cuda", 1), replace(THERE, gpus=1))["memory"]
    assert check.passed
    assert "not known" in check.found


def test_the_memory_of_a_network_that_is_not_known_is_no_failure() -> None:
    own = check_settings(replace(CONFIG, task="my_own"), Allocation(1, "cpu", 1), THERE)[-1]
    assert own.passed
    assert "not looked at" in own.found
    assert "my_own" in own.found


def _need(config: Config, share: Allocation) -> MemoryEstimate:
    need = estimate_memory(config, share)
    assert need
    return need


def test_a_larger_micro_batch_needs_more_memory(storage: Folder) -> None:
    one = replace(CONFIG, train=TrainConfig(steps=1, slots=4, slot_size=512, micro_batch_slots=1))
    four = replace(CONFIG, train=TrainConfig(steps=1, slots=4, slot_size=512))
    share = Allocation(1, "cpu", 1)
    assert _need(four, share).activations == 4 * _need(one, share).activations


def test_exact_sums_need_more_memory_and_one_slot_at_a_time() -> None:
    exact = replace(CONFIG, train=TrainConfig(steps=1, slots=8, slot_size=4, exact=True))
    plain = replace(CONFIG, train=TrainConfig(steps=1, slots=8, slot_size=4))
    alone, two = (_need(exact, Allocation(workers, "cpu", 1)) for workers in (1, 2))
    plainly = _need(plain, Allocation(1, "cpu", 1))
    assert alone.gradients > plainly.gradients
    assert alone.activations == two.activations < plainly.activations


def test_a_storage_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    text = _only_failure(_checks(Folder(str(tmp_path / "file" / "runs"))))
    assert text.startswith("storage: NotADirectoryError")
    assert "--storage" in text


def test_offloaded_states_and_pytorch_itself_must_fit_into_main_memory() -> None:
    config = replace(CONFIG, scaling=ScalingConfig(strategy="fsdp", offload=True))
    share, found = Allocation(2, "cuda", 1), _need(config, Allocation(2, "cuda", 1))
    assert found.host > 0
    host = 2 * (found.host + FRAMEWORK_BYTES)
    for memory, passed in ((host, True), (host - 1, False)):
        there = Resources(4, 2, memory, 2**40)
        check = check_settings(config, share, there)[-1]
        assert check.passed is passed
        assert ("scaling.offload false" in check.remedy) is not passed
    spread = Resources(4, 2, host / 2, 2**40, nodes=2)
    assert check_settings(config, share, spread)[-1].passed, "each node has one of the workers"
