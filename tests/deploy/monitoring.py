"""Reads the metrics that the Grafana dashboard of `deploy/monitoring/` queries from Prometheus.

find_queried_metrics()["Loss"]                    # {"ray_raystride_loss", "ray_raystride_val_loss"}
"""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"


def load_dashboard() -> Any:
    """Loads the dashboard's JSON."""
    return json.loads((FOLDER / "dashboards" / "raystride.json").read_text())


def find_queried_metrics() -> dict[str, set[str]]:
    """Returns the metrics that each panel queries, by the panel's title."""
    panels = [panel for panel in load_dashboard()["panels"] if panel["type"] != "row"]
    return {
        panel["title"]: {name for target in panel["targets"] for name in _find_metric_names(target["expr"])}
        for panel in panels
    }


def _find_metric_names(query: str) -> list[str]:
    return re.findall(r"\bray_\w+", query)
