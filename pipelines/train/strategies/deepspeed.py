"""ZeRO by DeepSpeed (Rajbhandari et al., 2020): stages 1, 2 and 3 shard optimiser state, gradients and parameters.

DeepSpeed partitions, sums and gathers, and nothing else. The update is our own, over the flat fp32 partitions that DeepSpeed
creates; so are clipping and checkpoints, as for every strategy. Gradients are sums over workers and micro-batches, not
means, as in all strategies. DeepSpeed itself skips a step with a gradient that is not finite.

    strategy = ZeRO(torch.device("cpu"), rank=0, world=4, stage=3)
    model, optimizer = strategy.prepare_model(model, build_optimizer)
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

from raystride.pipelines.train.strategies.partitions import Partitions, UpdateRule
from raystride.pipelines.train.strategies.sharded import FORWARD_METHODS, Sharded
from raystride.pipelines.train.strategies.strategy import Group, Optimizer


class ZeRO(Sharded):
    """Strategy on a DeepSpeed engine; even one process needs an initialised process group."""

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
        """`precision`: DeepSpeed implements pure_bf16 and, on GPUs, bf16 itself; others need no setting of it."""
        super().__init__(device, rank, world)
        self._config = _deepspeed_config(device, stage, bucket_bytes, offload, precision)

    def prepare_model(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcasts rank 0's parameters and keeps this worker's partitions of the state that the stage shards."""
        deepspeed = import_deepspeed(self.device.type)
        _init_distributed(deepspeed, self.device, self.world)
        model = model.to(self.device)
        count = getattr(model, "flops_per_token", None)
        flops = count() if count else None
        rule = cast(UpdateRule, make_optimizer(model))
        self._base = _RuleOptimizer(rule)
        engine_module = _EngineModule(model)
        self._engine = deepspeed.initialize(model=engine_module, optimizer=self._base, config=self._config)[0]
        _route_calls_to_engine(model, engine_module, self._engine)
        if flops is not None:
            # It counts elements, and partitioned parameters appear to have none.
            model.flops_per_token = lambda: flops  # type: ignore[assignment]
        self._partitions = Partitions(self._engine.optimizer, rule, self.rank, self.world, self.device, self._step_engine)
        return model, cast(Optimizer, self._partitions)

    def zero_gradients(self) -> None:
        """Does nothing: the previous update has dropped the gradients."""

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds gradients; they are summed over the workers now (stages 2 and 3) or during the last micro-batch (1)."""
        self._engine.set_gradient_accumulation_boundary(last)
        if last:
            self._start_measured_sum(measured)
        # DeepSpeed computes the mean over the workers.
        self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns this worker's partitions of the summed gradient, flat vectors."""
        return self._partitions.local_gradients()

    def gradient_norm(self) -> torch.Tensor:
        """Returns the norm over all partitions, equal on every worker."""
        return self._sharded_norm(self.world)

    def _step_engine(self, learning_rate: float, skip: torch.Tensor | None) -> None:
        self._base.learning_rate, self._base.skip = learning_rate, skip
        self._engine.step()


class _RuleOptimizer(torch.optim.Optimizer):
    """The update rule as a torch optimiser; DeepSpeed puts its flat partitions into the groups."""

    def __init__(self, rule: UpdateRule) -> None:
        names = ("params", "decay", "lr_ratio")
        super().__init__([dict(zip(names, group, strict=True)) for group in rule.groups], {"lr": 0.0})
        self._rule = rule
        self.learning_rate, self.skip = 0.0, cast(torch.Tensor | None, None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the current tensors of the groups: DeepSpeed calls this once per partition."""
        self._rule.groups = [Group(group["params"], group["decay"], group["lr_ratio"]) for group in self.param_groups]
        self._rule.update(self.learning_rate, self.skip)


class _EngineModule(nn.Module):
    """DeepSpeed's model: one forward for all methods of the model, so that its hooks run around each of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.method: Callable[..., Any] | None = None
        """The method being called; None outside of a call."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        assert self.method is not None
        return self.method(self.model, *arguments, **named)


def _route_calls_to_engine(model: nn.Module, engine_module: _EngineModule, engine: Callable[..., Any]) -> None:
    """Routes calls of the model through DeepSpeed's engine; names, type and methods stay (as FSDP2 does)."""
    kind = type(model)

    def wrap_method(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_engine(self: nn.Module, *arguments: Any, **named: Any) -> Any:
            if engine_module.method is not None:  # a nested call
                return plain(self, *arguments, **named)
            engine_module.method = plain
            try:
                return engine(*arguments, **named)
            finally:
                engine_module.method = None

        return call_engine

    methods = {name: wrap_method(getattr(kind, name)) for name in FORWARD_METHODS if hasattr(kind, name)}
    model.__class__ = type(f"ZeRO{kind.__name__}", (kind,), {"__call__": wrap_method(kind.__call__), **methods})


def _deepspeed_config(device: torch.device, stage: int, bucket_bytes: int, offload: bool, precision: str) -> dict[str, Any]:
    """Returns DeepSpeed's configuration; it must not divide, clip, log or build anything itself."""
    elements = max(2, bucket_bytes // 8 * 2)  # fp32, and an even number, as DeepSpeed requires
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,  # unused, but required
        # `backward` itself marks the last micro-batch.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**62,
        "zero_optimization": zero,
        # The update rule is ours and unknown to DeepSpeed.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": precision == "pure_bf16"},
        # DeepSpeed turns off an autocast that is not configured here.
        "torch_autocast": {"enabled": precision == "bf16" and device.type == "cuda", "dtype": "bfloat16"},
    }


def import_deepspeed(device: str) -> Any:
    """Imports DeepSpeed for `cpu` or `cuda`, silently, and without extensions that it would compile at its start."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    # A killed compilation leaves a lock in the shared folder, and every later process would wait for it for ever.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/raystride-extensions-{os.getpid()}")
    mlflow_absent = "mlflow" not in sys.modules
    if mlflow_absent:
        sys.modules["mlflow"] = cast(Any, None)  # its autotuner would import it, which takes seconds
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.bf16_optimizer as bf16_optimizer

    if mlflow_absent:
        del sys.modules["mlflow"]
    bf16_optimizer.see_memory_usage = lambda *_, **__: None  # prints unconditionally
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)  # its calls, not ours
    # On CPUs it would compile its own communication at the start: unfinished after 110 s (0.19.8). Gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _init_distributed(deepspeed: Any, device: torch.device, world: int) -> None:
    """Lets DeepSpeed use the existing process group."""
    if device.type == "cpu":
        os.environ.setdefault("LOCAL_SIZE", str(world))
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
