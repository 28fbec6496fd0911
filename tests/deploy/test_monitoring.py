"""The files of `deploy/monitoring/` name only existing metrics, labels and files."""

import re

import yaml

from raystride.pipelines.observability.observers.ray_metrics import GAUGES, SAVE_WAIT, STEP
from tests.deploy.monitoring import FOLDER, find_queried_metrics, load_dashboard
from tests.some import some

OURS = {f"ray_{shown.name}" for shown in (*GAUGES.values(), STEP, SAVE_WAIT)}


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
    assert labels == {"run", "rank", "ip", "GpuIndex"}


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
