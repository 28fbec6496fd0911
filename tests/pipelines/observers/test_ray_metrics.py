"""Ray's own gauges, set in a real Ray process."""

import subprocess
import sys

PROGRAM = """
import ray
from pipelines.observers.observer import RunFacts
from pipelines.observers.ray_metrics import RayMetrics

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
metrics = RayMetrics()
metrics.on_start(RunFacts(run="r", attempt="a1"))
metrics.on_log(3, {"train_loss": 2.5, "tokens_per_second": 100.0})
other = RayMetrics()
other.on_start(RunFacts(run="r", attempt="a1", rank=1))
assert other._step is None
print(sorted(gauge.info["name"] for gauge in [metrics._step, *metrics._gauges.values()]), metrics._step.info["default_tags"])
"""


def test_rank_zero_sets_gauges_with_the_runs_name() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = "['raystride_loss', 'raystride_step', 'raystride_tokens_per_second']"
    assert done.stdout.strip().endswith(f"{names} {{'run': 'r'}}")
