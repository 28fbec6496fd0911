"""Finds which module and which slots made a step bad, by computing it once more, slot by slot, and looking at every output.

The parameters are those that the bad step met, or one good update later: it changed nothing itself.

    blame = find_blame(strategy, model, loader, rules, step=17, spike=False)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from pipelines.feed.loader import Loader
from pipelines.strategies.recompute import as_compiled
from pipelines.strategies.strategy import Strategy
from pipelines.train.guard import Blame
from pipelines.train.state import LeftOut
from pipelines.train.step import StepRules, micro_batch_seed, seed_dropout


def find_blame(strategy: Strategy, model: nn.Module, loader: Loader, rules: StepRules, step: int, spike: bool) -> Blame:
    """Where step number `step` went wrong. All workers call it together."""
    plan, names = loader.plan, [name for name, _ in model.named_modules()]
    layers = torch.zeros(len(names), device=strategy.device)
    losses = torch.zeros(plan.slots, device=strategy.device)
    bad = torch.zeros(plan.slots, device=strategy.device)
    for batch in replace(loader, micro_batch_slots=1).read_step(step).micro_batches:
        batch = loader.placement.place(batch)
        seed_dropout(strategy.device, micro_batch_seed(rules.seed, step, batch.slot))
        with torch.no_grad(), rules.precision.autocast(strategy.device), as_compiled(), _first_bad_output(model) as found:
            loss_sum, counted = model(*batch.inputs, batch.targets)
        if not batch.empty:
            losses[batch.slot] = torch.nan_to_num(loss_sum / counted.clamp(min=1))
            bad[batch.slot] = float(not torch.isfinite(loss_sum))
            if found:
                layers[names.index(found[0])] += 1
    strategy.settle()
    layers, losses, bad = (strategy.sum(each) for each in (layers, losses, bad))
    slots = [int(losses.argmax())] if spike else bad.nonzero().flatten().tolist()
    left_out, samples = [], []
    for slot in slots or range(plan.slots):
        positions = plan.slot(step, slot)
        if len(positions):
            left_out.append(LeftOut(step, slot, int(positions[0]), len(positions)))
            samples += plan.order.at(positions).tolist()
    named = layers.nonzero().flatten().tolist()
    return Blame(names[named[0]] if named else None, left_out, samples)


@contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Inside, the list gets the name of the first module that returns something that is not finite."""
    found: list[str] = []

    def look(name: str, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not found and any(isinstance(x, torch.Tensor) and not torch.isfinite(x).all() for x in tensors):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
