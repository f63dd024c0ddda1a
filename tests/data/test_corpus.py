"""The vendored file and its split, record by record; damaged and bad text; tokenizers on any characters."""

import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import onelag.data.corpus as corpus_module
from onelag.data import load_corpus
from onelag.data.tokenizer import BPETokenizer, ByteTokenizer

FOLDER = Path(corpus_module.__file__).parent / "sotu"


@pytest.fixture(scope="module")
def sotu():
    return load_corpus("sotu")


def test_the_vendored_file_is_the_one_that_was_packed():
    told = (FOLDER / "addresses.jsonl.xz.sha256").read_text().split()[0]
    assert hashlib.sha256((FOLDER / "addresses.jsonl.xz").read_bytes()).hexdigest() == told
    notice = (FOLDER / "NOTICE.md").read_text()
    assert "PDDL-1.0" in notice and "CC0" in notice and "0.2.3" in notice


def test_split_of_the_addresses(sotu):
    """From 2000 on: shift. Of the earlier ones every tenth: held out."""
    records = [json.loads(line) for line in lzma.decompress((FOLDER / "addresses.jsonl.xz").read_bytes()).decode().splitlines()]
    assert len(records) == 233 and [r["year"] for r in records] == sorted(r["year"] for r in records)
    assert records[0]["year"] == 1790 and sum(len(r["text"]) for r in records) > 10_700_000
    earlier = [r["text"] for r in records if r["year"] < 2000]
    assert sotu.shift == tuple(r["text"] for r in records if r["year"] >= 2000)
    assert sotu.held_out == tuple(text for i, text in enumerate(earlier, 1) if i % 10 == 0)
    assert sotu.train == tuple(text for i, text in enumerate(earlier, 1) if i % 10)
    assert len({*sotu.train, *sotu.held_out, *sotu.shift}) == 233, "no document twice"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"", "is empty"),
        ("b.txt", b" \n\t", "is empty"),
        ("c.txt", b"fine\xff\xfe", r"not UTF-8 text \(byte 4\)"),
        ("d.jsonl", b'{"text": "a"}\n{"title": "b"}\n', "line 2 of"),
        ("e.jsonl", b'{"text": "a"}\nnot json\n', "line 2 of"),
        ("f.jsonl", b"\n\n", "is empty"),
        ("i.jsonl", b'{"text": 5}\n', "line 1 of .* no string, but int"),
        ("g.txt", None, "does not exist"),
        ("h.csv", b"a,b", "unknown corpus"),
    ],
)
def test_bad_text_is_one_clear_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(str(path))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_vendored_file_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "sotu"
    folder.mkdir()
    for path in FOLDER.glob("addresses*"):
        (folder / path.name).write_bytes(path.read_bytes())
    packed = folder / "addresses.jsonl.xz"
    packed.write_bytes(packed.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(corpus_module, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match="corpus is damaged"):
        load_corpus("sotu")


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4))
def test_bytes_keep_every_character(documents):
    tokens = ByteTokenizer().encode(documents)
    assert tokens.dtype == np.uint16 and (not len(tokens) or tokens.max() < 256)
    assert bytes(tokens.astype(np.uint8)).decode().split("\0")[:-1] == documents


@pytest.fixture(scope="module")
def bpe(sotu):
    return BPETokenizer(sotu.train[:12], 400)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_keeps_every_character(bpe, text):
    tokens = bpe.encode([text, "end"])
    assert tokens.max() < 400
    first = tokens[: list(tokens).index(0)]
    assert bpe.decode(first) == text


def test_a_line_separator_inside_a_string_is_no_new_line(tmp_path):
    """JSON lines end at a newline alone; str.splitlines would cut this document in two."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "one\u2028two\u0085three"}\n' * 10, encoding="utf-8")
    assert load_corpus(str(path)).held_out == ("one\u2028two\u0085three",)
