"""Tokens on disk: files of raw little-endian token ids that are memory-mapped, and a manifest that says what they hold and how to go on.

    folder/manifest.json          tokenizer, source, documents read so far, and per shard: file, split, tokens, sha256
    folder/train-00000.bin        uint16 (uint32 where the vocabulary needs it), documents one after the other, each ended by the tokenizer's end token
    folder/held-out-00000.bin

A shard becomes real with the manifest that names it: it is written aside, renamed, and then the manifest is replaced. A kill at any moment costs the
documents since the last shard and nothing else.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

MANIFEST = "manifest.json"
VERSION = 1
SPLITS = ("train", "held-out")


class ShardError(ValueError):
    """A folder of shards that cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Shard:
    """One file. `tokens` is its length, `sha256` that of its bytes."""

    file: str
    split: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds. `documents` of the source have been read; `complete` when all that were asked for have."""

    source: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    dtype: str
    hold_out_every: int
    documents: int = 0
    complete: bool = False
    shards: tuple[Shard, ...] = field(default=())

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    @property
    def sha256(self) -> str:
        """Of all shards in order; the folder's name and place do not matter."""
        return hashlib.sha256(json.dumps([[s.split, s.tokens, s.sha256] for s in self.shards]).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Replaces the folder's manifest in one step."""
        _replace(folder / MANIFEST, (json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n").encode())

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Raises ShardError for a folder without a manifest, or with one that cannot be read."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("version") != VERSION:
                raise ShardError(f"{path} is of another version of onelag: prepare the data again in an empty folder")
            return Manifest(**{**content, "shards": tuple(Shard(**shard) for shard in content["shards"])})
        except FileNotFoundError as error:
            raise ShardError(f"{folder} holds no {MANIFEST}: prepare it with `onelag download`") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise error if isinstance(error, ShardError) else ShardError(f"{path} is damaged ({error}): prepare the data again") from error


class ShardWriter:
    """Appends documents to a folder of shards and can go on where an earlier one stopped.

    Args:
        folder: made if it is not there.
        manifest: what it is to hold; an existing manifest must agree (all but counts), and its documents are not asked for again.
        shard_tokens: a shard is closed after the document with which it reaches this length.

    Raises:
        ShardError: the folder holds something else.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard_tokens: int):
        self.folder, self.shard_tokens = folder, shard_tokens
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            old = Manifest.load(folder)
            for name in ("source", "tokenizer", "tokenizer_sha256", "vocab_size", "dtype", "hold_out_every"):
                if getattr(old, name) != getattr(manifest, name):
                    raise ShardError(f"{folder} was prepared with {name}={getattr(old, name)!r}, not {getattr(manifest, name)!r}: use another folder")
            manifest = old
        self.manifest = manifest
        self._pending: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        self._length, self._documents = 0, manifest.documents

    def add(self, tokens: np.ndarray) -> None:
        """The next document of the source, in the manifest's dtype."""
        self._documents += 1
        split = "held-out" if self._documents % self.manifest.hold_out_every == 0 else "train"
        self._pending[split].append(np.asarray(tokens, dtype=self.manifest.dtype))
        self._length += len(tokens)
        if self._length >= self.shard_tokens:
            self.commit()

    @property
    def documents(self) -> int:
        """Read so far, with those not yet in a shard."""
        return self._documents

    @property
    def tokens(self) -> int:
        """In all splits, with those not yet in a shard."""
        return sum(shard.tokens for shard in self.manifest.shards) + self._length

    def commit(self, complete: bool = False) -> None:
        """Writes what is pending."""
        shards = list(self.manifest.shards)
        for split, parts in self._pending.items():
            if parts:
                data = np.concatenate(parts)
                number = sum(shard.split == split for shard in shards)
                content = data.astype(data.dtype.newbyteorder("<")).tobytes()
                shard = Shard(f"{split}-{number:05d}.bin", split, len(data), hashlib.sha256(content).hexdigest())
                _replace(self.folder / shard.file, content)
                shards.append(shard)
        self.manifest = replace(self.manifest, documents=self._documents, complete=complete, shards=tuple(shards))
        self.manifest.save(self.folder)
        self._pending, self._length = {split: [] for split in SPLITS}, 0


class ShardedTokens(Sequence):
    """The shards of a split as one array of tokens that stays on disk: `len`, and slices as numpy arrays."""

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: str):
        self.dtype = np.dtype(dtype)
        kind = self.dtype.newbyteorder("<")
        self._parts = [np.memmap(folder / shard.file, dtype=kind, mode="r") for shard in shards]
        self._ends = np.cumsum([0] + [shard.tokens for shard in shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, place: slice | int) -> np.ndarray | int:
        if not isinstance(place, slice):
            if not -len(self) <= place < len(self):
                raise IndexError(place)
            place %= len(self)
            return self[place : place + 1][0]
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise IndexError("sharded tokens can be sliced with step 1 only")
        pieces = [np.asarray(part[max(start - begin, 0) : stop - begin], dtype=self.dtype) for begin, part in self._touching(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def _touching(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        number = int(np.searchsorted(self._ends, start, side="right")) - 1
        while number < len(self._parts) and self._ends[number] < stop:
            if self._ends[number + 1] > start:
                yield int(self._ends[number]), self._parts[number]
            number += 1


def open_shards(folder: Path) -> tuple[Manifest, dict[str, ShardedTokens]]:
    """The manifest and the tokens of each split. Sizes are checked, contents are not (see `verify_shards`).

    Raises:
        ShardError: no manifest, preparation not finished, a shard that is missing or has another size.
    """
    manifest = Manifest.load(folder)
    if not manifest.complete:
        raise ShardError(f"{folder} is not complete ({manifest.tokens('train'):,} tokens so far): run the same `onelag download` again, it goes on from there")
    for shard in manifest.shards:
        path, expected = folder / shard.file, shard.tokens * np.dtype(manifest.dtype).itemsize
        if not path.is_file():
            raise ShardError(f"the shard {path} is missing: copy it there or prepare the data again")
        if path.stat().st_size != expected:
            raise ShardError(f"the shard {path} has {path.stat().st_size:,} bytes, but {expected:,} were written: copy it again or prepare the data again")
    return manifest, {split: ShardedTokens(folder, [s for s in manifest.shards if s.split == split], manifest.dtype) for split in SPLITS}


def verify_shards(folder: Path) -> Iterator[Shard]:
    """Reads every shard and yields it once its sha256 has been found right. Raises ShardError for the first one that is not."""
    manifest, _ = open_shards(folder)
    for shard in manifest.shards:
        with open(folder / shard.file, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != shard.sha256:
            raise ShardError(f"the shard {folder / shard.file} is damaged (sha256 {found[:12]}…, expected {shard.sha256[:12]}…): copy it again or prepare the data again")
        yield shard


def _replace(path: Path, content: bytes) -> None:
    """Writes beside and renames, so that `path` is old or new, never half."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
