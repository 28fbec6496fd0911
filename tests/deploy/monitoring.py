"""What the dashboard of `deploy/monitoring/` asks Prometheus for.

asked()["Loss"]                                   # {"ray_raystride_loss", "ray_raystride_val_loss"}
"""

import json
import re
from pathlib import Path
from typing import Any

PLACE = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"


def dashboard() -> Any:
    """The dashboard as Grafana reads it."""
    return json.loads((PLACE / "dashboards" / "raystride.json").read_text())


def asked() -> dict[str, set[str]]:
    """The metrics that each panel's queries name."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return {panel["title"]: {name for target in panel["targets"] for name in _names(target["expr"])} for panel in panels}


def _names(query: str) -> list[str]:
    return re.findall(r"\bray_\w+", query)
