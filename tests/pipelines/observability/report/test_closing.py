"""The closing screen: its last three lines are those that a user acts on."""

import pytest

from raystride.pipelines.observability.record.summary import build_summary
from raystride.pipelines.observability.report import closing_screen
from raystride.pipelines.system.commands import launch_command
from raystride.pipelines.system.storage.folder import Folder

FOLDER = Folder("/data/runs/small-1f3a")


def summary(status: str = "finished", **given: object) -> dict[str, object]:
    """A summary as the recorder writes it."""
    return build_summary("small-1f3a", status, {}, given)


@pytest.mark.parametrize(("status", "job"), [("finished", "generate"), ("stopped", "train"), ("failed", "train")])
def test_the_last_three_lines_say_where_and_what_next(status: str, job: str) -> None:
    text = closing_screen(summary(status, mlflow_run_id="abc"), FOLDER, "a curve", "a sample")
    last = text.splitlines()[-3:]
    assert last[0] == "results  /data/runs/small-1f3a"
    assert last[1] == f"mlflow   {launch_command()} ui --storage /data/runs"
    assert last[2].startswith(f"next     {launch_command()} {job} --run small-1f3a --storage /data/runs")


def test_what_writes_no_text_is_evaluated() -> None:
    line = closing_screen(summary(), FOLDER).splitlines()[-1]
    assert line == f"next     {launch_command()} evaluate --run small-1f3a --storage /data/runs --split validation"


def test_a_tracking_server_is_linked_and_a_missing_one_is_said() -> None:
    link = "https://tracking.example/#/experiments/1/runs/abc"
    assert closing_screen(summary(mlflow_run_id="abc"), FOLDER, link=link).splitlines()[-2] == f"mlflow   {link}"
    assert closing_screen(summary(), FOLDER).splitlines()[-2] == "mlflow   not logged"


def test_known_figures_are_shown_and_unknown_ones_left_out() -> None:
    text = closing_screen(
        summary(train_loss=float("nan"), val_loss=1.88, mfu=0.412, peak_memory_bytes=2**30, metrics={"perplexity": 6.55}),
        FOLDER,
    )
    for shown in ("NaN", "1.8800", "41.2%", "1.00 GiB", "perplexity", "6.55"):
        assert shown in text
    assert "tokens/s" not in text


def test_energy_and_throttling_are_shown_where_there_are_any() -> None:
    text = closing_screen(
        summary(joules_per_token=0.01234, average_power_watts=5321.4, throttled_seconds=12.34, gpu_idle_share=0.0456), FOLDER
    )
    for shown in ("0.0123 J", "5,321 W", "12.3 s", "4.6%"):
        assert shown in text
    for label in ("energy per token", "average power", "throttled", "GPU idle"):
        assert label in text
        assert label not in closing_screen(summary(), FOLDER)


def test_a_samples_control_characters_do_not_reach_the_terminal() -> None:
    text = closing_screen(summary(), FOLDER, sample="def f():\n\tpass\x1b[31m\x07\n" + "line\n" * 50)
    assert "def f():" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("│ line") < 12


def test_a_run_with_test_data_is_scored_on_it() -> None:
    ended = summary(mlflow_run_id="1")
    assert closing_screen(ended, FOLDER).endswith("--split validation")
    assert "evaluate" in (last := closing_screen(ended, FOLDER, has_test_data=True).splitlines()[-1])
    assert "--split" not in last
