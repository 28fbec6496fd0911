"""The preset of a mixture of experts trains, says what it is, writes text, and is exported or refused by name."""

import json
from pathlib import Path

import pytest

import raystride
from tests.errors import refused
from tests.tiny import write_text

FEW = {"train.steps": 4, "train.log_every": 2, "validation.every": 0, "validation.samples": 8, "launch.mode": "inline"}


@pytest.mark.parametrize("router", ["softmax_normalized", "sigmoid"])
def test_the_preset_trains_and_its_page_has_the_loads(router: str, tmp_path: Path) -> None:
    changes = FEW | {"data.source": str(write_text(tmp_path)), "data.kind": "text", "data.validation": "tail"}
    changes |= {"record.mlflow": False, "model.router": router}
    run = raystride.train("lm_experts", changes, run="experts", storage=str(tmp_path / "runs"))
    folder = tmp_path / "runs" / "experts"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4
    idle = 3 * 3 * (8 - 2) * 96 * 128  # blocks, matrices, experts that a token does not use
    assert summary["parameters"] - summary["active_parameters"] == idle
    entries = [json.loads(line)["values"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loads = [values for values in entries if "expert_load/0" in values]
    assert len(loads) == 2
    for values in loads:
        assert sum(values[f"expert_load/{expert}"] for expert in range(8)) == pytest.approx(8)
        assert values["expert_load_min"] <= 1 <= values["expert_load_max"]
    assert "Load of experts" in (folder / "report.html").read_text()
    assert len(run.generate("def ", {"sample.tokens": 5})) > 4
    if router == "sigmoid":
        with refused("model.router", "sigmoid", names=["`mixtral`"]):
            run.export("hugging_face")
        return
    written = Path(str(run.export("hugging_face")))
    assert json.loads((written / "config.json").read_text())["model_type"] == "mixtral"
