"""A hash list verifies every piece of a file that begins with a leaf, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.data.prepare.hash_list import (
    HASH_BYTES,
    LEAF_BYTES,
    hash_list,
    hash_list_name,
    parse_hash_list,
    put_hash_list,
)
from raystride.pipelines.system.storage.folder import Folder

SIZE = 5 * LEAF_BYTES + 1234


@given(first=st.integers(0, 5), leaves=st.integers(1, 6), offset=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_a_piece_is_held_and_one_with_a_flipped_bit_is_not(
    tmp_path_factory: pytest.TempPathFactory, first: int, leaves: int, offset: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    content = np.random.default_rng(0).bytes(SIZE)
    top = put_hash_list(Folder(str(folder)), "0.arrow", hash_list(content))
    listed = (folder / hash_list_name("0.arrow")).read_bytes()
    assert len(listed) == 6 * HASH_BYTES
    known = parse_hash_list(listed, top)
    piece = bytearray(content[first * LEAF_BYTES : (first + leaves) * LEAF_BYTES])
    assert known.matches(first * LEAF_BYTES, bytes(piece))
    assert not known.matches(first * LEAF_BYTES, bytes(piece[:-1]))
    piece[offset % len(piece)] ^= 1 << bit
    assert not known.matches(first * LEAF_BYTES, bytes(piece))


def test_another_list_is_refused(tmp_path: Path) -> None:
    top = put_hash_list(Folder(str(tmp_path)), "a.arrow", hash_list(b"a" * 100))
    with pytest.raises(ValueError, match=top):
        parse_hash_list(b"x" * HASH_BYTES, top)
