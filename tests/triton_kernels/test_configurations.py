"""The table of tiles: every architecture and head size has one that can run, and alternatives that fit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel_tools import tile_search
from benchmarks.kernel_tools.tile_candidates import estimate_shared_bytes, list_corrections, list_tiles
from raystride.triton_kernels import configurations
from raystride.triton_kernels.attention import MAX_HEAD_SIZE, unsupported_reason
from raystride.triton_kernels.attention_problem import Rules, Sequences, mixed_rules
from raystride.triton_kernels.configurations import (
    FAMILIES,
    KERNELS,
    Tile,
    TileCase,
    architecture_family,
    forced_tile,
    num_processors,
    takes_descriptors,
    tile,
)
from raystride.triton_kernels.launch import assumed_architecture
from tests.some import some

ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_head_size_has_a_tile_and_few_alternatives(kernel: str, architecture: str, dtype: torch.dtype) -> None:
    for head_size in (1, 16, 48, 64, 80, 128, 129, MAX_HEAD_SIZE):
        found = list_tiles(kernel, architecture, head_size, dtype)
        assert found[0] == tile(kernel, architecture, head_size, dtype)
        assert len(set(found)) == len(found)
        # The estimate is for whole rows; fp32 works on columns of them, so that on some no other tile seems to fit.
        assert (1 if dtype == torch.float32 else 2) <= len(found) <= 6
        persistent = kernel in ("attention_forward", "attention_backward_queries")
        assert [one._replace(programs=0) for one in found if one.programs] == found[:1] * persistent
        for one in (tried for tried in found[1:] if not tried.programs):
            assert estimate_shared_bytes(kernel, one, head_size, dtype.itemsize) <= FAMILIES[architecture].shared
        for one in (*found, tile(kernel, architecture, head_size, dtype, lean=True)):
            # Products need 16 rows and columns; blocks are powers of two.
            assert all(length >= 16 and length & (length - 1) == 0 for length in one[:2])


def test_alternatives_are_two_programs_a_processor_and_many_warps_too() -> None:
    for architecture in ("sm_90", "sm_100"):
        forward = list_tiles("attention_forward", architecture, 64, torch.bfloat16)
        assert [one.registers for one in forward if one.registers] == [128]
        for kernel in ("attention_backward_keys", "attention_backward_queries"):
            assert [one.warps for one in list_tiles(kernel, architecture, 128, torch.bfloat16)].count(16) == 1
    assert all(
        one.registers == 0 and one.warps < 16 for one in list_tiles("attention_forward", "gfx942", 64, torch.bfloat16)
    )


def test_a_lean_tile_streams_less() -> None:
    for architecture in FAMILIES:
        for head_size in (64, 128, 256):
            for kernel in ("attention_forward", "attention_backward_queries", "attention_backward_keys"):
                plain, lean = (tile(kernel, architecture, head_size, torch.bfloat16, lean=lean) for lean in (False, True))
                assert lean.block_m * lean.block_n < plain.block_m * plain.block_n or 16 in lean


@pytest.mark.parametrize(
    ("version", "corrections_of"),
    [("3.6.0", "3.6"), ("3.8.1+git1234", "3.8"), ("3.10.0", "3.8"), ("4.0.0", "3.8"), ("3.5.1", None), (None, None)],
)
def test_a_triton_has_the_corrections_of_its_version_and_a_newer_one_those_of_the_newest(
    version: str | None, corrections_of: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        monkeypatch.setattr("triton.__version__", version)
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    found = configurations._corrections(configurations.triton_version.__wrapped__())
    assert found == (configurations.read_corrections()[corrections_of] if corrections_of else {})


CORRECTIONS = [
    (version, case, chosen)
    for version, corrections in configurations.read_corrections().items()
    for case, chosen in corrections.items()
]


def test_each_correction_is_another_tile_that_fits() -> None:
    for _, case, chosen in some(CORRECTIONS):
        shipped, width = configurations.shipped_tile(case), 4 if case.single else 2
        assert chosen != shipped
        assert chosen.block_m <= shipped.block_m
        assert chosen.block_n <= shipped.block_n
        assert chosen in list_corrections(case)
        shared = estimate_shared_bytes(case.kernel, chosen, case.head_size, width)
        assert shared <= configurations.FAMILIES[case.family].shared


def test_a_correction_is_taken_and_written_as_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored = configurations.read_corrections()
    version, case, chosen = CORRECTIONS[0]
    monkeypatch.setattr(configurations, "triton_version", lambda: version)
    dtype = torch.float32 if case.single else torch.bfloat16
    rules = {"lean": case.lean, "capped": case.capped, "dropped": case.dropped, "mixed": case.mixed, "variant": case.variant}
    assert tile(case.kernel, case.family, case.head_size, dtype, **rules) == chosen  # type: ignore[arg-type]
    with tile_search.corrected_tile(case, Tile(16, 16, 4, 1)):
        assert tile(case.kernel, case.family, case.head_size, dtype, **rules) == Tile(16, 16, 4, 1)  # type: ignore[arg-type]
    assert tile(case.kernel, case.family, case.head_size, dtype, **rules) == chosen  # type: ignore[arg-type]
    monkeypatch.setattr(configurations, "CORRECTIONS", tmp_path / "corrections.json")
    tile_search.write_corrections(stored)
    assert configurations.read_corrections() == stored


@pytest.mark.long
def test_a_tile_that_spills_is_corrected(tmp_path: Path) -> None:
    """By compiling in a process of its own: here kernels belong to the interpreter."""
    program = """
from pathlib import Path
from raystride.triton_kernels import configurations; from benchmarks.kernel_tools import tile_search
from raystride.triton_kernels.configurations import Tile

cases = tile_search.list_cases("sm_90")
case = next(case for case in cases if case[:3] == ("attention_forward", "sm_90", 128) and not case.single and not case.lean)
arguments = ("sm_90", case, cases[case], Path("kept"))
assert tile_search.find_correction(*arguments) is None
configurations.shipped_tile = lambda _: Tile(128, 128, 4, 2)
print(tile_search.find_correction(*arguments), len(list(Path("kept").iterdir())))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("128 x "), found.stdout
    assert "128 x 128, 4 warps" not in found.stdout


def test_what_comes_together_has_tiles_of_its_own() -> None:
    for name, table in some(configurations._MIXED.items()):
        known: dict[str, Any] = {
            "lean": 1 if name == "dropout and window" else 2,
            "capped": 2 if "cap" in name else 0,
            "dropped": "dropout" in name,
        }
        for kernel, architectures in table.items():
            for architecture, sizes in architectures.items():
                for size, chosen in sizes.items():
                    alone, together = (
                        configurations.shipped_tile(
                            TileCase(kernel, architecture, size, False, **known, mixed=mixed, variant="")
                        )
                        for mixed in ("", name)
                    )
                    assert together == chosen
                    assert chosen.block_m * chosen.block_n <= alone.block_m * alone.block_n
                    assert chosen != alone or architecture == "sm_86"  # whose table may have the same


def test_some_calls_are_told_of_the_registers_there_are_and_keep_their_blocks() -> None:
    for name, kernel, architecture, size in configurations._BOUND:
        case = TileCase(kernel, architecture, size, False, 1, 0, False, name, "")
        plain, told = (configurations.shipped_tile(case._replace(mixed=mixed)) for mixed in ("", name))
        assert told == plain._replace(registers=255) != plain
        assert configurations.shipped_tile(case._replace(single=True)).registers == 0


def test_what_comes_together_is_named() -> None:
    offsets = torch.tensor([0, 8])
    plain, packed = Sequences(1, 8, 8), Sequences(1, 8, 8, None, offsets, offsets)
    lengths = Sequences(1, 8, 8, torch.tensor([8]))
    both = Rules(1.0, causal=True, window=4, dropout=0.1)
    assert {mixed_rules(each, both) for each in (plain, lengths, packed)} == {"dropout and window"}
    assert mixed_rules(packed, both._replace(window=0)) == "packed and dropout"
    assert mixed_rules(packed, both._replace(dropout=0.0)) == "packed and window"
    assert mixed_rules(packed, both._replace(dropout=0.0, softcap=5.0)) == "packed, window and cap"
    assert mixed_rules(lengths, Rules(1.0)) == mixed_rules(plain, Rules(1.0, softcap=5.0)) == "full"
    assert mixed_rules(packed, Rules(1.0)) == mixed_rules(packed, Rules(1.0, softcap=5.0)) == "full and packed"
    assert (
        mixed_rules(plain, Rules(1.0))
        == mixed_rules(lengths, both._replace(dropout=0.0))
        == mixed_rules(packed, Rules(1.0, True))
        == ""
    )
    assert set(configurations._MIXED) == {
        mixed_rules(packed, both._replace(window=window, dropout=dropout, softcap=softcap))
        for window, dropout, softcap in ((4, 0.1, 0.0), (0, 0.1, 0.0), (4, 0.0, 0.0), (4, 0.0, 5.0))
    }


@pytest.mark.parametrize(("architecture", "largest"), [("sm_80", 64), ("sm_86", 64), ("sm_90", 128), ("sm_100", 128)])
def test_dropout_under_a_window_in_fp32_is_refused_where_no_tile_is_small_enough(architecture: str, largest: int) -> None:
    with assumed_architecture(architecture):
        for size, dtype in ((largest, torch.float32), (largest + 1, torch.float32), (256, torch.bfloat16)):
            q = torch.empty(1, 1, 1, size, dtype=dtype)
            why = unsupported_reason(q, q, q, window=4, dropout=0.1)
            assert bool(why) == (dtype == torch.float32 and size > largest)


def test_unknown_architectures_take_the_nearest_family() -> None:
    near = {"sm_80": "sm_80", "sm_86": "sm_86", "sm_89": "sm_86", "sm_90": "sm_90", "sm_100": "sm_100", "sm_103": "sm_100"}
    near |= {"sm_120": "sm_86", "gfx942": "gfx942"}
    assert {name: architecture_family(name) for name in near} == near
    for name in ("sm_70", "sm_75", "gfx90a", "gfx1100"):
        with pytest.raises(ValueError, match=name):
            architecture_family(name)
    assert num_processors("sm_89") == FAMILIES["sm_86"].processors
    assert [takes_descriptors(name) for name in ("sm_89", "sm_90", "sm_120", "gfx942")] == [False, True, False, False]


def test_a_forced_tile_holds_for_its_block_and_kernel() -> None:
    before = tile("attention_forward", "sm_90", 64, torch.bfloat16)
    with forced_tile("attention_forward", Tile(16, 32, 4, 1)):
        with forced_tile("attention_backward_keys", Tile(32, 16, 4, 1)):
            assert tile("attention_backward_keys", "sm_80", 256, torch.float32) == Tile(32, 16, 4, 1)
        assert tile("attention_forward", "sm_90", 64, torch.bfloat16) == Tile(16, 32, 4, 1)
        assert tile("attention_backward_keys", "sm_90", 64, torch.bfloat16) != Tile(32, 16, 4, 1)
    assert tile("attention_forward", "sm_90", 64, torch.bfloat16) == before
