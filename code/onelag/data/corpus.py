"""Documents and their split: the vendored State of the Union addresses, or any text of the user's."""

import hashlib
import json
import lzma
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

SHIFT_FROM = 2000  # addresses of this year and later: another style, a hard shift
HOLD_OUT_EVERY = 10  # of the earlier ones, every tenth


@dataclass(frozen=True)
class Corpus:
    """Texts by split, each a tuple of documents.

    Attributes:
        train: what models are trained on.
        held_out: validation from the same distribution.
        shift: validation from a later time (empty for a user's own text).
        sha256: over the documents and their split.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    shift: tuple[str, ...]

    @property
    def sha256(self) -> str:
        parts = json.dumps([self.train, self.held_out, self.shift], ensure_ascii=True)
        return hashlib.sha256(parts.encode()).hexdigest()


def load_corpus(name: str) -> Corpus:
    """The corpus "sotu", or the documents of a .txt file (one document) or .jsonl file (one {"text": …} a line).

    A user's text keeps every tenth document for validation; a single document its last tenth.

    Raises:
        ValueError: unknown name, missing file, text that is empty or not UTF-8, a .jsonl line without "text". One line says which.
    """
    if name == "sotu":
        return _sotu()
    path = Path(name)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"unknown corpus {name!r}: use 'sotu' or the path of a .txt or .jsonl file")
    if not path.is_file():
        raise ValueError(f"the corpus file {name} does not exist")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the corpus file {name} is not UTF-8 text (byte {error.start}): convert it first") from error
    documents = [text] if path.suffix == ".txt" else [_text_of(line, number, name) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"the corpus file {name} is empty")
    if len(documents) < HOLD_OUT_EVERY:
        cuts = [len(document) * 9 // 10 for document in documents]
        return Corpus(tuple(d[:c] for d, c in zip(documents, cuts)), tuple(d[c:] for d, c in zip(documents, cuts)), ())
    return _split(documents, ())


def _split(documents: list[str], shift: tuple[str, ...]) -> Corpus:
    held_out = tuple(documents[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY])
    train = tuple(document for index, document in enumerate(documents) if index % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1)
    return Corpus(train, held_out, shift)


def _text_of(line: str, number: int, name: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'line {number} of {name} is not a JSON object with a "text"') from error
    if not isinstance(text, str):
        raise ValueError(f'line {number} of {name} has a "text" that is no string, but {type(text).__name__}')
    return text


def _sotu() -> Corpus:
    folder = files("onelag.data") / "sotu"
    packed = (folder / "addresses.jsonl.xz").read_bytes()
    expected = (folder / "addresses.jsonl.xz.sha256").read_text(encoding="ascii").split()[0]
    if hashlib.sha256(packed).hexdigest() != expected:
        raise ValueError("the vendored corpus is damaged (its sha256 differs): install onelag again")
    records = [json.loads(line) for line in lzma.decompress(packed).decode("utf-8").splitlines()]
    earlier = [record["text"] for record in records if record["year"] < SHIFT_FROM]
    return _split(earlier, tuple(record["text"] for record in records if record["year"] >= SHIFT_FROM))
