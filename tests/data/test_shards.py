"""Tokens on disk: the same as in memory, resumed at any kill, refused when damaged."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.data import Sampler, load_source, validation_batches
from onelag.data.documents import HubTokenizer, documents_of, tokenizer_by_name
from onelag.data.download import DownloadCommand, prepare
from onelag.data.shards import MANIFEST, Manifest, ShardedTokens, ShardError, ShardWriter, open_shards, verify_shards


@pytest.fixture
def texts(tmp_path):
    """A folder of text: two files of lines, one of plain text, 41 documents in all."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    words = ["the", "union", "of", "states", "and", "the", "state", "of", "the", "union"]
    documents = [" ".join(words[(i * j) % 10] for j in range(3 + i % 7)) + f" é{i}" for i in range(40)]
    for name, part in (("a.jsonl", documents[:25]), ("deep/b.jsonl", documents[25:])):
        (folder / name).write_text("".join(json.dumps({"text": d, "id": 1}, ensure_ascii=False) + "\n" for d in part) + "\n", encoding="utf-8")
    (folder / "z.txt").write_text("one\n\nplain document", encoding="utf-8")
    (folder / "notes.md").write_text("not read")
    return folder, [*documents[:25], *documents[25:], "one\n\nplain document"]


def settings_for(folder, output, **changes):
    return DownloadCommand(str(folder), output, **{"tokenizer": "bytes", "tokens": 10**9, "shard_tokens": 200, "hold_out_every": 10, **changes})


def whole(folder):
    return {split: bytes(tokens[:].astype(np.uint8)) for split, tokens in open_shards(folder)[1].items()}


def test_documents_come_in_a_fixed_order(texts):
    folder, documents = texts
    assert list(documents_of(str(folder))) == documents
    assert list(documents_of(str(folder), skip=27)) == documents[27:]
    assert list(documents_of(str(folder / "z.txt"))) == documents[-1:]


def test_shards_hold_every_document_once(texts, tmp_path):
    folder, documents = texts
    manifest = prepare(settings_for(folder, tmp_path / "out"))
    expected = {"held-out": documents[9::10], "train": [d for i, d in enumerate(documents, 1) if i % 10]}
    assert whole(tmp_path / "out") == {split: "".join(d + "\0" for d in part).encode() for split, part in expected.items()}
    assert manifest.complete and manifest.documents == 41 and len(manifest.shards) > 5
    assert all(shard.tokens for shard in manifest.shards) and [s.file for s in verify_shards(tmp_path / "out")] == [s.file for s in manifest.shards]


@pytest.mark.parametrize("stops", [(3,), (25, 26), (1, 2, 39)])
def test_a_kill_at_any_document_changes_nothing(texts, tmp_path, stops, monkeypatch):
    """Also between writing a shard and naming it in the manifest."""
    folder, _ = texts
    prepare(settings_for(folder, tmp_path / "straight"))
    for stop in stops:
        seen = 0
        add, save = ShardWriter.add, Manifest.save

        def dies(self, tokens, stop=stop, add=add):
            nonlocal seen
            seen += 1
            if seen > stop:
                raise KeyboardInterrupt
            add(self, tokens)

        def dies_late(self, folder, save=save):
            if len(self.shards) >= 4:
                raise KeyboardInterrupt
            save(self, folder)

        monkeypatch.setattr(ShardWriter, "add", dies)
        monkeypatch.setattr(Manifest, "save", dies_late)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings_for(folder, tmp_path / "stopped"))
        monkeypatch.undo()
    if (tmp_path / "stopped" / MANIFEST).exists():
        with pytest.raises(ShardError, match=r"is not complete .* run the same `onelag download` again"):
            open_shards(tmp_path / "stopped")
    manifest = prepare(settings_for(folder, tmp_path / "stopped"))
    assert manifest == Manifest.load(tmp_path / "straight"), "the same shards with the same checksums"
    assert whole(tmp_path / "stopped") == whole(tmp_path / "straight")


def test_a_finished_folder_is_not_read_again_and_can_grow(texts, tmp_path):
    folder, _ = texts
    told = []
    first = prepare(settings_for(folder, tmp_path / "out", tokens=500), lambda *now: told.append(now))
    assert 500 <= first.tokens("train") + first.tokens("held-out") < 600 and told[-1][0] >= 500
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    assert prepare(settings_for(folder, tmp_path / "out", tokens=500)) == first
    assert files == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    prepare(settings_for(folder, tmp_path / "out"))
    prepare(settings_for(folder, tmp_path / "straight"))
    assert whole(tmp_path / "out") == whole(tmp_path / "straight")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(-5, 60), st.integers(-5, 60))
def test_many_files_are_one_array(tmp_path_factory, lengths, start, stop):
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, Manifest("s", "bytes", "x", 256, "uint16", 10**6), shard_tokens=1)
    flat = np.arange(sum(lengths), dtype=np.uint16)
    for part in np.split(flat, np.cumsum(lengths)[:-1]):
        writer.add(part)
    writer.commit(complete=True)
    tokens = open_shards(folder)[1]["train"]
    assert len(tokens) == len(flat) and np.array_equal(tokens[start:stop], flat[start:stop]) and tokens[start:stop].dtype == np.uint16
    assert tokens[-1] == flat[-1]
    with pytest.raises(IndexError):
        tokens[len(flat)]


def test_training_reads_shards_as_it_reads_memory(texts, tmp_path):
    folder, _ = texts
    prepare(settings_for(folder, tmp_path / "out"))
    source = load_source(str(tmp_path / "out"), "bytes")
    assert isinstance(source.train, ShardedTokens) and source.vocab_size == 256
    memory = source.train[:]
    for step in (0, 3, 11):
        for a, b in zip(Sampler(source.train, 2, 16, 5).batch(step), Sampler(memory, 2, 16, 5).batch(step)):
            assert torch.equal(a, b)
    for a, b in zip(validation_batches(source.split("held-out"), 1, 16, 64), validation_batches(source.held_out[:], 1, 16, 64)):
        assert torch.equal(a[0], b[0])
    with pytest.raises(ValueError, match="no 'shift' split"):
        source.split("shift")
    with pytest.raises(ValueError, match=r"prepared with the tokenizer 'bytes': use data.tokenizer=bytes"):
        load_source(str(tmp_path / "out"), "bpe-300")


def test_damage_is_found_and_named(texts, tmp_path):
    folder, _ = texts
    out = tmp_path / "out"
    manifest = prepare(settings_for(folder, out))
    victim = out / manifest.shards[1].file
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + b"?")
    open_shards(out)
    with pytest.raises(ShardError, match=f"{victim.name} is damaged"):
        list(verify_shards(out))
    victim.write_bytes(content[:-2])
    with pytest.raises(ShardError, match=f"{victim.name} has {len(content) - 2} bytes, but {len(content)} were written"):
        open_shards(out)
    victim.unlink()
    with pytest.raises(ShardError, match=f"{victim.name} is missing"):
        load_source(str(out), "bytes")
    text = (out / MANIFEST).read_text()
    for damaged, message in ((text[:-20], "is damaged"), ("[]", "is damaged"), (text.replace('"version": 1', '"version": 9'), "another version")):
        (out / MANIFEST).write_text(damaged)
        with pytest.raises(ShardError, match=message):
            open_shards(out)
    os.unlink(out / MANIFEST)
    with pytest.raises(ShardError, match=r"holds no manifest\.json: prepare it with `onelag download`"):
        open_shards(out)


def test_another_source_or_setting_in_the_same_folder_is_refused(texts, tmp_path):
    folder, _ = texts
    prepare(settings_for(folder, tmp_path / "out"))
    with pytest.raises(ShardError, match="was prepared with hold_out_every=10, not 5"):
        prepare(settings_for(folder, tmp_path / "out", hold_out_every=5))
    with pytest.raises(ShardError, match="was prepared with source="):
        prepare(settings_for(folder / "z.txt", tmp_path / "out"))


@pytest.mark.parametrize(
    "source, changes, message",
    [
        ("nowhere", {}, "the source nowhere does not exist"),
        (".", {}, "holds no .txt or .jsonl file"),
        (".", {"tokens": 0}, "tokens=0: use 1 or more"),
        (".", {"hold_out_every": 1}, "hold_out_every=1: use 2 or more"),
        (".", {"tokenizer": "nobody/nothing.json"}, "the tokenizer 'nobody/nothing.json' cannot be had"),
    ],
)
def test_bad_settings_are_one_clear_line(tmp_path, monkeypatch, source, changes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        prepare(settings_for(source, tmp_path / "out", **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, content, message",
    [("a.jsonl", b'{"text": 3}\n', "no string, but int"), ("a.jsonl", b"{}\n", "line 1 of"), ("a.txt", b"\xff", "not UTF-8"), ("a.txt", b" ", "is empty")],
)
def test_bad_documents_name_their_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(documents_of(str(tmp_path / name)))


@pytest.fixture
def tokenizer_file(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the union of the states"] * 50, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_by_file(texts, tmp_path, tokenizer_file):
    """Every document is ended by the end token, and decodes to itself."""
    from tokenizers import Tokenizer

    folder, documents = texts
    manifest = prepare(settings_for(folder, tmp_path / "out", tokenizer=str(tokenizer_file)))
    tokens = open_shards(tmp_path / "out")[1]["held-out"][:]
    ends = np.flatnonzero(tokens == 1)
    pieces = [Tokenizer.from_file(str(tokenizer_file)).decode(part[part != 1].tolist()) for part in np.split(tokens, ends[:-1] + 1)]
    assert pieces == documents[9::10] and manifest.vocab_size <= 300
    assert HubTokenizer(str(tmp_path)).sha256 == manifest.tokenizer_sha256 == tokenizer_by_name(str(tokenizer_file)).sha256


def test_a_large_vocabulary_takes_four_bytes(tmp_path, texts, monkeypatch):
    class Wide:
        vocab_size, sha256 = 70_000, "wide"

        def encode_each(self, documents):
            for _ in documents:
                yield np.array([69_999, 1], dtype=np.uint32)

    monkeypatch.setattr("onelag.data.download.tokenizer_by_name", lambda name: Wide())
    manifest = prepare(settings_for(texts[0], tmp_path / "out"))
    assert manifest.dtype == "uint32" and open_shards(tmp_path / "out")[1]["train"][0] == 69_999


def test_fineweb_edu_is_streamed_and_skipped(tmp_path, monkeypatch):
    """Through the real `datasets`, from local files instead of the hub."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "part.jsonl").write_text("".join(json.dumps({"text": f"document {i}", "score": 3.1}) + "\n" for i in range(30)))
    load = datasets.load_dataset
    asked = []

    def local(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return load("json", data_files=str(tmp_path / "part.jsonl"), split=split, streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    assert list(documents_of("fineweb-edu", skip=12)) == [f"document {i}" for i in range(12, 30)]
    assert asked == [("HuggingFaceFW/fineweb-edu", "sample-350BT", "train", True)]

    def unreachable(*arguments, **keywords):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"cannot be read from the Hugging Face hub \(no route\): check the network") as error:
        list(documents_of("fineweb-edu"))
    assert "\n" not in str(error.value)


def test_the_command_prepares_and_verifies(texts, tmp_path, capsys):
    command = settings_for(texts[0], tmp_path / "out", tokens=400)
    command.run()
    DownloadCommand(output=tmp_path / "out", verify=True).run()
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens to train" in out and "are right" in out
