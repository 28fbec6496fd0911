"""A sealed file is what was written, or is refused by name; files of 0.3 have no seal."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.system.storage import sealed
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, parse_sealed, put_sealed, read_sealed, seal_json
from raystride.pipelines.system.writer import WrittenByNewer, is_newer, release_order
from tests.flips import flip
from tests.some import some

CONTENT = {"run": "r", "files": {"a": {"sha256": "0" * 64}}, "step": 4, "token": "x", "uri": "sqlite:///ü"}
VALUES = st.none() | st.integers() | st.text(max_size=8) | st.lists(st.floats(allow_nan=False, allow_infinity=False))


def as_0_3_writes(content: Any) -> bytes:
    """Returns what 0.3 writes of a content that it has read: all keys, sorted."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


@given(content=st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
def test_what_was_written_comes_back(content: dict[str, Any]) -> None:
    data = seal_json(content)
    assert parse_sealed(data, "f") == content
    body, _, seal = data.decode().rpartition(',\n "sha256": "')
    assert seal == hashlib.sha256(body.encode()).hexdigest() + '"\n}\n'
    assert list(json.loads(data))[-1] == "sha256"


def test_each_bit_counts() -> None:
    data = seal_json(CONTENT)
    for bit in some(range(8 * len(data))):
        with pytest.raises(SealBroken, match=r"^f (does not match its own SHA-256|is no JSON)"):
            parse_sealed(flip(data, bit), "f")


@pytest.mark.parametrize("end", [0, 1, 40, -2])
def test_a_part_is_refused(end: int) -> None:
    with pytest.raises(SealBroken, match="f is no JSON"):
        parse_sealed(seal_json(CONTENT)[:end], "f")


def test_files_of_0_3_are_taken_as_they_are() -> None:
    assert parse_sealed(as_0_3_writes(CONTENT), "f") == CONTENT
    assert parse_sealed(b"{}", "f") == {}


def test_what_0_3_wrote_again_is_its_own() -> None:
    """It keeps the keys that it has read, sorted, so the seal is one of earlier content."""
    again = as_0_3_writes(json.loads(seal_json(CONTENT)) | {"step": 5})
    assert parse_sealed(again, "f") == CONTENT | {"step": 5}
    assert parse_sealed(seal_json(parse_sealed(again, "f")), "f") == CONTENT | {"step": 5}


@pytest.mark.parametrize("removed", ["sha256", "writer"])
def test_a_file_of_now_without_its_seal_is_damaged(removed: str) -> None:
    content = json.loads(seal_json(CONTENT))
    del content[removed]
    with pytest.raises(SealBroken, match="f does not match its own SHA-256"):
        parse_sealed(json.dumps(content, indent=1).encode(), "f")


def test_another_form_of_the_same_content_is_damaged() -> None:
    """Bytes are compared: a file that was parsed and written again may have lost digits."""
    with pytest.raises(SealBroken, match="does not match"):
        parse_sealed(json.dumps(json.loads(seal_json(CONTENT))).encode(), "f")


def test_an_error_names_file_and_remedy(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    put_sealed(folder, "state.json", CONTENT)
    assert read_sealed(folder, "state.json") == CONTENT
    with pytest.raises(FileNotFoundError):
        read_sealed(folder, "other.json")
    (tmp_path / "state.json").write_bytes((tmp_path / "state.json").read_bytes().replace(b"4", b"5"))
    with pytest.raises(SealBroken) as raised:
        read_sealed(folder, "state.json", "remove it")
    assert str(raised.value) == f"{tmp_path}/state.json does not match its own SHA-256: remove it"
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(SealBroken, match=r"state\.json is no JSON object$"):
        read_sealed(folder, "state.json")


def test_a_key_of_a_newer_version_is_refused_by_name_and_passes_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_sealed(seal_json(CONTENT | {"more": 1}), "f", CONTENT) == CONTENT | {"more": 1}, "of this version"
    monkeypatch.setattr(sealed, "__version__", "9.8.7")
    assert parse_sealed(seal_json(CONTENT | {"more": []}), "f", CONTENT)["more"] == []
    with pytest.raises(WrittenByNewer, match=r"^f was written by Raystride 9\.8\.7, .* does not know more \(1\), other"):
        parse_sealed(seal_json(CONTENT | {"more": 1, "other": "x" * 99}), "f", CONTENT)
    monkeypatch.setattr(sealed, "__version__", "0.3.0")
    assert "gone" in parse_sealed(seal_json(CONTENT | {"gone": 1}), "f", CONTENT), "of an older version"


def test_versions_are_ordered() -> None:
    ordered = ["0.2.0", "0.3.0", "0.3.1", "0.4.0.dev1", "0.4.0.dev10", "0.4.0", "0.10.0", "1.0.0", "of nobody"]
    assert sorted(set(ordered), key=release_order) == ordered
    assert [is_newer(version) for version in ("0.3.0", "9.8.7", "?")] == [False, True, True]
