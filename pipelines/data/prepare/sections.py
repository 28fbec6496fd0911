"""Sections of a part that cannot be divided, as a packed file: each is written as it comes, and a kill loses one.

A training that has begun reads them as they come, too. The next one goes on within a document if its tokens are a stream.

sections/00003-0007.json     its record: shards by split, faults, and counts, as in that of a part; the bytes of its text;
                             whether it is the part's last
sections/00003-0007.hashes   the hashes of its documents

for section in load_sections(folder, 3): ...              # those that an interrupted preparation has written
"""

from collections.abc import Mapping
from typing import Any

from raystride.pipelines.data.prepare.hash_list import is_intact
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import read_sealed

SECTIONS = "sections"


def section_name(part: int, section: int) -> str:
    """Returns the name of a section."""
    return f"{part:05d}-{section:04d}"


def load_sections(folder: Folder, part: int) -> list[dict[str, Any]]:
    """Returns the records of a part's first sections with intact shards, without the last one, which a part's end writes."""
    found: list[dict[str, Any]] = []
    while True:
        try:
            record = read_section(folder, part, len(found))
            if record["last"] or not all(is_intact(folder, shard) for shard in record["shards"].values() if shard):
                return found
        except (OSError, ValueError, KeyError):
            return found
        found.append(record)


def read_section(folder: Folder, part: int, section: int) -> dict[str, Any]:
    """Returns the record of a section. Raises FileNotFoundError if it is not written."""
    record: dict[str, Any] = read_sealed(folder / SECTIONS, f"{section_name(part, section)}.json", "prepare it again")
    return record


def shards_of_record(record: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Returns the shards of a part's record, in order."""
    records = [*record.get("sections", ()), record["shards"]]
    return [shard for shards in records if (shard := shards[split])]
