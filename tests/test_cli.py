"""The command line as a user meets it: a subprocess, exit codes, one line for whatever is wrong, nothing lost."""

import os
import signal
import subprocess
import sys
import time

import pytest

from onelag.cli import main

TINY = ["--schedule.steps", "8", "--evaluation.every", "4", "--evaluation.tokens", "2048", "--evaluation.final-tokens", "2048"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["train", "--model", "gpt"], "choose one of byte-0.3m"),
        (["train", "--optimizer.name", "adamm"], "choose one of adamw"),
        (["train", "--delay.steps", "-1"], "cannot come from the future"),
        (["train", "--schedule.steps", "many"], "--schedule.steps"),
        (["train", "--delay.correction", "magic"], "error-feedback"),
        (["train", "--device", "tpu"], "device must be one of"),
        (["train", "--data.corpus", "nowhere.txt"], "does not exist"),
        (["train", "--data.tokenizer", "words"], "bpe-N"),
        (["train", "--data.tokenizer", "bpe-300"], "vocab_size is 256"),
        (["reproduce", "--tier", "moon"], "choose one of smoke, cpu"),
        (["reproduce", "table-9"], "choose one of table-1"),
        (["dance"], "dance"),
    ],
)
def test_a_wrong_value_exits_2_with_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and words in lines[0]


def test_bad_texts_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content, words in (
        ("empty.txt", b"  \n", "is empty"),
        ("latin.txt", "Größe".encode("latin-1"), "not UTF-8"),
        ("short.txt", b"too short", "use more text"),
        ("bad.jsonl", b'{"txt": 1}\n', "line 1"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit) as stopped:
            main(["train", "--data.corpus", name, *TINY])
        lines = capsys.readouterr().err.strip().splitlines()
        assert stopped.value.code == 2 and len(lines) == 1 and words in lines[0], lines


def test_train_interrupted_by_ctrl_c_continues(tmp_path):
    """A real process, a real SIGINT: exit 130, a checkpoint, and the same command goes on to the same end."""
    flags = ["--schedule.steps", "150", "--evaluation.every", "10", "--evaluation.tokens", "2048", "--evaluation.final-tokens", "2048"]
    command = [sys.executable, "-m", "onelag", "train", *flags, "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "log.jsonl").exists() or not (tmp_path / "run" / "log.jsonl").read_text():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        first.send_signal(signal.SIGINT)
        _, errors = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130 and "the same command continues" in errors
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    second = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert second.returncode == 0 and "validation loss" in second.stdout, second.stderr
    steps = [line for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(steps) == 15
