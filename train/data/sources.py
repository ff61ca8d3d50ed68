"""Streams rows of data files and of the hub, each with its place, so that messages can name file and line.

JSON Lines are read line by line, because a reader of whole files rejects the file at its first bad line; Parquet, Arrow
and the hub are read through `datasets`, and CSV through pandas, as streams. Independent of the meaning of a row.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import itertools
import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from infer.settings.paths import REPO_ROOT, resolve_path
from models.checks import home_path
from train.config import ChatDataConfig, FilesDataConfig, HubDataConfig, as_list
from train.data.builtin_prompts import builtin_items
from train.data.entries import Item, in_turn, shaped

OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
RowSource = ChatDataConfig | FilesDataConfig | HubDataConfig
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
CSV_ROWS = 1000  # of which are read at a time
# where the sets of the manuals' commands are published, by a part of their paths
PUBLISHED = {
    "gsm8k": "https://github.com/openai/grade-school-math, grade_school_math/data",
    "humaneval": "https://github.com/openai/human-eval, data/HumanEval.jsonl.gz",
    "arena-hard": "https://github.com/lmarena/arena-hard-auto, data",
    "mbpp": "https://github.com/amazon-science/mxeval, data/mbxp",
    "sgd-dialogues": "https://github.com/google-research-datasets/dstc8-schema-guided-dialogue, its turns as messages",
    "self-instruct": "https://github.com/yizhongw/self-instruct, data",
}


def read_items(data: RowSource, *, held_out: bool) -> Iterator[Item] | None:
    """Return the rows of one side of the split; None if the data have no held-out side of their own.

    Raises ValueError if there is nothing to read; later errors raise it during iteration, naming the place.
    """
    if isinstance(data, ChatDataConfig):
        return builtin_items(held_out=held_out)
    if isinstance(data, HubDataConfig):
        split = data.held_out_split if held_out else data.split
        return None if split is None else read_hub(data, split)
    key, paths = ("data.held_out_path", data.held_out_path) if held_out else ("data.path", data.path)
    if paths is None:
        return None
    parts: list[Iterator[Item]] = []
    for entry in as_list(paths):
        if isinstance(entry, str):
            parts += [read_file(file) for file in find_files(key, entry, data.root)]
        else:
            files = find_files(key, entry["path"], data.root)
            rows = itertools.chain.from_iterable(read_file(file) for file in files)
            parts.append(shaped(rows, entry, data.columns))
    return in_turn(parts) if data.interleave else itertools.chain.from_iterable(parts)


def find_files(key: str, paths: str | Iterable[str], root: str | None = None) -> list[Path]:
    """Expand files, folders (all files of a known format below them) and patterns, in their order.

    Raises ValueError if one matches no file, or for an unknown format.
    """
    files: list[Path] = []
    for text in [paths] if isinstance(paths, str) else paths:
        path = resolve_path(root or ".") / home_path(text)
        saved = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()  # by `Dataset.save_to_disk`
        if saved or path.is_file():
            files.append(path)
            continue
        if path.is_dir():
            matches = [file for file in sorted(path.rglob("*")) if file.is_file() and format_of(file) in FORMATS]
        else:
            names = glob.glob(str(path), recursive=True, include_hidden=True)
            matches = [file for file in sorted(map(Path, names)) if file.is_file()]
        if not matches:
            raise ValueError(
                f"{key}={text}: no such file, and no folder or pattern with files in it ({', '.join(FORMATS)}); "
                f"looked for {path}{where_published(path)}"
            )
        files += matches
    for file in files:
        if file.is_file() and format_of(file) not in FORMATS:
            raise ValueError(
                f"{key}={file}: unknown format; give {', '.join(FORMATS)}, the first four also with .gz, .xz or .bz2"
            )
    return files


def where_published(path: Path) -> str:
    """Return a hint where a data set of the manuals can be downloaded, empty for any other path."""
    names = {part.partition(".")[0].lower() for part in path.parts}
    return "".join(f"; {name} is published at {place}" for name, place in PUBLISHED.items() if name in names)


def format_of(file: Path) -> str:
    """Return the suffix that names the format, without a compression suffix."""
    return Path(file.stem).suffix if file.suffix in OPENERS else file.suffix


def place_of(file: Path) -> str:
    """Return the file's path for messages, relative to the repository if inside; the folder tells namesakes apart."""
    return str(file.relative_to(REPO_ROOT) if file.is_relative_to(REPO_ROOT) else file)


def read_file(file: Path) -> Iterator[Item]:
    try:
        if file.is_dir() or format_of(file) in (".csv", ".parquet", ".arrow"):
            yield from read_tables(file)
        else:
            opener: Any = OPENERS.get(file.suffix, open)
            with opener(file, "rb") as stream:
                yield from read_array(file, stream) if format_of(file) == ".json" else read_lines(file, stream)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def read_lines(file: Path, stream: IO[bytes]) -> Iterator[Item]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield parse(f"{place_of(file)}, line {number}", line)


def read_array(file: Path, stream: IO[bytes]) -> Iterator[Item]:
    """Read a JSON array of rows, or an object with one such array among its values.

    Any other object is one row. JSON Lines with the suffix .json are read as well. Raises ValueError for other content.
    """
    content = stream.read()
    parsed = parse(place_of(file), content)
    if parsed.error is not None:
        first = content.splitlines()[0] if content.strip() else b""
        if parse("", first).error is not None:
            raise ValueError(f"{file}: {parsed.error}")
        yield from read_lines(file, iter(content.splitlines()))  # type: ignore[arg-type]
        return
    rows = parsed.row
    if isinstance(rows, dict):
        arrays = [value for value in rows.values() if isinstance(value, list)]
        rows = arrays[0] if len(arrays) == 1 and all(isinstance(row, dict) for row in arrays[0]) else [rows]
    if not isinstance(rows, list):
        raise ValueError(f"{file}: must hold an array of rows")
    for number, row in enumerate(rows, start=1):
        yield Item(f"{place_of(file)}, row {number}", row)


def parse(place: str, text: bytes) -> Item:
    try:
        return Item(place, json.loads(text))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        return Item(place, None, f"not JSON ({error.msg} at {where})")
    except (UnicodeDecodeError, RecursionError) as error:
        return Item(place, None, f"not JSON ({error})")


def read_tables(file: Path) -> Iterator[Item]:
    """Read CSV, Parquet, an Arrow file, or a folder written by `save_to_disk`. Raises ValueError."""
    import pandas
    import pyarrow.parquet
    from datasets import Dataset, load_dataset, load_from_disk

    try:
        if file.is_dir():
            rows: Any = load_from_disk(str(file))
        elif format_of(file) == ".csv":  # which `datasets` would type: an answer of 42 is a text here
            chunks = pandas.read_csv(file, dtype=str, na_filter=False, chunksize=CSV_ROWS)
            rows = itertools.chain.from_iterable(chunk.to_dict("records") for chunk in chunks)
        elif file.suffix == ".parquet" and not pyarrow.parquet.read_metadata(file).num_rows:
            rows = []  # which `datasets` cannot stream
        elif file.suffix == ".arrow":
            rows = Dataset.from_file(str(file))
        else:
            rows = load_dataset("parquet", data_files=[str(file)], split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield Item(f"{place_of(file)}, row {number}", row)
    except (pyarrow.ArrowException, ValueError, RuntimeError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from error


def read_hub(data: HubDataConfig, split: str) -> Iterator[Item]:
    """Stream a split of a hub data set. Raises ValueError if it cannot be opened; later errors, during iteration."""
    import datasets

    assert isinstance(data.path, str)
    try:
        rows = datasets.load_dataset(data.path, name=data.subset, split=split, revision=data.revision, streaming=True)
    except Exception as error:  # the library, the hub client and each file format have exceptions of their own
        raise ValueError(
            f"data.path={data.path}: split {split!r} of it cannot be read ({type(error).__name__}: {error}). "
            "Check the spelling, data.split, data.subset and the network; files of your own are data=files"
        ) from error
    return stream_hub(data.path, split, rows)


def stream_hub(path: str, split: str, rows: Iterable[Any]) -> Iterator[Item]:
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield Item(f"{path}, row {number}", row)
    except Exception as error:  # from the network, a file format or the data set itself
        raise ValueError(
            f"data.path={path}: split {split!r} breaks off after row {number} ({type(error).__name__}: {error}). Run "
            "the same command again, which asks for no answer twice; if it ends there again, download the files and "
            "give them as data=files data.path=<folder>, or ask for fewer data.num_sequences"
        ) from error
