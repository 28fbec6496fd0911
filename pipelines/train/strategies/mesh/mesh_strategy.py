"""Strategy over a mesh of workers: tensor, pipeline, context and expert parallelism, alone or combined, under ddp or fsdp.

A group of workers computes a slot and together holds the full model (`device_mesh`). Parameters are cut before any value is
drawn or read, so no worker ever holds all of them (`model.cut`). The gradient of a parameter is a sum over the slots of all
groups, and over the partial gradients within a group:

    context    every parameter: each worker has seen some tokens
    expert     every parameter but those of experts: each worker has seen some samples
    tensor     replicated parameters that see some tokens or heads: norms, biases behind a sharded product
    pipeline   an embedding tied to the head, on the first and on the last stage

Under `train.exact` slots are added along the reduction tree first and then the workers of a group, in a fixed order: the
same bits on any number of groups of the same mesh.

    strategy = MeshStrategy(config.scaling, config.train, device, rank=3, world=8)
    model = strategy.build_network(task.build_model)          # this worker's part
    model, optimizer = strategy.prepare_model(model, build_optimizer)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

from raystride.model.cut import Cut, cut_before_init, cut_parameter, full_shape, get_cut
from raystride.model.shape import is_tied
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ScalingConfig, TrainConfig
from raystride.pipelines.data.feed.plan import worker_slots
from raystride.pipelines.train.strategies import LOSS, SUMMED, TARGETS
from raystride.pipelines.train.strategies.exact import ExactBuckets
from raystride.pipelines.train.strategies.fsdp import FullySharded
from raystride.pipelines.train.strategies.mesh.context import ContextSharder
from raystride.pipelines.train.strategies.mesh.device_mesh import NAMES, build_mesh
from raystride.pipelines.train.strategies.mesh.expert import forward_local_rows, hold_experts
from raystride.pipelines.train.strategies.mesh.pipeline import DecoderStage, Pipeline
from raystride.pipelines.train.strategies.mesh.pipeline_plan import assign_stages, split_into_stages
from raystride.pipelines.train.strategies.mesh.tensor import TokenShards, parallelize
from raystride.pipelines.train.strategies.parameter_layout import ParameterLayout
from raystride.pipelines.train.strategies.reduction import Buckets
from raystride.pipelines.train.strategies.strategy import Forward, LocalStrategy, MicroBatchLike, Optimizer


class MeshStrategy(LocalStrategy):
    """Computes each slot by a group of workers; `rank` and `world` count groups. All processes of the default group take
    part."""

    is_collective = True

    def __init__(self, scaling: ScalingConfig, train: TrainConfig, device: torch.device, rank: int, world: int) -> None:
        """Raises ValueError if `world` workers form no mesh of these settings."""
        self.device, self._scaling, self._train = device, scaling, train
        self.mesh = build_mesh(scaling, world)
        self.coordinates = self.mesh.coordinates(rank)
        self.rank, self.world = self.mesh.group(self.coordinates), self.mesh.groups
        self.sharded = self.needs_equal_micro_batches = scaling.strategy == "fsdp"
        self.is_slot_per_micro_batch = self.mesh.pipeline > 1
        self._stage_workers = assign_stages(scaling.stages, scaling.pipeline, scaling.schedule)
        self._stages = [number for number, worker in enumerate(self._stage_workers) if worker == self.coordinates.pipeline]
        self.reports_loss = self.coordinates.tensor == 0 and self._stage_workers[-1] == self.coordinates.pipeline
        self.is_group_leader = not any((self.coordinates.pipeline, *self.coordinates.numbers[3:]))
        self._device_mesh = init_device_mesh(device.type, self.mesh.sizes, mesh_dim_names=NAMES)
        # Sums over groups and over tokens are one all-reduce, unless their order is fixed.
        self._reduced_dimensions = ("replicas", "shards") if train.exact else ("replicas", "shards", "context")
        self._data_group = self._new_group(*self._reduced_dimensions)
        self._rest_group = self._new_group(*(name for name in NAMES if name not in self._reduced_dimensions))
        self._shard_group = self._new_group("shards", "expert", "tensor")
        self._shards: TokenShards | None = None
        self._pipeline: Pipeline | None = None

    def _new_group(self, *dimensions: str) -> dist.ProcessGroup:
        """Returns this worker's process group along these dimensions; all workers call it together."""
        group, _ = dist.new_subgroups_by_enumeration(list(self.mesh.groups_along(*dimensions)))
        return group  # type: ignore[no-any-return]

    def build_network(self, make_model: Callable[[], nn.Module]) -> nn.Module:
        """Builds this worker's part of a fresh network. Modules of other stages are in it by name, and empty, until
        `prepare_model`.

        Raises ValueError for a network that cannot be distributed so.
        """
        with cut_before_init(self._cut_model):
            model = make_model()
        named = dict(model.named_parameters())
        shapes = {name: tuple(full_shape(parameter)) for name, parameter in named.items()}
        cuts = {name: cut for name, parameter in named.items() if (cut := get_cut(parameter)) is not None}
        self._shared_names = {name for name, parameter in named.items() if hasattr(parameter, "summed_over_tensor")}
        self.layout = ParameterLayout(shapes, [name for name, _ in model.named_modules()], cuts)
        model.layout = self.layout  # type: ignore[assignment]
        return model

    def _cut_model(self, model: nn.Module) -> None:
        if self.mesh.tensor > 1:
            self._shards = parallelize(model, self._device_mesh["tensor"])
        if self.mesh.expert > 1:
            hold_experts(model, self._device_mesh.get_group("expert"))
        for _, module in self._absent_modules(model):
            for parameter_name, parameter in list(module.named_parameters(recurse=False)):
                cut_parameter(module, parameter_name, Cut(tuple(full_shape(parameter)), 0, ()))

    def _stage_ranges(self, model: nn.Module) -> list[range]:
        """Returns the blocks of each stage. Raises ValueError for a network without stages."""
        if not isinstance(model, Decoder):
            raise ValueError(f"a {type(model).__name__} has no stages: set scaling.pipeline and scaling.context to 1")
        return split_into_stages(model.shape, model.vocabulary_size, len(self._stage_workers))

    def _absent_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of other workers' stages."""
        if self.mesh.pipeline == 1:
            return
        ranges = self._stage_ranges(model)
        assert isinstance(model, Decoder)
        blocks = {number for stage in self._stages for number in ranges[stage]}
        first, last = 0 in self._stages, len(self._stage_workers) - 1 in self._stages
        outside = {"embedding": first or (last and model.head is None), "positions": first, "norm": last, "head": last}
        for name, module in model.named_modules():
            parts = name.split(".")
            is_local = int(parts[1]) in blocks if parts[0] == "blocks" and len(parts) > 1 else outside.get(parts[0], True)
            if not is_local:
                yield name, module

    def prepare_model(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Moves this worker's part to its device, installs its communication and broadcasts the first group's values."""
        for name, _ in reversed(list(self._absent_modules(model))):
            parent, _, child = name.rpartition(".")
            if name.count(".") < 2:
                setattr(model.get_submodule(parent), child, nn.Identity())
        model = model.to(self.device)
        self._broadcast_parameters(model)
        self._assign_parameters(model)
        stages = self._install_parallel_forward(model)
        if self.sharded:
            model = self._shard_modules(model, stages)
            self._stage_buckets: list[Buckets] = []
        else:
            module_parameters = [list(module.parameters()) for module in self._modules_with_gradients(model, stages)]
            counts = Counter(id(parameter) for part in module_parameters for parameter in part)
            self._stage_buckets = [
                self._make_buckets(parameter for parameter in part if counts[id(parameter)] == 1)
                for part in module_parameters
            ]
            # Parameters shared by two local stages are complete when both are done; `reduce_gradients` sends them.
            shared = [parameter for parameter in module_parameters[0] if counts[id(parameter)] > 1]
            self._shared_buckets = [self._make_buckets(shared)] if shared else []
        self._parameter_order = {name: number for number, name in enumerate(self.layout.shapes)}
        self._named_parameters = [
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        return model, make_optimizer(model)

    def _assign_parameters(self, model: nn.Module) -> None:
        """Determines the parameters that this worker reports, of those that several workers hold."""
        named = {name for name, _ in model.named_parameters()}
        first, last = self._stage_workers[0], self._stage_workers[-1]
        tied = isinstance(model, Decoder) and is_tied(model.shape)
        ends = (first, last) if tied and first != last else ()
        self._tied_ranks = [self._rank_at_pipeline(worker) for worker in ends] if self.coordinates.pipeline in ends else []
        """The ranks that hold the tied embedding, if this is one of them."""
        self._is_last_of_tied = bool(self._tied_ranks) and self.coordinates.pipeline == last
        only_here = {name for name in named if name in self.layout.cuts and name not in self._shared_names}
        self._counted_names = named if self.coordinates.tensor == self.coordinates.expert == 0 else only_here
        """Parameters that this worker counts for the norm; of several workers of a group with the same part, one does."""
        self._counted_names -= {"embedding.weight"} if self._is_last_of_tied else set()
        own = self.coordinates.replica == self.coordinates.shard == self.coordinates.context == 0
        self.layout.owned = self._counted_names if own else set()

    def _modules_with_gradients(self, model: nn.Module, stages: list[DecoderStage]) -> Sequence[nn.Module]:
        """Returns the modules with their own gradient buckets or shards: the local stages, or the full model."""
        return stages or [model]

    def _rank_at_pipeline(self, pipeline: int) -> int:
        return self.mesh.rank(replace(self.coordinates, pipeline=pipeline))

    def _broadcast_parameters(self, model: nn.Module) -> None:
        """Broadcasts parameters to replicas: different processors may draw different last bits."""
        alike = self._new_group("replicas", "shards", "context")
        for name, parameter in model.named_parameters():
            for dimension in ("tensor", "expert"):
                if name not in self.layout.cuts and getattr(self.mesh, dimension) > 1:
                    group = self._device_mesh.get_group(dimension)
                    dist.broadcast(parameter.detach(), dist.get_global_rank(group, 0), group=group)
            dist.broadcast(parameter.detach(), dist.get_global_rank(alike, 0), group=alike)

    def _make_buckets(self, parameters: Iterable[nn.Parameter]) -> Buckets:
        bucket_bytes, extra = int(self._scaling.bucket_mib * 2**20), len(SUMMED)
        if not self._train.exact:
            return Buckets(parameters, bucket_bytes=bucket_bytes, extra=extra, group=self._data_group)
        slot_ranges = [worker_slots(self._train.slots, worker, self.world) for worker in range(self.world)]
        workers = dist.get_process_group_ranks(self._data_group)
        return ExactBuckets(
            parameters, bucket_bytes=bucket_bytes, extra=extra, slot_ranges=slot_ranges, rank=self.rank, workers=workers
        )

    def _install_parallel_forward(self, model: nn.Module) -> list[DecoderStage]:
        """Replaces the model's forward with the group's parallel one; returns the local pipeline stages, if any."""
        if self.mesh.expert > 1:
            self._install_expert_forward(model)
        if self.mesh.pipeline == self.mesh.context == 1:
            return []
        ranges = self._stage_ranges(model)
        assert isinstance(model, Decoder)
        context = self._device_mesh.get_group("context") if self.mesh.context > 1 else None
        sharder = ContextSharder(context, self._scaling.context_exchange)
        sharder.install_attention(model)
        if self.mesh.pipeline == 1:
            model.forward = partial(_forward_local_tokens, model, sharder)  # type: ignore[method-assign]
            return []
        last = len(self._stage_workers) - 1
        stages = {stage: DecoderStage(model, ranges[stage], first=stage == 0, last=stage == last) for stage in self._stages}
        self._pipeline = Pipeline(
            stages,
            self._stage_workers,
            self._device_mesh.get_group("pipeline"),
            self._scaling.schedule,
            sharder=sharder,
            shards=self._shards,
            stream=(model.shape.hidden_size, torch.bfloat16 if self._train.precision == "pure_bf16" else torch.float32),
            device=self.device,
            accumulate=self._accumulate_gradients,
        )
        model.forward, model.hidden = self._pipeline.forward, self._pipeline.hidden  # type: ignore[method-assign, assignment]
        model.logits = partial(self._pipeline.logits, model.logits, model.vocabulary_size)  # type: ignore[method-assign]
        return list(stages.values())

    def _install_expert_forward(self, model: nn.Module) -> None:
        """Makes a decoder's forward take this worker's rows, and count the loads of a slot over its group."""
        assert isinstance(model, Decoder)
        assert model.routing is not None
        group = self._device_mesh.get_group("expert")
        model.routing.sum_over_group = partial(dist.all_reduce, group=group)
        model.forward = partial(forward_local_rows, model, group)  # type: ignore[method-assign]

    def _shard_modules(self, model: nn.Module, stages: list[DecoderStage]) -> nn.Module:
        names = ("replicas", "shards") if self.mesh.replicas > 1 else ("shards",)
        self._fsdp = FullySharded(
            self.device,
            self.rank,
            self.world,
            reshard=self._scaling.reshard and not stages,
            offload=self._scaling.offload,
            compute_dtype=torch.bfloat16 if self._train.precision == "pure_bf16" else torch.float32,
            mesh=self._device_mesh[names],
        )
        for module in self._modules_with_gradients(model, stages):
            self._fsdp.prepare_model(module, lambda _: None)
        for stage in stages:
            register_fsdp_forward_method(stage, "forward_blocks")
        return model

    def zero_gradients(self) -> None:
        """Clears the gradients of the previous step."""
        for buckets in self._all_buckets():
            buckets.begin_step()
        if self.sharded:
            for _, parameter in self._named_parameters:
                parameter.grad = None

    def _all_buckets(self) -> list[Buckets]:
        return [] if self.sharded else [*self._shared_buckets, *self._stage_buckets]

    def run_micro_batches(self, model: nn.Module, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        """Runs forward and backward of a step's micro-batches, in the order of the pipeline's schedule if there is one."""
        if self._pipeline is None:
            super().run_micro_batches(model, batches, forward)
            return
        self._measured = forward.measured
        self._pipeline.run_micro_batches(batches, forward)

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch to those of the step."""
        self._clear_duplicate_loss(measured)
        if self.sharded:
            self._fsdp.set_last_micro_batch(last=last)
            loss.backward()
            return
        self._stage_buckets[0].begin_micro_batch(slot, measured, last=last)
        loss.backward()
        self._stage_buckets[0].end_micro_batch(last=last)

    @contextmanager
    def _accumulate_gradients(self, stage: int, number: int, last: bool) -> Iterator[None]:
        assert self._pipeline is not None
        if self.sharded:  # the schedule reduce-scatters a stage's gradients after all its backwards
            self._measured += self._pipeline.measured.pop(number, 0.0)
            yield
            return
        buckets = self._stage_buckets[self._stages.index(stage)]
        stage_measured = torch.zeros_like(self._measured)
        if stage == self._stages[-1]:
            self._measured += self._pipeline.measured.pop(number, 0.0)
            self._clear_duplicate_loss(self._measured)
            stage_measured = self._measured
        slot = self._pipeline.slot(number)
        buckets.begin_micro_batch(slot, stage_measured, last=last)
        yield
        buckets.end_micro_batch(last=last)

    def _clear_duplicate_loss(self, measured: torch.Tensor) -> None:
        """Zeroes a loss that another worker of the group has also computed and reports."""
        if not self.reports_loss:
            measured[LOSS] = measured[TARGETS] = 0.0

    @torch.no_grad()
    def reduce_gradients(self, measured: torch.Tensor) -> torch.Tensor:
        """Finishes summing gradients over groups and within this group; returns the sum of all `measured`."""
        self._clear_duplicate_loss(measured)
        if self.sharded:
            dist.all_reduce(measured)
        else:
            # A step's measured values travel with the last stage's gradients; other buckets carry zeros.
            *other_buckets, last_buckets = self._all_buckets()
            for buckets in other_buckets:
                buckets.finish_reduction(torch.zeros_like(measured))
            measured = last_buckets.finish_reduction(measured).clone()
            dist.all_reduce(measured, group=self._rest_group)
        self._reduce_over_context()
        self._reduce_over_experts()
        self._reduce_shared_gradients()
        self._reduce_tied_embedding()
        return measured

    def _reduce_over_context(self) -> None:
        """Sums gradients over the tokens of a sample, unless the sum over groups has included them."""
        if self.mesh.context > 1 and (self.sharded or "context" not in self._reduced_dimensions):
            self._all_reduce_flat(self.local_gradients(), "context")

    def _reduce_over_experts(self) -> None:
        """Sums gradients over the samples of a slot; those of experts have met at their workers."""
        if self.mesh.expert > 1:
            shared = [parameter for name, parameter in self._named_parameters if name not in self.layout.cuts]
            self._all_reduce_flat([_local_gradient(parameter) for parameter in shared], "expert")

    def _all_reduce_flat(self, tensors: Sequence[torch.Tensor], dimension: str) -> None:
        """Sums tensors over a dimension of the mesh in place, in batches of at most a bucket's size."""
        group, max_bytes = self._device_mesh.get_group(dimension), int(self._scaling.bucket_mib * 2**20)
        first = 0
        while first < len(tensors):
            last, size = first + 1, tensors[first].nbytes
            while last < len(tensors) and size + tensors[last].nbytes <= max_bytes:
                size, last = size + tensors[last].nbytes, last + 1
            chunk, first = tensors[first:last], last
            if len(chunk) == 1:
                dist.all_reduce(chunk[0], group=group)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
            dist.all_reduce(flat, group=group)
            for tensor, summed in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def _reduce_shared_gradients(self) -> None:
        """Sums the gradients of parameters that are replicated in a tensor group."""
        shared = (
            [parameter for name, parameter in self._named_parameters if name in self._shared_names]
            if self.mesh.tensor > 1
            else []
        )
        for parameter in shared:
            if parameter.grad is None:  # only another worker adds this bias
                parameter.grad = torch.zeros_like(parameter)
        self._all_reduce_flat([_local_gradient(parameter) for parameter in shared], "tensor")

    def _reduce_tied_embedding(self) -> None:
        """Sums the first and the last stage's gradients of an embedding that is tied to the head."""
        if not self._tied_ranks:
            return
        own = _local_gradient(dict(self._named_parameters)["embedding.weight"])
        other = torch.empty_like(own)
        peer = self._tied_ranks[0] if self._is_last_of_tied else self._tied_ranks[1]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]):
            work.wait()
        # In the same order on both: they must stay bitwise equal.
        own.copy_(other + own if self._is_last_of_tied else own + other)

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns the tensors that hold this worker's gradients, for scaling in place."""
        if self.sharded:
            return [_local_gradient(parameter) for _, parameter in self._named_parameters if parameter.grad is not None]
        return [gradient for buckets in self._all_buckets() for gradient in buckets.local_gradients()]

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Returns the Euclidean norm of the full gradient, a scalar, equal on every worker; call after `reduce_gradients`.

        It is the norm of the parameters' norms, in the order of the full network: bitwise that of one worker if every
        parameter is in one piece.
        """
        norms = torch.zeros(len(self._parameter_order), device=self.device)
        named = [
            (name, parameter)
            for name, parameter in self._named_parameters
            if parameter.grad is not None and name in self._counted_names
        ]
        if named:
            numbers = torch.tensor([self._parameter_order[name] for name, _ in named], device=self.device)
            norms[numbers] = torch.stack(torch._foreach_norm([_local_gradient(parameter) for _, parameter in named])).to(
                self.device
            )
        if self.mesh.shards * self.mesh.expert * self.mesh.tensor > 1:
            squares = norms**2
            dist.all_reduce(squares, group=self._shard_group)
            norms = squares.sqrt()
        if self.mesh.pipeline > 1:
            dist.all_reduce(norms, group=self._device_mesh.get_group("pipeline"))
        return torch.linalg.vector_norm(norms)  # type: ignore[no-any-return]

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` over all workers in place; all of them must call it."""
        dist.all_reduce(values)
        return values

    def reset_after_eval(self) -> None:
        """Restores the model's state between steps, after forwards without a backward."""
        if self.sharded:
            self._fsdp.reset_after_eval()


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Returns this worker's gradient of a parameter that must have one."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _forward_local_tokens(
    model: Decoder, sharder: ContextSharder, *inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a decoder's forward over this worker's tokens of a micro-batch."""
    local = sharder(inputs[:-1], inputs[-1])
    return model.loss(model.hidden(local.ids, local.positions, documents=local.documents), local.targets)
