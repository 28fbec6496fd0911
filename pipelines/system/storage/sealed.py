"""JSON files that prove themselves: their last key is the SHA-256 of the exact bytes before it.

    put_sealed(folder, "state.json", {"step": 5})              # {"step": 5, "writer": "0.4.0", "sha256": "9f2c..."}
    read_sealed(folder, "state.json")                          # {"step": 5}; SealBroken if a byte is another one

A file without a seal is one of 0.3 or before, and is taken as it is. A sealed file also names its writer's version, so one
that lost its seal is damaged. Before there were seals, some files were written again with all keys that they had, sorted:
there the seal lies before the writer and is of earlier content. Sealed files have it behind.

Where 0.3 takes no further key, both lie in a file beside, `NAME.sha256`, that `sha256sum -c` reads. It is put before
the file, whose put stays the commit, and only for files that are written once: 0.3 would leave it behind as it was.
"""

import hashlib
import json
from collections.abc import Collection
from typing import Any

from raystride.locations import __version__
from raystride.pipelines.system.storage.folder import Folder, strict_json
from raystride.pipelines.system.writer import WRITER, refuse_unknown

SEAL = "sha256"
_WRITER_COMMENT = f"# {WRITER}: "
"""`sha256sum -c` passes over comments."""
_MARK = f',\n "{SEAL}": "'.encode()


class SealBroken(ValueError):
    """A file is not as it was written; the message names it and, where there is one, the remedy."""


def seal_json(content: dict[str, Any]) -> bytes:
    """Returns the content as strict JSON with its writer's version and its seal."""
    body = strict_json(content | {WRITER: __version__}, indent=1, sort_keys=True).removesuffix("\n}").encode()
    return body + _MARK + _ending(body)


def _ending(body: bytes) -> bytes:
    return f'{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def parse_sealed(data: bytes, name: str, known: Collection[str] | None = None) -> dict[str, Any]:
    """Returns the content of a sealed file, or of one of 0.3, without seal and writer.

    Raises SealBroken, with `name`, if it is not as it was written, or no JSON object, and WrittenByNewer if it is of a newer
    version and has other keys than the `known` ones.
    """
    body, _, ending = data.rpartition(_MARK)
    is_whole = bool(body) and ending == _ending(body)
    try:
        content = json.loads(data)
    except ValueError as error:
        raise SealBroken(f"{name} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise SealBroken(f"{name} is no JSON object")
    marks = [key for key in content if key in (SEAL, WRITER)]
    if marks and not is_whole and marks != [SEAL, WRITER]:
        raise SealBroken(f"{name} does not match its own SHA-256")
    if known is not None:
        refuse_unknown(
            name,
            content.get(WRITER),
            {key: value for key, value in content.items() if value and key not in (*known, *marks)},
        )
    return {key: value for key, value in content.items() if key not in marks}


def put_sealed(folder: Folder, name: str, content: dict[str, Any]) -> None:
    """Writes a sealed JSON file, atomically."""
    folder.put(name, seal_json(content))


def read_sealed(folder: Folder, name: str, remedy: str = "", known: Collection[str] | None = None) -> dict[str, Any]:
    """Returns the content of a sealed JSON file, or of one of 0.3.

    Raises FileNotFoundError, SealBroken with `remedy`, and WrittenByNewer as `parse_sealed` does.
    """
    try:
        return parse_sealed(folder.read(name), str(folder / name), known)
    except IsADirectoryError:
        raise SealBroken(f"{folder / name} is a folder and no file{remedy and ': '}{remedy}") from None
    except SealBroken as error:
        raise SealBroken(f"{error}{remedy and ': '}{remedy}") from None


def put_sealed_beside(folder: Folder, name: str, content: Any) -> None:
    """Writes a JSON file, and before it its hash and its writer's version in a file beside."""
    put_bytes_sealed_beside(folder, name, (strict_json(content, indent=1, sort_keys=True) + "\n").encode())


def put_bytes_sealed_beside(folder: Folder, name: str, data: bytes) -> None:
    """Writes a file, and before it its hash and its writer's version in a file beside."""
    folder.put(f"{name}.{SEAL}", 2 * (_line(data, name) + b"\n") + f"{_WRITER_COMMENT}{__version__}\n".encode())
    folder.put(name, data)


def sealed_names(name: str) -> tuple[str, str]:
    """Returns the names of a file and of its hash beside."""
    return name, f"{name}.{SEAL}"


def _line(data: bytes, name: str) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()}  {name}".encode()


def read_sealed_beside(folder: Folder, name: str, remedy: str) -> Any:
    """Returns the content of a JSON file; without a hash beside, it is one of 0.3.

    Raises FileNotFoundError, ValueError if it is no JSON, and SealBroken with `remedy`.
    """
    return json.loads(read_bytes_sealed_beside(folder, name, remedy))


def read_bytes_sealed_beside(folder: Folder, name: str, remedy: str) -> bytes:
    """Returns the content of a file; without a hash beside, it is one of 0.3. Raises as `read_sealed_beside` does."""
    try:
        data, beside = folder.read(name), _read_beside(folder, name)
    except IsADirectoryError:
        raise SealBroken(f"{folder / name} or {name}.{SEAL} beside it is a folder and no file: {remedy}") from None
    # The line stands there twice: a turned bit in it does not cost the file.
    if beside is not None and _line(data, name) not in beside:
        raise SealBroken(f"{folder / name} does not match {name}.{SEAL} beside it: {remedy}")
    return data


def writer_beside(folder: Folder, name: str) -> str:
    """Returns the version that wrote a file with its hash beside; "" for 0.3."""
    _, _, last = (_read_beside(folder, name) or b"").decode(errors="replace").partition(_WRITER_COMMENT)
    return last.strip()


def _read_beside(folder: Folder, name: str) -> bytes | None:
    try:
        return folder.read(f"{name}.{SEAL}")
    except FileNotFoundError:
        return None
