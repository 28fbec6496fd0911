"""What the server has loaded from which the tests' processes are forked: all that takes seconds to import.

Of a tiny job's processor time more than half was imports: of PyTorch, and at its end of what draws its curve and report.

CONTEXT.set_forkserver_preload(["tests.warm"])            # tests.fork_server
"""

import gc
import importlib
import os

from tests.signals import restore_default_signals

gc.disable()  # nothing of an import is garbage
restore_default_signals()  # the processes that are forked get the handlers that the server has now

# Ray reads some of its variables when it is imported; those of a cluster of the tests' are none of a job's.
for variable in [name for name in os.environ if name.startswith("RAY_")]:
    del os.environ[variable]

from raystride.pipelines.train.strategies.deepspeed import import_deepspeed  # noqa: E402

# The compiler's own pool of processes would not survive the fork.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import_deepspeed("cpu")
for name in (
    "raystride.pipelines.train.strategies.mesh.mesh_strategy",
    "raystride.pipelines.train.worker.run",
    "raystride.pipelines.train.checkpoint.writer",
    "raystride.model.transformer",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "jsonargparse.typing",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "mpl_toolkits.mplot3d",  # which a figure with axes looks for
    "pandas",
    "pyarrow.dataset",
    "ray.train",
    "raystride.pipelines.launch.train_job",
    "raystride.pipelines.launch.inline",
    "raystride.pipelines.observability.report.page",
    "raystride.pipelines.observability.report.curve",
    "rich.progress",
):
    importlib.import_module(name)

# Each full collection of a forked process took 0.5 s over what was loaded here, and copied all of its pages.
gc.freeze()
gc.enable()
