"""Finds text files, chooses the held-out ones by their names alone, and reads the documents of a file.

Other files than texts and Parquet (another table, an archive) are refused: their syntax would be trained like words.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paddle_dp.datasets._parquet import is_parquet, records
from paddle_dp.datasets._paths import MissingDataError, existing_path

Named = tuple[str, Path]
"""A file with its name relative to the given folder, which is equal on every machine."""
Span = tuple[float, float]
"""The part of a file to read, start and stop in [0, 1]: of its documents, or of its bytes if it is one document."""

_BY_PANDAS = "write it as one document a line: pandas.read_{}('{}').to_json('data.jsonl', orient='records', lines=True)"
_UNPACK = "unpack it: {} '{}'"
# Files that are not plain text, by suffix: the kind, the advice, and a word for the advice.
_CONTAINERS = {
    ".json": ("JSON", f"call it .jsonl if each of its lines is an object; else {_BY_PANDAS}", "json"),
    ".csv": ("a table", _BY_PANDAS, "csv"),
    ".tsv": ("a table", _BY_PANDAS, "table"),
    ".xlsx": ("a table", _BY_PANDAS, "excel"),
    ".arrow": ("a table", _BY_PANDAS, "feather"),
    ".feather": ("a table", _BY_PANDAS, "feather"),
    ".gz": ("compressed", _UNPACK, "gunzip -k"),
    ".bz2": ("compressed", _UNPACK, "bunzip2 -k"),
    ".xz": ("compressed", _UNPACK, "unxz -k"),
    ".zst": ("compressed", _UNPACK, "unzstd"),
    ".zip": ("an archive", _UNPACK, "unzip"),
    ".tar": ("an archive", _UNPACK, "tar -xf"),
    ".tgz": ("an archive", _UNPACK, "tar -xf"),
    "PAR1": ("a Parquet file", "call it .parquet", ""),
    ".pdf": ("a document with a layout", "take its text out: {} '{}'", "pdftotext"),
}
_BEGINNINGS = {
    b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst", b"PK\x03\x04": ".zip",
    b"PAR1": "PAR1", b"ARROW1": ".arrow", b"%PDF-": ".pdf",
}  # fmt: skip
_LOOKED_AT = 1 << 13  # bytes of a file that are searched for a zero byte, which no text has
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def text_files(path: str | None, has_lines: bool = False) -> list[Named]:
    """The files of `path` (a folder, a file or a glob) sorted by name; without a path, Python's standard library.
    `has_lines`: whether each line is parsed, so that a .json file may be one of them."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _below(root, ".py", _NOT_SOURCE)
        if not files:
            raise MissingDataError(f"{root} holds no Python sources: name texts to read, dataset.path=…")
        return files
    if glob.has_magic(path):
        files = _matching(Path(path).expanduser())
    else:
        there = existing_path(path, "a folder of text files, a file, or a glob such as 'texts/**/*.md'")
        files = [(there.name, there)] if there.is_file() else _below(there, "", set())
    if not files:
        raise MissingDataError(f"dataset.path: {path} holds no files")
    for _, file in files:
        if not (has_lines and file.suffix.lower() == ".json"):
            _refuse_container(file, file.suffix.lower(), glob_of=path)
    return files


def holds_documents(file: Path) -> bool:
    """True if the file has many documents (by its suffix): a JSON object with one a line, or a row of a table."""
    return is_parquet(file) or _holds_lines(file)


def _holds_lines(file: Path) -> bool:
    return file.suffix.lower() in (".jsonl", ".ndjson")


def _refuse_container(file: Path, suffix: str, glob_of: str | None = None) -> None:
    """Raises MissingDataError for a file that is not plain text. `glob_of`: the folder or glob it was found in."""
    if suffix not in _CONTAINERS:
        return
    kind, how, command = _CONTAINERS[suffix]
    folder = glob_of is not None and Path(glob_of).expanduser().is_dir()
    leave_out = f" To leave such files out, give a glob: dataset.path='{glob_of}/**/*.txt'." if folder else ""
    raise MissingDataError(
        f"dataset.path: {file} is {kind}, and its syntax would be trained as text: "
        f"{how.format(command, file)}.{leave_out}"
    )


def documents(file: Path, field: str, span: Span = (0.0, 1.0)) -> Iterator[bytes]:
    """Yields the documents of a part of a file: the `field` of each line of a .jsonl file, or of each row of a .parquet
    file; else the text of the file is one document.

    Raises MissingDataError for a file that is no text, and for a line that is not JSON or lacks the field.
    """
    if holds_documents(file):
        for label, record in numbered(file, field, span):
            yield _document(label, record, field)
    else:
        text = _text(file)
        start, stop = (round(share * len(text)) for share in span)
        yield text[start:stop]


def numbered(
    file: Path, field: str, span: Span, further: Sequence[str] = ()
) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Yields ("file:number", line) of a part of a .jsonl file, or of a .json file with an object a line, lines that are
    empty left out, or ("file:number", row) of a .parquet file: the columns `field` and `further`, as far as they exist.
    Raises MissingDataError for another file."""
    if is_parquet(file):
        yield from ((f"{file}:{number}", record) for number, record in records(file, field, span, further))
        return
    if not _holds_lines(file) and file.suffix.lower() != ".json":
        raise MissingDataError(
            f"dataset.path: {file} is no .jsonl file, with an object a line, and no .parquet file: name one, or a "
            "glob, dataset.path='data/**/*.jsonl'."
        )
    lines = enumerate(_text(file, has_lines=True).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
    filled = [(number, line) for number, line in lines if line.strip()]
    start, stop = (round(share * len(filled)) for share in span)
    yield from ((f"{file}:{number}", line) for number, line in filled[start:stop])


def _text(file: Path, has_lines: bool = False) -> bytes:
    """The content of a file; with `has_lines` of one whose lines are parsed. Raises MissingDataError if it is no
    text."""
    if not has_lines:
        _refuse_container(file, file.suffix.lower())
    text = file.read_bytes()
    for beginning, kind in _BEGINNINGS.items():
        if text.startswith(beginning):
            _refuse_container(file, kind)
    if b"\0" in text[:_LOOKED_AT]:
        raise MissingDataError(
            f"dataset.path: {file} has a byte 0, so it is no text in UTF-8: convert it (iconv -f UTF-16 -t UTF-8), or "
            "leave it out by a glob, dataset.path='texts/**/*.txt'."
        )
    return text


def _document(label: str, line: bytes | dict[str, Any], field: str) -> bytes:
    """The text of one line of a .jsonl file, or of a row. `label` names it in errors."""
    record = line if isinstance(line, dict) else _record(label, line, field)
    if field not in record:
        names = ", ".join(record) or "no fields"
        raise MissingDataError(
            f"{label}: there is no field '{field}', which is the text of a document: it has {names}. Name the one that "
            "is: dataset.field=…"
        )
    if not isinstance(record[field], str):
        raise MissingDataError(
            f"{label}: the field '{field}' is {type(record[field]).__name__}, not a text: name one that is "
            "(dataset.field), or write the text that is to be learned, with its roles and marks, into one."
        )
    return record[field].encode("utf-8", "surrogatepass")


def _record(label: str, line: bytes, field: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # JSON's and UTF-8's errors
        raise MissingDataError(
            f"{label}: this line is not JSON: {error}. A .jsonl file has one object a line."
        ) from None
    if not isinstance(record, dict):
        raise MissingDataError(
            f'{label}: this line is no JSON object, such as {{"{field}": "…"}}: {line[:40]!r}'
        )
    return record


def _below(root: Path, suffix: str, without: set[str]) -> list[Named]:
    """The files below `root` with names ending in `suffix`, without hidden files and folders."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and name[0] != "."]
        paths += [Path(folder, name) for name in names if name.endswith(suffix) and name[0] != "."]
    return _named(root, (path for path in paths if path.is_file()))


def _matching(pattern: Path) -> list[Named]:
    segments = pattern.parts
    fixed = next(number for number, segment in enumerate(segments) if glob.has_magic(segment))
    files = map(Path, glob.glob(str(pattern), recursive=True))
    return _named(Path(*segments[:fixed]), (file for file in files if file.is_file()))


def _named(root: Path, files: Iterable[Path]) -> list[Named]:
    return sorted((file.relative_to(root).as_posix(), file) for file in files)


def first_bytes(files: list[Named], limit: int) -> list[Named]:
    """The first files that together have at most `limit` bytes. Raises MissingDataError if the first one is larger."""
    total, selected = 0, []
    for name, file in files:
        total += file.stat().st_size
        if total > limit:
            break
        selected.append((name, file))
    if not selected:
        raise MissingDataError(f"dataset.limit: the first file, {files[0][1]}, is larger than that")
    return selected


def choose_test_files(files: list[Named], fraction: float) -> set[str]:
    """The names of the ceil(fraction · files) files with the smallest hashes, but never of all files.

    A file's hash does not depend on the other files, so a new file changes the split of few others.
    """
    number = count_test(fraction, len(files))
    return set(sorted((name for name, _ in files), key=_hash)[:number])


def count_test(fraction: float, count: int) -> int:
    """How many of `count` are held out: the share rounded up, but never all."""
    return max(0, min(math.ceil(fraction * count - 1e-9), count - 1))


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
