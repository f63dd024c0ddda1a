"""Where documents come from at scale: FineWeb-Edu through `datasets`, streamed, or a folder of text files. And tokenizers by name."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from onelag.data.tokenizer import ByteTokenizer

FINEWEB_EDU = ("HuggingFaceFW/fineweb-edu", "sample-350BT")
END_TOKENS = ("<|endoftext|>", "<|end|>", "</s>", "<eos>", "<|end_of_text|>")


def documents_of(source: str, skip: int = 0) -> Iterator[str]:
    """The documents of a source in a fixed order, without the first `skip`.

    Args:
        source: "fineweb-edu", or a .txt or .jsonl file, or a folder that is searched for them (in the order of their names).

    Raises:
        ValueError: no such source, no text in it, a file that is not UTF-8 or JSON lines; `datasets` missing, or its server out of reach.
    """
    return _fineweb_edu(skip) if source == "fineweb-edu" else _local(Path(source), skip)


def _fineweb_edu(skip: int) -> Iterator[str]:
    name, config = FINEWEB_EDU
    try:
        import datasets
    except ImportError as error:
        raise ValueError('fineweb-edu needs the package datasets: pip install "onelag[cluster]"') from error
    try:
        stream = datasets.load_dataset(name, config, split="train", streaming=True).skip(skip)
        for record in stream:
            yield record["text"]
    except (OSError, ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} cannot be read from the Hugging Face hub ({_first_line(error)}): check the network, or give a folder of text files") from error


def _local(source: Path, skip: int) -> Iterator[str]:
    if not source.exists():
        raise ValueError(f"the source {source} does not exist: give fineweb-edu, a .txt or .jsonl file, or a folder of them")
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.suffix in (".txt", ".jsonl"))
    if not files or files[0].suffix not in (".txt", ".jsonl"):
        raise ValueError(f"the source {source} holds no .txt or .jsonl file")
    number = 0
    for path in files:
        for document in _documents_in(path):
            number += 1
            if number > skip:
                yield document
    if not number:
        raise ValueError(f"the source {source} is empty")


def _documents_in(path: Path) -> Iterator[str]:
    """A .txt file is one document, a .jsonl file one per line; read line by line. Blank ones do not count."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            if path.suffix == ".txt":
                text = file.read()
                if text.strip():
                    yield text
                return
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise ValueError(f'line {number} of {path} is not a JSON object with a "text"') from error
                if not isinstance(text, str):
                    raise ValueError(f'line {number} of {path} has a "text" that is no string, but {type(text).__name__}')
                if text.strip():
                    yield text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: convert it first") from error


class HubTokenizer:
    """A tokenizer of the Hugging Face hub by name, or a tokenizer.json by path. Every document is ended by its end token.

    Raises:
        ValueError: it cannot be had, or has no end token that we know.
    """

    def __init__(self, name: str):
        from tokenizers import Tokenizer

        path = Path(name)
        try:
            if path.suffix == ".json" or path.is_dir():
                self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
            else:
                self._tokenizer = Tokenizer.from_pretrained(name)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(
                f"the tokenizer {name!r} cannot be had ({_first_line(error)}): it is fetched from huggingface.co once; "
                "without a network give the path of its tokenizer.json"
            ) from error
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ends = [token for token in map(self._tokenizer.token_to_id, END_TOKENS) if token is not None]
        if not ends:
            raise ValueError(f"the tokenizer {name!r} has none of the end tokens {', '.join(END_TOKENS)}")
        self.end = ends[0]
        self.sha256 = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def encode_each(self, documents: Sequence[str]) -> Iterator[np.ndarray]:
        """One array per document, its end token included."""
        for encoding in self._tokenizer.encode_batch(list(documents), add_special_tokens=False):
            yield np.array([*encoding.ids, self.end], dtype=np.uint32)


class _Bytes:
    """`ByteTokenizer`, one document at a time."""

    vocab_size, sha256 = ByteTokenizer.vocab_size, ByteTokenizer.sha256

    def encode_each(self, documents: Sequence[str]) -> Iterator[np.ndarray]:
        for document in documents:
            yield ByteTokenizer().encode([document])


def tokenizer_by_name(name: str) -> HubTokenizer | _Bytes:
    """ "bytes", a name on the hub, or the path of a tokenizer.json."""
    return _Bytes() if name == "bytes" else HubTokenizer(name)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
