"""A hash list vouches for every piece of a file that begins with a leaf, and for nothing else."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.hash_list import HASH, LEAF, hash_list_name, parse_hash_list, put_hash_list

SIZE = 5 * LEAF + 1234


@given(first=st.integers(0, 5), leaves=st.integers(1, 6), at=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_a_piece_is_held_and_one_with_a_flipped_bit_is_not(
    tmp_path_factory: pytest.TempPathFactory, first: int, leaves: int, at: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    content = np.random.default_rng(0).bytes(SIZE)
    (folder / "0.arrow").write_bytes(content)
    top = put_hash_list(Folder(str(folder)), "0.arrow", folder / "0.arrow")
    listed = (folder / hash_list_name("0.arrow")).read_bytes()
    assert len(listed) == 6 * HASH
    known = parse_hash_list(listed, top)
    piece = bytearray(content[first * LEAF : (first + leaves) * LEAF])
    assert known.holds(first * LEAF, bytes(piece))
    assert not known.holds(first * LEAF, bytes(piece[:-1]))
    piece[at % len(piece)] ^= 1 << bit
    assert not known.holds(first * LEAF, bytes(piece))


def test_another_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 100)
    top = put_hash_list(Folder(str(tmp_path)), "a.arrow", tmp_path / "a")
    with pytest.raises(ValueError, match=top):
        parse_hash_list(b"x" * HASH, top)
