"""byte_pack: what comes out is what a loop over documents gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.triton_kernels.byte_pack import (
    NO_TOKEN,
    byte_pack,
    byte_pack_reference,
    byte_pack_sequence,
    byte_pack_sequence_reference,
)
from tests.triton_kernels.guard import guarded

DOCUMENTS = st.lists(st.binary(max_size=40) | st.binary(min_size=1000, max_size=1100), max_size=6)
TOKEN = st.sampled_from([NO_TOKEN, 300])


def _flat(documents: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *map(len, documents)]).cumsum(0)
    return torch.tensor(list(b"".join(documents)), dtype=torch.uint8), offsets


def _with_tokens(document: bytes, start: int, end: int, first: int) -> list[int]:
    return [
        *([start] if start != NO_TOKEN else []),
        *(byte + first for byte in document),
        *([end] if end != NO_TOKEN else []),
    ]


@given(documents=DOCUMENTS, length=st.integers(2, 1100), start=TOKEN, end=TOKEN, first=st.sampled_from([0, 3]))
def test_padded(documents: list[bytes], length: int, start: int, end: int, first: int) -> None:
    data, offsets = _flat(documents)
    settings = {"start_id": start, "end_id": end, "padding_id": 7, "first_id": first}
    with guarded():
        ids, mask = byte_pack(data, offsets, length=length, **settings)
    room = length - (start != NO_TOKEN) - (end != NO_TOKEN)
    rows = [_with_tokens(document[:room], start, end, first) for document in documents]
    assert ids.tolist() == [row + [7] * (length - len(row)) for row in rows]
    assert mask.sum(1).tolist() == [len(row) for row in rows]
    for found, wanted in zip((ids, mask), byte_pack_reference(data, offsets, length=length, **settings), strict=True):
        assert torch.equal(found, wanted)


@given(documents=DOCUMENTS, start=TOKEN, end=TOKEN, first=st.sampled_from([0, 3]))
def test_packed(documents: list[bytes], start: int, end: int, first: int) -> None:
    data, offsets = _flat(documents)
    with guarded():
        found = byte_pack_sequence(data, offsets, start_id=start, end_id=end, first_id=first)
    rows = [_with_tokens(document, start, end, first) for document in documents]
    assert found[0].tolist() == [token for row in rows for token in row]
    assert found[1].tolist() == [number for number, row in enumerate(rows) for _ in row]
    assert found[2].tolist() == [position for row in rows for position in range(len(row))]
    assert found[3].tolist() == torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    wanted = byte_pack_sequence_reference(data, offsets, start_id=start, end_id=end, first_id=first)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    data, offsets = _flat([b"abc"])
    with pytest.raises(ValueError, match="length 1 has no room for 2"):
        byte_pack(data, offsets, length=1, start_id=1, end_id=2)
    with pytest.raises(ValueError, match="vector of uint8"):
        byte_pack(data.int(), offsets, length=4)
    with pytest.raises(ValueError, match="vector of int64"):
        byte_pack(data, offsets.int(), length=4)


def test_opcheck_and_compile() -> None:
    data, offsets = _flat([b"abc", b"", b"de"])
    torch.library.opcheck(torch.ops.raystride.byte_pack.default, (data, offsets, 5, -1, 256, 257, 0))
    torch.library.opcheck(torch.ops.raystride.byte_pack_sequence.default, (data, offsets, -1, 256, 0))
    compiled = torch.compile(lambda d, o: byte_pack(d, o, length=5, end_id=256), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(data, offsets)[0], byte_pack(data, offsets, length=5, end_id=256)[0])
