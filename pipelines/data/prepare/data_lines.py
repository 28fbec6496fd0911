"""Lines about prepared data: what was read and left out, classes, lost text, cut and dropped documents. A number that says
nothing has no line.

    for line in list_data_lines(prepared.manifest, prepared.folder): log(f"data: {line}")
    describe_files(manifest.source)                           # of one source, also before it is prepared
"""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare.lost_text import describe_lost_text, quote_visibly
from raystride.pipelines.data.prepare.manifest import FILE, Manifest
from raystride.pipelines.data.prepare.stages import SPLITS
from raystride.pipelines.data.sources.hub import HuggingFaceReader
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.system.credentials import redact_uris
from raystride.pipelines.system.storage.folder import Folder

MAX_FREQUENT, MAX_RARE = 20, 3
"""Classes that are named: the most frequent ones, and the rarest of all others."""
MAX_NAMED = 5
"""Classes, or groups of them, that a warning names."""
MAX_NAME = 40
"""Characters of a class's name in the line of classes."""
WARNING = "warning: "


def source_facts(data: DataConfig, source: Source, validation: Source | None) -> dict[str, Any]:
    """Returns the facts of a source that its manifest stores: kind, name, files, bytes, and notes about what is left out."""
    facts: dict[str, Any] = {"kind": source.kind, "name": redact_uris(data.source), "files": len(source.files)}
    facts["bytes"] = sum(file.size for file in source.files)
    if isinstance(source.reader, HuggingFaceReader):
        facts["split"] = source.reader.split
    notes = [*source.describe(), *(validation.describe() if validation else ())]
    if notes:
        facts["notes"] = [redact_uris(note) for note in dict.fromkeys(notes)]
    if validation:
        facts["validation_files"] = len(validation.files)
    return facts


def list_data_lines(manifest: Manifest, folder: Folder) -> list[str]:
    """Returns the lines of a preparation in this folder, warnings last; those of a mixture are one line a source."""
    return join_sources({name: _describe_source(own, place) for name, (place, own) in manifest.by_source(folder).items()})


def join_sources(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the lines of sources by name, warnings last: a line for each, unless it is the only one, with the name ""."""
    lines: list[str] = []
    for name, own in found.items():
        facts = [line for line in own if not is_warning(line)]
        lines += [f"{name}: {'; '.join(facts)}"] if name else facts
        lines += [line.replace(WARNING, f"{WARNING}{name}: ", 1) if name else line for line in own if is_warning(line)]
    return sorted(lines, key=is_warning)


def is_warning(line: str) -> bool:
    """Returns whether a line warns of something."""
    return line.startswith(WARNING)


def _describe_source(manifest: Manifest, folder: Folder) -> list[str]:
    if "dataset" in manifest.learned:  # of a user's own, which has no files
        return []
    lines = describe_files(manifest.source)
    if "parts" in manifest.source:  # a generation, whose counts are not yet those of the data
        return lines
    if counts := _label_counts(manifest):
        totals = {name: sum(pair) for name, pair in counts.items() if sum(pair)}  # a mixture has classes of other sources
        lines += [*describe_classes(totals), *_warn_of_single_documents(totals)]
        lines += _warn_of_untrained([name for name, (train, _) in counts.items() if not train and totals.get(name, 0) > 1])
    return [*lines, *_describe_losses(manifest, folder), *describe_lost_text(manifest.source.get("lost_text", {}))]


def describe_files(facts: Mapping[str, Any]) -> list[str]:
    """Returns the line with the files or the split that are read, then notes about what is left out."""
    found: list[str] = []
    if "split" in facts:
        found = [f"split: {facts['split']} of {facts['name']}"]
    elif "files" in facts and facts["kind"] != "registered":
        others = facts.get("validation_files")
        found = [f"files: {facts['files']:,} read{f', {others:,} more to validate on' if others else ''}"]
    return [*found, *facts.get("notes", ())]


def _label_counts(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Returns the training and the validation documents of each label; empty if they were not counted, or not all."""
    labels, counts = manifest.learned.get("labels", ()), manifest.source.get("labels", {})
    pairs = list(zip(*(counts.get(split, ()) for split in SPLITS), strict=True))
    documents = sum(manifest.documents(split) for split in SPLITS)
    return dict(zip(labels, pairs, strict=True)) if pairs and sum(map(sum, pairs)) == documents else {}


def describe_classes(counts: Mapping[str, int], title: str = "classes") -> list[str]:
    """Returns the line with the classes and their documents, then a warning about those that look alike."""
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    if len(ordered) > MAX_FREQUENT + MAX_RARE:
        left = len(ordered) - MAX_FREQUENT - MAX_RARE
        ordered = [*ordered[:MAX_FREQUENT], "", *ordered[-MAX_RARE:]]
        title = f"{len(counts):,} {title}"
    shown = [f"{_one_line(name)} {counts[name]:,}" if name else f"{left:,} more" for name in ordered]
    return [f"{title}: {', '.join(shown)}", *_warn_of_lookalikes(counts)]


def _warn_of_lookalikes(names: Iterable[str]) -> list[str]:
    groups = defaultdict(list)
    for name in names:
        groups[_appearance(name)].append(name)
    alike = [" and ".join(map(quote_visibly, sorted(group))) for group in groups.values() if len(group) > 1]
    if not alike:
        return []
    return [f"{WARNING}classes look alike, and are different ones: {_name_some(alike)}; give each one spelling in the data"]


def _appearance(name: str) -> str:
    """Returns what a reader sees of a name: without case, compatibility forms, invisible characters and repeated blanks."""
    visible = "".join(
        character for character in name if unicodedata.category(character) not in ("Cf", "Cc") or character.isspace()
    )
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", visible).casefold()).split())


def _warn_of_single_documents(counts: Mapping[str, int]) -> list[str]:
    single = [quote_visibly(name) for name, count in counts.items() if count == 1]
    if not single:
        return []
    what = f"{len(single):,} classes have one document each" if len(single) > 1 else "a class has one document"
    return [f"{WARNING}{what}: {_name_some(single)}"]


def _warn_of_untrained(names: Sequence[str]) -> list[str]:
    found = _name_some([quote_visibly(name) for name in names])
    return [f"{WARNING}no document to train on, but some to validate, in {found}"] if names else []


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _one_line(name: str) -> str:
    short = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
    return short if short.isprintable() else quote_visibly(short)


def _describe_losses(manifest: Manifest, folder: Folder) -> list[str]:
    """Returns lines about documents that are truncated, dropped or skipped."""
    facts = manifest.source
    lines = [facts["also_in_training"]] if "also_in_training" in facts else []
    if cut := facts.get("cut"):
        documents = sum(manifest.documents(split) for split in SPLITS)
        longest = f", the longest has {facts['longest']:,} tokens" if facts.get("longest", 0) > 1 else ""
        share = f"{cut:,} of {documents:,} examples ({100 * cut / documents:.3g}%)"
        lines.append(f"cut: {share} are longer than model.context allows{longest}")
    if dropped := facts.get("dropped"):
        # The name of a step is an import path, with a dot.
        lines.append("left out " + ", ".join(f"{count:,} {'by ' * ('.' in why)}{why}" for why, count in dropped.items()))
    if manifest.skipped:
        named = f"the first {manifest.skipped[0]['place']}: {manifest.skipped[0]['reason']}"
        count = facts.get("skipped", len(manifest.skipped))
        lines.append(f"{count:,} files or documents skipped, {named}; listed in {folder / FILE}")
    return lines
