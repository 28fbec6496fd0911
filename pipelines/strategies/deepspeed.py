"""ZeRO by DeepSpeed (Rajbhandari et al., 2020): optimiser state, gradients and parameters are spread, by stage 1, 2 and 3.

DeepSpeed spreads, sums and gathers, and nothing else. The update is our own, over the flat fp32 partitions that DeepSpeed
makes; so are clipping and checkpoints, which are those of every strategy. Gradients are sums over the workers and
micro-batches, as everywhere here, not means. A step whose gradient is not finite DeepSpeed drops by itself.

    strategy = ZeRO(torch.device("cpu"), rank=0, world=4, stage=3)
    model, optimizer = strategy.prepare(model, build_optimizer)
"""

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from raystride.pipelines.strategies.partitions import Partitions, Rule
from raystride.pipelines.strategies.sharded import METHODS, Sharded
from raystride.pipelines.strategies.strategy import Optimizer


class ZeRO(Sharded):
    """A model in DeepSpeed's hands; even one process needs an initialised process group."""

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world: int,
        *,
        stage: int,
        bucket_bytes: int = 25 << 20,
        offload: bool = False,
        precision: str = "fp32",
    ) -> None:
        """`precision`: pure_bf16 and, on GPUs, bf16 are DeepSpeed's own; it takes the others as they come."""
        super().__init__(device, rank, world)
        self._config = _configuration(device, stage, bucket_bytes, offload, precision)

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """Gives every worker rank 0's parameters and keeps this worker's partitions of what the stage spreads."""
        deepspeed = import_deepspeed(self.device.type)
        _join_group(deepspeed, self.device, self.world)
        model = model.to(self.device)
        count = getattr(model, "flops_per_token", None)
        flops = count() if count else None
        rule = cast(Rule, make_optimizer(model))
        self._base = _Base(rule)
        entry = _Entry(model)
        self._engine = deepspeed.initialize(model=entry, optimizer=self._base, config=self._config)[0]
        _send_calls_through(model, entry, self._engine)
        if flops is not None:
            # It counts elements, of which parameters that are partitioned seem to have none.
            model.flops_per_token = lambda: flops  # type: ignore[assignment]
        self._partitions = Partitions(self._engine.optimizer, rule, self.rank, self.world, self.device, self._update)
        return model, cast(Optimizer, self._partitions)

    def begin(self) -> None:
        """Nothing to do: the update before has dropped the gradients."""

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds gradients; they are summed over the workers now (stages 2 and 3), or during the last micro-batch (1)."""
        self._engine.set_gradient_accumulation_boundary(last)
        if last:
            self._send_measured(measured)
        # DeepSpeed takes the mean over the workers.
        self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def gradients(self) -> list[torch.Tensor]:
        """This worker's partitions of the summed gradient, flat vectors."""
        return self._partitions.gradients()

    def norm(self) -> torch.Tensor:
        """Norm over all partitions; every worker gets the same."""
        return self._norm(self.world)

    def settle(self) -> None:
        """Nothing to do: DeepSpeed drops what it gathers as soon as it is used."""

    def _update(self, learning_rate: float, skip: torch.Tensor | None) -> None:
        self._base.learning_rate, self._base.skip = learning_rate, skip
        self._engine.step()


class _Base(torch.optim.Optimizer):
    """The update rule as DeepSpeed wants it: an optimiser, in whose groups it puts its flat partitions."""

    def __init__(self, rule: Rule) -> None:
        super().__init__([{"params": group, "decay": decay} for group, decay in rule.groups if group], {"lr": 0.0})
        self._rule = rule
        self.learning_rate, self.skip = 0.0, cast(torch.Tensor | None, None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates what lies in the groups at this moment: DeepSpeed calls this once for each partition."""
        self._rule.groups = [(group["params"], group["decay"]) for group in self.param_groups]
        self._rule.update(self.learning_rate, self.skip)


class _Entry(nn.Module):
    """What DeepSpeed takes for the model: one forward for all methods of the model, so that its hooks surround each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.method: Callable[..., Any] | None = None
        """The method that is being called; none outside of a call."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        assert self.method is not None
        return self.method(self.model, *arguments, **named)


def _send_calls_through(model: nn.Module, entry: _Entry, engine: Callable[..., Any]) -> None:
    """Makes calls of the model go through DeepSpeed's engine, while names, type and methods stay (FSDP2 does likewise)."""
    kind = type(model)

    def through(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
            if entry.method is not None:  # the model calls itself
                return plain(self, *arguments, **named)
            entry.method = plain
            try:
                return engine(*arguments, **named)
            finally:
                entry.method = None

        return call

    methods = {name: through(getattr(kind, name)) for name in METHODS if hasattr(kind, name)}
    model.__class__ = type(f"ZeRO{kind.__name__}", (kind,), {"__call__": through(kind.__call__), **methods})


def _configuration(device: torch.device, stage: int, bucket_bytes: int, offload: bool, precision: str) -> dict[str, Any]:
    """DeepSpeed's configuration, with which it neither divides, clips, logs nor builds anything."""
    elements = max(2, bucket_bytes // 8 * 2)  # fp32, and even, which DeepSpeed asks for
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,  # unused: it asks for a number
        # `backward` says by itself which micro-batch is the last.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**62,
        "zero_optimization": zero,
        # The update rule is ours, of which it knows nothing.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": precision == "pure_bf16"},
        # It turns off an autocast that it was not told of.
        "torch_autocast": {"enabled": precision == "bf16" and device.type == "cuda", "dtype": "bfloat16"},
    }


def import_deepspeed(device: str) -> Any:
    """DeepSpeed, silent, on `cpu` or `cuda`, and without the extensions that it would compile when it starts."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    # A compilation that was killed leaves a lock in the common folder, on which every later process would wait for ever.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/raystride-extensions-{os.getpid()}")
    absent = "mlflow" not in sys.modules
    if absent:
        sys.modules["mlflow"] = cast(Any, None)  # its autotuner imports it where it can, which takes seconds
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.bf16_optimizer as of_bf16

    if absent:
        del sys.modules["mlflow"]
    of_bf16.see_memory_usage = lambda *_, **__: None  # prints, whatever it is told
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)  # its calls, not ours
    # On CPUs it would compile an exchange of its own when it starts: not done after 110 s (0.19.8). Gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _join_group(deepspeed: Any, device: torch.device, world: int) -> None:
    """DeepSpeed takes the process group that there is."""
    if device.type == "cpu":
        os.environ.setdefault("LOCAL_SIZE", str(world))
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
