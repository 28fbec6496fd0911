"""A run's page shows its origin, as far as the run's folder has it."""

from dataclasses import replace
from pathlib import Path

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.observability.report.figures import gather_figures
from raystride.pipelines.observability.report.origin import Origin, load_origin
from raystride.pipelines.observability.report.page import run_page, write_page
from raystride.pipelines.system.storage.folder import Folder
from tests.tiny import tiny


def test_the_page_has_data_date_commit_changed_settings_and_sample(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "runs" / "a"))
    config = tiny(Path("/data/my <texts>.txt"), run="a", storage=str(tmp_path / "runs"))
    folder.put("config.yaml", to_yaml(config))
    known = {"commit": "abc123", "dirty": True, "data": "f" * 16, "gpus": [], "cpu": "A CPU", "prepared_at": "read 3 MB/s"}
    folder.put_json("environment.json", known)
    folder.put("sample.txt", "def f():\n    return 1 < 2\n")
    entry = {"kind": "metrics", "step": 1, "time": 1_767_312_000.0, "values": {"train_loss": 1.0}}
    write_page(folder, gather_figures([entry]), {"run": "a"})  # type: ignore[list-item]
    page = folder.read("report.html").decode()
    for shown in (
        "/data/my &lt;texts&gt;.txt", "2026-01-02 00:00 UTC", "abc123, with changes", "A CPU", "train.steps", ">6<",
        "read 3 MB/s", "<pre>def f():\n    return 1 &lt; 2",
    ):  # fmt: skip
        assert shown in page, shown
    assert "train.clip_norm" not in page


def test_what_is_missing_or_damaged_is_left_out(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert load_origin(folder) == Origin()
    folder.put("config.yaml", "a: [")
    folder.put("environment.json", "{")
    assert load_origin(folder) == Origin()
    assert "None, or they are not known." in run_page(gather_figures([]), {})


def test_changed_settings_are_those_that_are_no_defaults() -> None:
    assert Origin(Config()).changed_settings == []
    changed = Origin(replace(Config(), seed=3, run="a", storage="/x")).changed_settings
    assert changed == [["seed", "3", "0"]]
