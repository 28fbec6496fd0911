"""The files of `deploy/monitoring/` name metrics, labels, and files that there are."""

import re

import yaml

from raystride.pipelines.observers.ray_metrics import GAUGES, STEP
from tests.deploy.monitoring import PLACE, asked, dashboard
from tests.some import some

OURS = {f"ray_{shown.name}" for shown in (*GAUGES.values(), STEP)}


def test_the_dashboard_asks_for_all_of_ours_and_nothing_that_nobody_exports() -> None:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    named = set().union(*asked().values())
    assert named >= OURS
    assert named - OURS <= {f"ray_{name}" for name in METRICS_GAUGES}


def test_what_the_dashboard_tells_apart_is_a_tag_of_ours_or_of_the_nodes() -> None:
    labels = set()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            by = {name.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in group.split(",")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= by
            labels |= by
    assert labels == {"run", "rank", "ip", "GpuIndex"}


def test_panels_lie_beside_each_other() -> None:
    taken = set()
    for panel in some(dashboard()["panels"]):
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    (source,) = yaml.safe_load((PLACE / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["isDefault"]
    providers = yaml.safe_load((PLACE / "provisioning/dashboards/dashboards.yml").read_text())["providers"]
    (path,) = (each["options"]["path"] for each in providers if each["name"] == "Raystride")
    assert (PLACE / path.removeprefix("$RAYSTRIDE_MONITORING/") / "raystride.json").exists()


def test_prometheus_reads_the_list_that_rays_head_keeps() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (job,) = yaml.safe_load((PLACE / "prometheus.yml").read_text())["scrape_configs"]
    files = [name for each in job["file_sd_configs"] for name in each["files"]]
    assert f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}" in files
