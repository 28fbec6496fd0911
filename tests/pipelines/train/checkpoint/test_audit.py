"""The audit proves the fed samples from manifests alone, and finds lost, repeated, exchanged and tampered ones."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.data.feed.mixture import Mixture, MixtureSource
from raystride.pipelines.data.feed.order import Order, digest
from raystride.pipelines.data.feed.plan import Plan, worker_slots
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint import audit as audit_module
from raystride.pipelines.train.checkpoint.audit import AuditFailed, audit, main

ORDER = Order(samples=50, seed=3)
PLAN = Plan(ORDER, slots=3, slot_size=4, epochs=2.5)
SAVED = (2, 5, 6, 11)
"""Steps at which there are checkpoints; 11 is the last, a short one."""


def _fed(rank: int, world: int, first: int, last: int) -> int:
    """Returns the digest that a rank's loader sums up over steps."""
    total = 0
    for step in range(first, last):
        for slot in worker_slots(PLAN.slots, rank, world):
            positions = PLAN.slot(step, slot)
            total += digest(positions // ORDER.samples, ORDER.sample_ids_at(positions))
    return total % 2**64


def _write(folder: Path, worlds: tuple[int, ...] = (1, 3, 2, 1)) -> Folder:
    parent = 0
    for step, world in zip(SAVED, worlds, strict=True):
        manifest = {
            "attempt": f"a{world}",
            "world": world,
            "step": step,
            "parent_step": parent,
            "positions": [PLAN.position(parent), PLAN.position(step)],
            "order": asdict(ORDER),
            "fed": {str(rank): f"{_fed(rank, world, parent, step):016x}" for rank in range(world)},
        }
        Folder(str(folder / f"step-{step:08d}")).put_json("MANIFEST.json", manifest)
        parent = step
    return Folder(str(folder))


def _change(folder: Path, step: int, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / f"step-{step:08d}" / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_whole_history_is_proven(tmp_path: Path) -> None:
    found = audit(_write(tmp_path))
    assert (found.steps, found.samples, found.checkpoints, found.attempts) == (11, 125, 4, 3)
    assert found.workers == (1, 3, 2)
    assert str(found).startswith("125 samples in 11 steps, 2.5 epochs of 50; ")


def _other(manifest: dict[str, Any], epoch: int, lost: int, found: int) -> None:
    """Replaces one sample of a rank's digest, or adds or removes one."""
    change = sum(
        sign * digest(np.array(epoch), np.array([sample])) for sign, sample in ((-1, lost), (1, found)) if sample >= 0
    )
    manifest["fed"]["0"] = f"{(int(manifest['fed']['0'], 16) + change) % 2**64:016x}"


@pytest.mark.parametrize(
    ("step", "change", "parent_step", "positions", "names"),
    [
        (5, lambda m: _other(m, 0, int(ORDER.sample_ids_at(np.array([30]))[0]), -1), None, (24, 59), ("3 worker",)),
        (5, lambda m: _other(m, 0, -1, 7), None, (24, 59), ("24 to 59",)),
        (
            6,
            lambda m: _other(m, 1, int(ORDER.sample_ids_at(np.array([65]))[0]), int(ORDER.sample_ids_at(np.array([66]))[0])),
            None,
            (60, 71),
            (),
        ),
        (6, lambda m: m["fed"].pop("1"), None, (60, 71), ("1 worker",)),
        (2, lambda m: m["fed"].update({"0": "0" * 16}), None, (0, 23), ()),
        (6, lambda m: m.update(positions=[59, 72]), 5, None, ("position 59", "step-00000005", "60")),
        (5, lambda m: m["order"].update(seed=4), None, None, ("order",)),
        (6, lambda m: m.update(parent_step=4), 4, None, ("step-00000004", "no manifest")),
        (6, lambda m: m.update(parent_step=6), 6, None, ("no manifest",)),
    ],
    ids=["lost", "repeated", "exchanged", "a rank", "nothing fed", "gap", "order", "parent", "circle"],
)
def test_what_does_not_fit_is_found(
    tmp_path: Path,
    step: int,
    change: Callable[[dict[str, Any]], Any],
    parent_step: int | None,
    positions: tuple[int, int] | None,
    names: tuple[str, ...],
) -> None:
    checkpoints = _write(tmp_path)
    _change(tmp_path, step, change)
    with pytest.raises(AuditFailed, match=f"^step-{step:08d}") as raised:
        audit(checkpoints)
    error = raised.value
    assert (error.step, error.parent_step, error.positions) == (step, parent_step, positions)
    assert not [name for name in names if name not in str(error)], str(error)


@pytest.mark.parametrize("damage", ["missing", "half"])
def test_a_manifest_in_the_middle_is_needed_and_the_newest_is_not(tmp_path: Path, damage: str) -> None:
    checkpoints = _write(tmp_path)
    newest, middle = (tmp_path / f"step-{step:08d}" / "MANIFEST.json" for step in (11, 5))
    for path in (newest, middle):
        content = path.read_text()
        path.write_text(content[: len(content) // 2]) if damage == "half" else path.unlink()
        if path == newest:
            assert audit(checkpoints).steps == 6
    with pytest.raises(AuditFailed, match=r"^step-00000006 follows step-00000005, of which there is no manifest$") as raised:
        audit(checkpoints)
    assert (raised.value.step, raised.value.parent_step) == (6, 5)


@given(worlds=st.tuples(*[st.integers(1, 3)] * 4), chunk=st.integers(1, 60))
def test_neither_workers_nor_chunks_matter(
    tmp_path_factory: pytest.TempPathFactory, worlds: tuple[int, ...], chunk: int
) -> None:
    checkpoints = _write(tmp_path_factory.mktemp("audit"), worlds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "CHUNK", chunk)
        assert audit(checkpoints).samples == 125


def test_the_command_prints_one_line_and_says_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "mine" / "checkpoints")
    assert main(["mine", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("mine: 125 samples ")
    _change(tmp_path / "mine" / "checkpoints", 5, lambda m: m["fed"].update({"2": "0" * 16}))
    assert main(["mine", "--storage", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("mine: not proven: step-00000005")
    assert out.count("\n") == 1
    assert main(["yours", "--storage", str(tmp_path)]) == 2
    assert "--storage" in capsys.readouterr().err


NAMES = ("web", "code", "math", "chat")
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from((0.0, 0.2, 0.5, 1.0)), min_size=1)
WANTED = WEIGHTS.filter(lambda weights: any(weights.values()))
ATTEMPTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), WANTED), min_size=1, max_size=6)
"""Of each attempt its steps, its workers, and the weights of the sources that it has."""


@given(attempts=ATTEMPTS, sizes=st.tuples(*[st.integers(1, 40)] * 4), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_mixture_whose_weights_and_sources_change_is_proven_and_one_sample_less_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    attempts: list[tuple[int, int, dict[str, float]]],
    sizes: tuple[int, ...],
    seed: int,
    data: st.DataObject,
) -> None:
    folder, step, position = Folder(str(tmp_path_factory.mktemp("audit"))), 0, 0
    known = {name: MixtureSource(name, Order(size, seed)) for name, size in zip(NAMES, sizes, strict=True)}
    mixture: Mixture | None = None
    saved = []
    for number, (steps, world, weights) in enumerate(attempts):
        mixture = Mixture.from_weights([known[name] for name in weights], [(0, list(weights.values()))], mixture, position)
        plan, parent = Plan(mixture, slots=3, slot_size=4, first_step=step, first_position=position), step
        fed = [0] * world
        for step_number in range(step, step + steps):
            for rank in range(world):
                for slot in worker_slots(plan.slots, rank, world):
                    positions = plan.slot(step_number, slot)
                    fed[rank] = (fed[rank] + digest(mixture.epochs(positions), mixture.sample_ids_at(positions))) % 2**64
        step, before, position = step + steps, position, position + steps * plan.batch
        saved.append(
            {"attempt": f"a{number}", "world": world, "step": step, "parent_step": parent, "positions": [before, position]}
            | {"order": mixture.to_json(), "fed": {str(rank): f"{rank_digest:016x}" for rank, rank_digest in enumerate(fed)}}
        )
        folder.put_json(f"step-{step:08d}/MANIFEST.json", saved[-1])
    assert mixture
    found = audit(folder)
    counts = dict(zip((source.name for source in mixture.sources), mixture.counts(position).tolist(), strict=True))
    assert {name: count for name, (count, _) in found.by_source.items()} == counts
    assert found.samples == sum(counts.values()) == position
    tampered = data.draw(st.sampled_from(saved), label="the manifest that is tampered with")
    lost = np.array([data.draw(st.integers(tampered["positions"][0], tampered["positions"][1] - 1), label="lost")])
    rest = (int(tampered["fed"]["0"], 16) - digest(mixture.epochs(lost), mixture.sample_ids_at(lost))) % 2**64
    folder.put_json(
        f"step-{tampered['step']:08d}/MANIFEST.json", tampered | {"fed": tampered["fed"] | {"0": f"{rest:016x}"}}
    )
    with pytest.raises(AuditFailed, match=f"step-{tampered['step']:08d}"):
        audit(folder)
