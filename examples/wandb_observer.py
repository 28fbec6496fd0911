"""Logs a run to Weights & Biases, beside MLflow. A run that is started again goes on in its page there.

    pip install wandb
    raystride train --config lm_python --plugins '["examples/wandb_observer.py"]' --run mine

`WANDB_PROJECT`, `WANDB_API_KEY` and `WANDB_MODE` are heeded as always; the workers need them in their environment.
"""

import os
from typing import TYPE_CHECKING, Any

import raystride

if TYPE_CHECKING:
    from raystride.pipelines.observability.observers.observer import RunFacts
    from raystride.pipelines.observability.record.summary import RunSummary


@raystride.register_observer
class WandbObserver(raystride.Observer):
    """Sends the figures of all workers, which each of them has, from the first one."""

    _page: Any = None

    def on_start(self, run: "RunFacts") -> None:
        if run.rank == 0:
            import wandb

            project = os.environ.get("WANDB_PROJECT", "raystride")
            facts = {"workers": run.world, "device": run.device, "parameters": run.parameters}
            self._page = wandb.init(project=project, id=run.run, name=run.run, resume="allow", config=facts)

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._page is not None:
            self._page.log(dict(measured), step=step)

    def on_end(self, summary: "RunSummary") -> None:
        if self._page is not None:
            self._page.summary.update({name: value for name, value in summary.items() if isinstance(value, int | float)})
            self._page.finish()
