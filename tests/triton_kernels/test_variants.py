"""A training whose lengths vary has Triton compile at most three variants of a kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_lengths_that_vary_do_not_make_it_compile_again() -> None:
    command = [sys.executable, "-m", "tests.triton_kernels.variants"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    variants: dict[str, int] = json.loads(done.stdout)
    assert len(variants) > 35
    assert {name: number for name, number in variants.items() if number > 3} == {}
    # Lengths of attention, and rows of a norm, are no reason for a second one; but of dK and dV there is one by head.
    alike = {name: number for name, number in variants.items() if name.startswith(("causal", "cross", "layer_norm"))}
    by_head = {name: number for name, number in alike.items() if "backward_keys" in name}
    assert set(by_head.values()) == {2}
    assert {number for name, number in alike.items() if name not in by_head} == {1}
