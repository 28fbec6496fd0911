"""The parameters, and under exact the buffers, that a user's network must keep from the start of a run to its end.

start = NetworkAtStart(network, exact=False)
start.refuse_changes(step=100)                            # SettingError with the name of a parameter that is another one
"""

from torch import nn

from raystride.pipelines.config import SettingError
from raystride.pipelines.train.strategies.strategy import equal_bits


class NetworkAtStart:
    """The parameters that the optimiser, shards and checkpoints know, and buffers that must not follow the samples."""

    def __init__(self, network: nn.Module, *, exact: bool) -> None:
        """`exact`: whether buffers must keep their bits."""
        self._network, self._exact = network, exact
        self._parameters = {name: (each, each.requires_grad) for name, each in network.named_parameters()}
        self._buffers = {name: each.clone() for name, each in network.named_buffers()} if exact else {}

    def refuse_changes(self, step: int) -> None:
        """Raises SettingError for a parameter that is new, gone, replaced, or frozen unlike at the start: nobody trains or
        saves it; and under exact for a buffer that has changed.
        """
        now = dict(self._network.named_parameters())
        for name in [*now, *(name for name in self._parameters if name not in now)]:
            if change := self._describe_change(name, now.get(name)):
                rule = "must keep its parameters, and which of them are frozen, from the start to the end of a run"
                found = f"{name} is {change} by step {step}"
                remedy = "make a run of each phase, the next one with `run.load_model()` of the one before"
                raise SettingError(f"model {rule}: {found}; {remedy}", setting="model", value=name, allowed=rule)
        for name, buffer in self._network.named_buffers() if self._exact else ():
            if name not in self._buffers or not equal_bits(self._buffers[name], buffer):
                rule = "must be false where a forward changes buffers, whose values depend on how workers share the samples"
                found = f"{name} has changed by step {step}"
                raise SettingError(f"train.exact {rule} ({found})", setting="train.exact", value=True, allowed=rule)

    def _describe_change(self, name: str, now: nn.Parameter | None) -> str:
        if name not in self._parameters:
            return "new"
        before, was_trained = self._parameters[name]
        if now is None:
            return "gone"
        # FSDP puts shards and whole parameters in each other's place.
        if now is not before and not hasattr(before, "to_local"):
            return "another one"
        return "" if now.requires_grad == was_trained else "frozen" if was_trained else "no longer frozen"
