"""`train.batch`, cut into slots before anything is hashed or stored.

cut_batch({"batch": 64})                                  # (16, 4): slots and slot size
cut_batch_of_flags(["--train.batch", "64"])               # ["--train.slots=16", "--train.slot_size=4"]
"""

from collections.abc import Mapping, Sequence
from typing import Any

from raystride.pipelines.system.errors import SettingError

MAX_BATCH_SLOTS = 16
"""Most slots into which `train.batch` is cut: so many workers can share it later."""


def cut_batch(given: Mapping[str, Any]) -> tuple[int, int]:
    """Returns slots and slot size for `batch` samples; `slots` or `slot_size` may be given as well.

    From the batch alone, slots are its largest divisor up to 16 on any hardware, so that a run can go on elsewhere with more
    workers. Raises SettingError if the given numbers contradict each other.
    """
    batch, slots, size = given["batch"], given.get("slots"), given.get("slot_size")
    if size and not slots:
        slots = batch // size
    slots = slots or max(number for number in range(1, MAX_BATCH_SLOTS + 1) if batch % number == 0)
    size = size or batch // slots
    if slots * size != batch:
        named = " and ".join(f"train.{key} {given[key]}" for key in ("slots", "slot_size") if given.get(key))
        rule = (
            f"must be slots times slot size, which {named} contradicts: leave {'those' if ' and ' in named else 'that'} out"
        )
        raise SettingError(f"train.batch is {batch}: it {rule}", setting="train.batch", value=batch, allowed=rule)
    return slots, size


def with_slots(train: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of the section `train` from one origin (a file, flags) with slots and slot size in place of `batch`.

    So a batch overrides the slots of an earlier origin. Raises SettingError as `cut_batch` does.
    """
    batch = train.get("batch")
    if not isinstance(batch, int) or batch < 1:
        return dict(train)
    if train.get("slot_tokens"):
        raise batch_error(batch)
    slots, size = cut_batch(train)
    return {key: value for key, value in train.items() if key != "batch"} | {"slots": slots, "slot_size": size}


def batch_error(batch: int) -> SettingError:
    """Returns the error for a batch beside `slot_tokens`."""
    rule = "must be 0 with train.slot_tokens, whose slots hold tokens: give train.slots instead"
    return SettingError(f"train.batch is {batch}: it {rule}", setting="train.batch", value=batch, allowed=rule)


def cut_batch_of_content(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of one file or mapping with `train.batch` cut into slots."""
    train = content.get("train")
    return content | {"train": with_slots(train)} if isinstance(train, dict) and train.get("batch") else content


def cut_batch_of_flags(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the flag `--train.batch` cut into slots; whatever files say of them is overridden."""
    names = {"--train.batch": "batch", "--train.slots": "slots", "--train.slot_size": "slot_size"}
    rest, given = list(arguments), dict[str, Any]()
    for index in reversed(range(len(rest))):
        flag, equals, value = rest[index].partition("=")
        if flag in names:
            text = value if equals else "".join(rest[index + 1 : index + 2])
            if text.isdecimal():
                given.setdefault(names[flag], int(text))
                del rest[index : index + (1 if equals else 2)]
    if not given.get("batch"):
        return list(arguments)
    return rest + [f"--train.{name}={value}" for name, value in with_slots(given).items()]
