"""A model over a mesh of workers: tensor, pipeline and context parallelism, each by itself or together, under ddp or fsdp.

A group of workers computes a slot and holds the whole model between them (`mesh`). What each holds of it is cut before a
value is drawn or read, so nobody ever has all (`model.cut`). The gradient of a parameter is a sum over the slots of all
groups, and over what the workers of a group have each computed of it:

    context    every parameter: each worker has seen some tokens
    tensor     parameters that all have whole and that see some tokens or heads: norms, biases behind a product in parts
    pipeline   an embedding that is the head as well, on the first and on the last stage

Under `train.exact` slots are added along the one tree, and only then the workers of a group, in one order: the same bits on
any number of groups of the same mesh.

    strategy = Meshed(config.scaling, config.train, device, rank=3, world=8)
    model = strategy.build(task.build_model)                  # this worker's part
    model, optimizer = strategy.prepare(model, build_optimizer)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

from raystride.model.cut import Cut, cut_before_drawn, cut_of, cut_parameter, shape_of_whole
from raystride.model.shape import is_tied
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Scaling, Train
from raystride.pipelines.feed.plan import share
from raystride.pipelines.strategies.exact import ExactBuckets
from raystride.pipelines.strategies.feeding import Feeding
from raystride.pipelines.strategies.fsdp import FullySharded
from raystride.pipelines.strategies.measured import LOSS, SUMMED, TARGETS
from raystride.pipelines.strategies.mesh import NAMES, Coordinates, mesh_of
from raystride.pipelines.strategies.pipeline import Pipeline
from raystride.pipelines.strategies.reduction import Buckets
from raystride.pipelines.strategies.spread import Spread
from raystride.pipelines.strategies.stage_plan import cut_stages, stage_workers
from raystride.pipelines.strategies.stages import DecoderStage
from raystride.pipelines.strategies.strategy import Forward, OneByOne, Optimizer, Slotted
from raystride.pipelines.strategies.tensor_parallel import TokenShards, parallelize


class Meshed(OneByOne):
    """A slot by a group of workers; `rank` and `world` are those of groups. All processes of the default group take part."""

    together = True

    def __init__(self, scaling: Scaling, train: Train, device: torch.device, rank: int, world: int) -> None:
        """Raises ValueError where so many workers are no mesh of these settings."""
        self.device, self._scaling, self._train = device, scaling, train
        self.mesh = mesh_of(scaling, world)
        self.place = self.mesh.place(rank)
        self.rank, self.world = self.mesh.group(self.place), self.mesh.groups
        self.sharded = self.equal_micro_batches = scaling.strategy == "fsdp"
        self.every_slot = self.mesh.pipeline > 1
        self._workers = stage_workers(scaling.stages, scaling.pipeline, scaling.schedule)
        self._stages = [number for number, worker in enumerate(self._workers) if worker == self.place.pipeline]
        self.counts = self.place.tensor == 0 and self._workers[-1] == self.place.pipeline
        self.leads = self.place.pipeline == self.place.context == self.place.tensor == 0
        self._devices = init_device_mesh(device.type, self.mesh.sizes, mesh_dim_names=NAMES)
        # Slots' sums over groups and tokens in one go, but where their order is fixed.
        self._summed_at_once = ("replicas", "shards") if train.exact else ("replicas", "shards", "context")
        self._data = self._group(*self._summed_at_once)
        self._rest = self._group(*(name for name in NAMES if name not in self._summed_at_once))
        self._pieces = self._group("shards", "tensor")
        self._shards: TokenShards | None = None
        self._pipeline: Pipeline | None = None

    def _group(self, *free: str) -> dist.ProcessGroup:
        """The workers that stand where this one does but along these dimensions; all workers call it together."""
        group, _ = dist.new_subgroups_by_enumeration(list(self.mesh.alike(*free)))
        return group  # type: ignore[no-any-return]

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """This worker's part of a fresh network. What other stages have is in it by name, and empty, until `prepare`.

        Raises ValueError for a network that cannot be spread so.
        """
        with cut_before_drawn(self._cut):
            model = make()
        named = dict(model.named_parameters())
        shapes = {name: tuple(shape_of_whole(each)) for name, each in named.items()}
        cuts = {name: cut for name, each in named.items() if (cut := cut_of(each)) is not None}
        self._shared = {name for name, each in named.items() if hasattr(each, "summed_over_tensor")}
        self.spread = Spread(shapes, [name for name, _ in model.named_modules()], cuts)
        model.spread = self.spread  # type: ignore[assignment]
        return model

    def _cut(self, model: nn.Module) -> None:
        if self.mesh.tensor > 1:
            self._shards = parallelize(model, self._devices["tensor"])
        for _, module in self._absent(model):
            for each, parameter in list(module.named_parameters(recurse=False)):
                cut_parameter(module, each, Cut(tuple(shape_of_whole(parameter)), 0, ()))

    def _ranges(self, model: nn.Module) -> list[range]:
        """The blocks of each stage. Raises ValueError for a network that has no stages."""
        if not isinstance(model, Decoder):
            raise ValueError(f"a {type(model).__name__} has no stages: set scaling.pipeline and scaling.context to 1")
        return cut_stages(model.shape, model.vocabulary_size, len(self._workers))

    def _absent(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules that stages of other workers have."""
        if self.mesh.pipeline == 1:
            return
        ranges = self._ranges(model)
        assert isinstance(model, Decoder)
        blocks = {number for stage in self._stages for number in ranges[stage]}
        first, last = 0 in self._stages, len(self._workers) - 1 in self._stages
        outside = {"embedding": first or (last and model.head is None), "positions": first, "norm": last, "head": last}
        for name, module in model.named_modules():
            parts = name.split(".")
            here = int(parts[1]) in blocks if parts[0] == "blocks" and len(parts) > 1 else outside.get(parts[0], True)
            if not here:
                yield name, module

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """Puts this worker's part on its device, where it exchanges what it must, with the values of the first group."""
        for name, _ in reversed(list(self._absent(model))):
            parent, _, child = name.rpartition(".")
            if name.count(".") < 2:
                setattr(model.get_submodule(parent), child, nn.Identity())
        model = model.to(self.device)
        self._give_first_groups_values(model)
        self._divide_up(model)
        stages = self._enter(model)
        if self.sharded:
            model = self._shard(model, stages)
            self._of_stage: list[Buckets] = []
        else:
            held = [list(each.parameters()) for each in self._parts(model, stages)]
            counts = Counter(id(each) for part in held for each in part)
            self._of_stage = [self._make_buckets(each for each in part if counts[id(each)] == 1) for part in held]
            # What two stages here share is complete when both are done; it is sent from `reduce`.
            shared = [each for each in held[0] if counts[id(each)] > 1]
            self._of_both = [self._make_buckets(shared)] if shared else []
        self._order = {name: number for number, name in enumerate(self.spread.shapes)}
        self._named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        return model, make_optimizer(model)

    def _divide_up(self, model: nn.Module) -> None:
        """Finds which parameters are for this worker to tell of, where several have the same part."""
        named = {name for name, _ in model.named_parameters()}
        first, last = self._workers[0], self._workers[-1]
        tied = isinstance(model, Decoder) and is_tied(model.shape)
        ends = (first, last) if tied and first != last else ()
        self._ends = [self._worker_at(worker) for worker in ends] if self.place.pipeline in ends else []
        """The workers that have the tied embedding, if this is one of them."""
        self._second = bool(self._ends) and self.place.pipeline == last
        alone = {name for name in named if name in self.spread.cuts and name not in self._shared}
        self._counted = named if self.place.tensor == 0 else alone
        """Of the workers of a group that have the same part of a parameter, one counts it for the norm."""
        self._counted -= {"embedding.weight"} if self._second else set()
        own = self.place.replica == self.place.shard == self.place.context == 0
        self.spread.gives = self._counted if own else set()

    def _parts(self, model: nn.Module, stages: list[DecoderStage]) -> Sequence[nn.Module]:
        """What has gradients, or shards, of its own: the stages here, or the whole model."""
        return stages or [model]

    def _worker_at(self, pipeline: int) -> int:
        place = self.place
        return self.mesh.rank(Coordinates(pipeline, place.replica, place.shard, place.context, place.tensor))

    def _give_first_groups_values(self, model: nn.Module) -> None:
        """Processors may draw other last bits."""
        alike = self._group("replicas", "shards", "context")
        for name, parameter in model.named_parameters():
            if name not in self.spread.cuts and self.mesh.tensor > 1:
                group = self._devices.get_group("tensor")
                dist.broadcast(parameter.detach(), dist.get_global_rank(group, 0), group=group)
            dist.broadcast(parameter.detach(), dist.get_global_rank(alike, 0), group=alike)

    def _make_buckets(self, parameters: Iterable[nn.Parameter]) -> Buckets:
        rules = {"bucket_bytes": int(self._scaling.bucket_mib * 2**20), "extra": len(SUMMED)}
        if not self._train.exact:
            return Buckets(parameters, group=self._data, **rules)
        shares = [share(self._train.slots, each, self.world) for each in range(self.world)]
        workers = dist.get_process_group_ranks(self._data)
        return ExactBuckets(parameters, shares=shares, rank=self.rank, workers=workers, **rules)

    def _enter(self, model: nn.Module) -> list[DecoderStage]:
        """Has the model take part in what its group computes together; the stages here, if there are any."""
        if self.mesh.pipeline == self.mesh.context == 1:
            return []
        ranges = self._ranges(model)
        assert isinstance(model, Decoder)
        context = self._devices.get_group("context") if self.mesh.context > 1 else None
        feeding = Feeding(context, self._scaling.context_exchange)
        feeding.enter(model)
        if self.mesh.pipeline == 1:
            model.forward = partial(_dealt, model, feeding)  # type: ignore[method-assign]
            return []
        last = len(self._workers) - 1
        stages = {each: DecoderStage(model, ranges[each], first=each == 0, last=each == last) for each in self._stages}
        self._pipeline = Pipeline(
            stages,
            self._workers,
            self._devices.get_group("pipeline"),
            self._scaling.schedule,
            feeding=feeding,
            shards=self._shards,
            stream=(model.shape.width, torch.bfloat16 if self._train.precision == "pure_bf16" else torch.float32),
            device=self.device,
            accumulating=self._accumulating,
        )
        model.forward, model.hidden = self._pipeline.forward, self._pipeline.hidden  # type: ignore[method-assign, assignment]
        model.logits = partial(self._pipeline.logits, model.logits, model.vocabulary_size)  # type: ignore[method-assign]
        return list(stages.values())

    def _shard(self, model: nn.Module, stages: list[DecoderStage]) -> nn.Module:
        names = ("replicas", "shards") if self.mesh.replicas > 1 else ("shards",)
        self._fully = FullySharded(
            self.device,
            self.rank,
            self.world,
            reshard=self._scaling.reshard and not stages,
            offload=self._scaling.offload,
            compute=torch.bfloat16 if self._train.precision == "pure_bf16" else torch.float32,
            mesh=self._devices[names],
        )
        for each in self._parts(model, stages):
            self._fully.prepare(each, lambda _: None)
        for stage in stages:
            register_fsdp_forward_method(stage, "through")
        return model

    def begin(self) -> None:
        """Clears the gradients of the step before."""
        for buckets in self._all_buckets():
            buckets.clear()
        if self.sharded:
            for _, parameter in self._named:
                parameter.grad = None

    def _all_buckets(self) -> list[Buckets]:
        return [] if self.sharded else [*self._of_both, *self._of_stage]

    def run(self, model: nn.Module, batches: Sequence[Slotted], forward: Forward) -> None:
        """Forward and backward of a step's micro-batches, in the order of the pipeline's schedule if there is one."""
        if self._pipeline is None:
            super().run(model, batches, forward)
            return
        self._total = forward.measured
        self._pipeline.run(batches, forward)

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch to those of the step."""
        self._leave_to_others(measured)
        if self.sharded:
            self._fully.accumulate(last=last)
            loss.backward()
            return
        self._of_stage[0].before(slot, measured, last=last)
        loss.backward()
        self._of_stage[0].after(last=last)

    @contextmanager
    def _accumulating(self, stage: int, number: int, last: bool) -> Iterator[None]:
        assert self._pipeline is not None
        if self.sharded:  # a stage's shards are summed by the schedule, when all its backwards are done
            self._total += self._pipeline.measured.pop(number, 0.0)
            yield
            return
        buckets = self._of_stage[self._stages.index(stage)]
        of_stage = torch.zeros_like(self._total)
        if stage == self._stages[-1]:
            self._total += self._pipeline.measured.pop(number, 0.0)
            self._leave_to_others(self._total)
            of_stage = self._total
        slot = self._pipeline.slot(number)
        buckets.before(slot, of_stage, last=last)
        yield
        buckets.after(last=last)

    def _leave_to_others(self, measured: torch.Tensor) -> None:
        """Forgets a loss that another worker of the group has computed, too, and tells."""
        if not self.counts:
            measured[LOSS] = measured[TARGETS] = 0.0

    @torch.no_grad()
    def reduce(self, measured: torch.Tensor) -> torch.Tensor:
        """Finishes summing gradients over groups, and over the workers of this one; returns the sum of all `measured`."""
        self._leave_to_others(measured)
        if self.sharded:
            dist.all_reduce(measured)
        else:
            # The measured of a step travel with the last stage's gradients; other buckets have none.
            *others, carrying = self._all_buckets()
            for each in others:
                each.finish(torch.zeros_like(measured))
            measured = carrying.finish(measured).clone()
            dist.all_reduce(measured, group=self._rest)
        self._sum_over_context()
        self._sum_shared()
        self._sum_tied()
        return measured

    def _sum_over_context(self) -> None:
        """Sums gradients over the tokens of a sample, where that was not done with the sum over groups."""
        if self.mesh.context > 1 and (self.sharded or "context" not in self._summed_at_once):
            self._sum_flat(self.gradients(), "context")

    def _sum_flat(self, tensors: Sequence[torch.Tensor], dimension: str) -> None:
        """Sums tensors over a dimension of the mesh, in place, as many at once as a bucket holds."""
        group, most = self._devices.get_group(dimension), int(self._scaling.bucket_mib * 2**20)
        first = 0
        while first < len(tensors):
            last, size = first + 1, tensors[first].nbytes
            while last < len(tensors) and size + tensors[last].nbytes <= most:
                size, last = size + tensors[last].nbytes, last + 1
            some, first = tensors[first:last], last
            if len(some) == 1:
                dist.all_reduce(some[0], group=group)
                continue
            flat = torch.cat([each.reshape(-1) for each in some])
            dist.all_reduce(flat, group=group)
            for each, summed in zip(some, flat.split([each.numel() for each in some]), strict=True):
                each.copy_(summed.view_as(each))

    def _sum_shared(self) -> None:
        """Sums the gradients of what every worker of a tensor group has whole."""
        shared = [each for name, each in self._named if name in self._shared] if self.mesh.tensor > 1 else []
        for parameter in shared:
            if parameter.grad is None:  # a bias that another worker adds
                parameter.grad = torch.zeros_like(parameter)
        self._sum_flat([_local(parameter) for parameter in shared], "tensor")

    def _sum_tied(self) -> None:
        """Sums what the first and the last stage know of an embedding that is the head, too."""
        if not self._ends:
            return
        own = _local(dict(self._named)["embedding.weight"])
        other = torch.empty_like(own)
        peer = self._ends[0] if self._second else self._ends[1]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]):
            work.wait()
        # In the same order on both: they must stay the same to the last bit.
        own.copy_(other + own if self._second else own + other)

    def gradients(self) -> list[torch.Tensor]:
        """The tensors in which this worker's gradients lie, for scaling in place."""
        if self.sharded:
            return [_local(each) for _, each in self._named if each.grad is not None]
        return [gradient for buckets in self._all_buckets() for gradient in buckets.gradients()]

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """Euclidean norm of the whole gradient, a scalar, the same on every worker; after `reduce`.

        As the norm of the parameters' norms, in the order of the whole network: that of one worker, to the last bit where
        every parameter is in one piece.
        """
        norms = torch.zeros(len(self._order), device=self.device)
        named = [(name, each) for name, each in self._named if each.grad is not None and name in self._counted]
        if named:
            numbers = torch.tensor([self._order[name] for name, _ in named], device=self.device)
            norms[numbers] = torch.stack(torch._foreach_norm([_local(each) for _, each in named])).to(self.device)
        if self.mesh.shards * self.mesh.tensor > 1:
            squares = norms**2
            dist.all_reduce(squares, group=self._pieces)
            norms = squares.sqrt()
        if self.mesh.pipeline > 1:
            dist.all_reduce(norms, group=self._devices.get_group("pipeline"))
        return torch.linalg.vector_norm(norms)  # type: ignore[no-any-return]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Adds `values` up over all workers, in place; all of them must call it."""
        dist.all_reduce(values)
        return values

    def settle(self) -> None:
        """After forwards that no backward follows: brings the model back to what lies between two steps."""
        if self.sharded:
            self._fully.settle()


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This worker's gradient of a parameter, which must have one."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _dealt(model: Decoder, feeding: Feeding, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A decoder's forward over this worker's tokens of a micro-batch."""
    fed = feeding(inputs[:-1], inputs[-1])
    return model.loss(model.hidden(fed.ids, fed.positions, documents=fed.documents), fed.targets)
