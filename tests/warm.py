"""What the server has loaded from which the tests' processes are forked: all that takes seconds to import.

CONTEXT = get_context("forkserver"); CONTEXT.set_forkserver_preload(["tests.warm"])
"""

import importlib
import os

from raystride.pipelines.strategies.deepspeed import import_deepspeed

# The compiler's own pool of processes would not survive the fork.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import_deepspeed("cpu")
for name in (
    "raystride.pipelines.worker.worker",
    "raystride.pipelines.train.storage",
    "raystride.model.transformer",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "deepspeed.runtime.zero.muon.muon_optimizer",
):
    importlib.import_module(name)
