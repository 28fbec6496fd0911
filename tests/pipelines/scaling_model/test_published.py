"""Against what others measured; `python -m benchmarks.scaling_model` prints all tables."""

import yaml

from benchmarks.scaling_model import AIM, TABLES, described, read
from raystride.pipelines.scaling_model import held_back


def test_llama_on_128_gpus_is_predicted_from_8_and_described_links() -> None:
    stated = yaml.safe_load(TABLES.read_text())["torchtitan, Llama 3.1 8B on H100"]
    found = held_back(read(stated), described(stated), above_workers=8)
    assert [work.workers for work, _, _ in found.trials] == [128] * 3
    assert found.worst < 0.05


def test_larger_groups_of_mosaic_s_table_are_predicted_from_up_to_32_gpus() -> None:
    stated = yaml.safe_load(TABLES.read_text())["llm-foundry, MPT on A100 40GB"]
    found = held_back(read(stated), described(stated), above_workers=32)
    assert len(found.trials) == 15
    assert found.median < 0.03
    assert found.worst < AIM
