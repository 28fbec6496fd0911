"""The files of `deploy/monitoring/` name only existing metrics, labels and files; alerts fire on what they are for."""

import operator
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from raystride.pipelines.launch.console.run_metrics import DRIVER_GAUGES, RUN_STATE
from raystride.pipelines.observability.observers.ray_metrics import GAUGES, SAVE_WAIT, STEP
from tests.deploy.monitoring import FOLDER, find_queried_metrics, load_dashboard
from tests.some import some

OURS = {f"ray_{shown.name}" for shown in (*GAUGES.values(), STEP, SAVE_WAIT)}
OURS |= {f"ray_{name}" for name, _ in DRIVER_GAUGES.values()} | {f"ray_{RUN_STATE}"}


def test_the_dashboard_queries_all_of_our_metrics_and_only_exported_ones() -> None:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    named = set().union(*find_queried_metrics().values())
    assert named >= OURS
    assert named - OURS <= {f"ray_{name}" for name in METRICS_GAUGES}


def test_the_dashboard_groups_by_existing_labels() -> None:
    labels = set()
    for panel in load_dashboard()["panels"]:
        for target in panel.get("targets", ()):
            by = {name.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in group.split(",")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= by
            labels |= by
    assert labels == {"run", "rank", "state", "ip", "GpuIndex"}


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in some(load_dashboard()["panels"]):
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["isDefault"]
    providers = yaml.safe_load((FOLDER / "provisioning/dashboards/dashboards.yml").read_text())["providers"]
    (path,) = (each["options"]["path"] for each in providers if each["name"] == "Raystride")
    assert (FOLDER / path.removeprefix("$RAYSTRIDE_MONITORING/") / "raystride.json").exists()


def test_prometheus_reads_the_service_discovery_file_of_rays_head() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    files = [name for each in job["file_sd_configs"] for name in each["files"]]
    assert f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}" in files


HEALTHY: dict[str, Callable[[int], float]] = {
    'ray_raystride_step{run="a",rank="0"}': lambda minute: 10.0 * minute,
    'ray_raystride_save_wait_seconds{run="a",rank="0"}': lambda minute: 0.0,
    'ray_raystride_data_wait_share{run="a",rank="1"}': lambda minute: 0.01,
    'ray_node_disk_utilization_percentage{ip="10.0.0.1"}': lambda minute: 40.0,
    'ray_raystride_checkpoint_age_seconds{run="a"}': lambda minute: 60.0 * (minute % 5),
    'ray_raystride_checkpoint_interval_seconds{run="a"}': lambda minute: 300.0,
    'ray_raystride_checkpoint_interval_seconds{run="b"}': lambda minute: 1.0,
    'ray_raystride_failed_saves{run="a"}': lambda minute: 2.0,
    'ray_raystride_restarts{run="a"}': lambda minute: min(minute // 10, 2),
    'ray_raystride_waiting_seconds{run="a"}': lambda minute: 0.0,
    'ray_raystride_mlflow_backlog_entries{run="a"}': lambda minute: 200.0 if minute % 10 == 0 else 3.0,
    'ray_raystride_storage_free_bytes{run="a"}': lambda minute: 2.0**40,
}
"""Series of a run and a node that are well, by minute."""
EXPRESSION = re.compile(
    r"(?:changes\((?P<counted>\w+)\[(?P<minutes>\d+)m\]\)|(?P<name>\w+)) "
    r"(?P<sign>==|>|<) (?P<bound>[\d.]+)(?: \* (?P<other>\w+))?"
)
"""The part of Prometheus' language that the rules are written in."""


def _scrape(series: dict[str, Callable[[int], float]], minute: int) -> dict[str, float]:
    """Reads what a node answers at a minute, in Prometheus' text format: values by metric and labels."""
    text = "".join(f"# TYPE {name.partition('{')[0]} gauge\n{name} {value(minute)}\n" for name, value in series.items())
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in samples}


def _holds(rule: dict[str, Any], scrapes: list[dict[str, float]]) -> bool:
    """Whether a rule's expression gives a series at the last of these scrapes, one a minute."""
    found = EXPRESSION.fullmatch(rule["expr"])
    assert found, rule["expr"]
    compare = {"==": operator.eq, ">": operator.gt, "<": operator.lt}[found["sign"]]
    for name in scrapes[-1]:
        if name.partition("[")[0] == (found["counted"] or found["name"]):
            labels = name.partition("[")[2]
            other = scrapes[-1].get(f"{found['other']}[{labels}") if found["other"] else 1.0
            if other is None:  # a series without a partner of the same labels gives nothing
                continue
            bound = float(found["bound"]) * other
            window = [scrape[name] for scrape in scrapes[-int(found["minutes"] or 1) - 1 :] if name in scrape]
            changes = sum(before != after for before, after in pairwise(window))
            if compare(changes if found["counted"] else window[-1], bound):
                return True
    return False


def _firing(series: dict[str, Callable[[int], float]], minutes: int) -> set[str]:
    """The alerts that fire after some minutes of scrapes: those whose expression has held for their `for`."""
    scrapes = [_scrape(series, minute) for minute in range(minutes + 1)]
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return {
        rule["alert"]
        for rule in some(group["rules"])
        if (held := int(rule.get("for", "0m").removesuffix("m"))) < len(scrapes)
        and all(_holds(rule, scrapes[: len(scrapes) - back]) for back in range(held + 1))
    }


CASES: list[tuple[dict[str, Callable[[int], float]], set[str]]] = [
    ({}, set()),
    ({"ray_raystride_step": lambda minute: 10.0 * min(minute, 9)}, {"RaystrideNoStep"}),
    ({"ray_raystride_step": lambda minute: 10.0 * min(minute, 11)}, set()),  # nine minutes ago
    ({"ray_raystride_save_wait_seconds": lambda minute: 61.0}, {"RaystrideWaitsForStorage"}),
    ({"ray_raystride_data_wait_share": lambda minute: 0.3}, {"RaystrideWaitsForData"}),
    ({"ray_raystride_data_wait_share": lambda minute: 0.3 if minute > 15 else 0.0}, set()),
    ({"ray_node_disk_utilization_percentage": lambda minute: 95.0}, {"RayNodeDiskFull"}),
    ({"ray_raystride_checkpoint_age_seconds": lambda minute: 90.0 * minute}, {"RaystrideCheckpointOld"}),
    ({"ray_raystride_checkpoint_age_seconds": lambda minute: 90.0 * minute if minute < 19 else 0.0}, set()),
    ({"ray_raystride_failed_saves": lambda minute: 2.0 + (minute > 15)}, {"RaystrideSaveRefused"}),
    ({"ray_raystride_restarts": lambda minute: minute // 5}, {"RaystrideRestarts"}),
    ({"ray_raystride_waiting_seconds": lambda minute: 3000.0 + 60.0 * minute}, {"RaystrideWaitsForRoom"}),
    ({"ray_raystride_mlflow_backlog_entries": lambda minute: 101.0}, {"RaystrideMlflowBehind"}),
    ({"ray_raystride_storage_free_bytes": lambda minute: 2.0**33}, {"RaystrideStorageFull"}),
]
"""Series that are not as those of a run that is well, and the alerts that fire after twenty minutes."""


@pytest.mark.parametrize(("changes", "alerts"), CASES)
def test_an_alert_fires_on_what_it_is_for_and_on_nothing_else(
    changes: dict[str, Callable[[int], float]], alerts: set[str]
) -> None:
    series = {name: changes.get(name.partition("{")[0], value) for name, value in HEALTHY.items()}
    assert _firing(series, 20) == alerts


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool, of Debian's package prometheus, is not here")
def test_promtool_finds_the_same_alerts(tmp_path: Path) -> None:
    def test_of(changes: dict[str, Callable[[int], float]], alerts: set[str]) -> dict[str, Any]:
        series = {name: changes.get(name.partition("{")[0], value) for name, value in HEALTHY.items()}
        firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts]
        expression = 'count by (alertname) (ALERTS{alertstate="firing"})'
        return {
            "interval": "1m",
            "input_series": [
                {"series": name, "values": " ".join(f"{value(minute):g}" for minute in range(21))}
                for name, value in series.items()
            ],
            "promql_expr_test": [{"expr": expression, "eval_time": "20m", "exp_samples": firing}],
        }

    file = tmp_path / "tests.yml"
    rules = [str(FOLDER / "alerts.yml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "tests": [test_of(*case) for case in CASES]}))
    found = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_run_that_has_just_begun_fires_nothing() -> None:
    assert not _firing({'ray_raystride_step{run="a"}': lambda minute: 10.0 * (minute // 3)}, 4)


def test_alerts_ask_for_exported_metrics_and_the_page_has_them() -> None:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    page = (FOLDER.parents[1] / "docs" / "operating.md").read_text()
    assert yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]
    for rule in some(group["rules"]):
        assert f"`{rule['expr']}`" in page
        assert set(re.findall(r"ray_\w+", rule["expr"])) <= OURS | {f"ray_{name}" for name in METRICS_GAUGES}
