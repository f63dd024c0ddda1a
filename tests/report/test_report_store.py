"""Result files: whole or absent, exact, never trusted when damaged."""

import dataclasses
import errno
import json
import logging
import math
import os
import re
import signal
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onelag.report import store
from onelag.report.store import CannotWrite, CorruptResult, find_result, list_results, read_result, write_result

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(config=st.dictionaries(st.text(), VALUES, max_size=4), loss=st.floats(0, 20))
def test_what_is_written_is_read_back_exactly(make_result, tmp_path, config, loss):
    result = dataclasses.replace(make_result(loss=loss), config=config)
    path = write_result(tmp_path, result)
    back = read_result(path)
    assert back == result and back.path == path
    assert repr(back.metrics["final"]["validation_loss"]) == repr(loss)  # every bit of the float
    assert back.sha256 == result.sha256
    before = path.read_bytes()
    assert write_result(tmp_path, back).read_bytes() == before  # stable bytes


def test_every_truncation_is_found(make_result, tmp_path):
    path = write_result(tmp_path, make_result(steps=300))
    whole = path.read_bytes()
    for length in range(len(whole) - 1):  # the last byte is a newline, which carries nothing
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptResult, match=path.name):
            read_result(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_no_single_changed_byte_is_believed(make_result, tmp_path, data):
    result = make_result(steps=300)
    path = write_result(tmp_path, result)
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        back = read_result(path)
    except CorruptResult as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert back == result  # white space, or the byte that was there


def test_a_number_that_became_infinite_is_not_believed(make_result, tmp_path):
    """One byte can turn 1e-05 into 1e905, which JSON reads as infinite and does not write."""
    path = write_result(tmp_path, make_result())
    text = path.read_text(encoding="utf-8")
    number = re.search(r'"learning_rate":\s?\[?([0-9.e-]+)', text)
    path.write_text(text[: number.start(1)] + "1e905" + text[number.end(1) :], encoding="utf-8")
    with pytest.raises(CorruptResult, match=path.name):
        read_result(path)


def resealed(result, path, **changes):
    """A file with a right checksum over wrong content."""
    content = store._content(result) | changes
    content = {key: value for key, value in content.items() if value is not ...}
    path.write_text(json.dumps({**content, "sha256": store._checksum(content)}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": None}, "schema None"),
        ({"run_id": "another"}, "result of run another"),
        ({"provenance": ...}, "lacks provenance"),
        ({"metrics": {"status": "finished"}}, "metrics lack"),
        ({"config": []}, "must be objects"),
    ],
)
def test_a_right_checksum_does_not_excuse_wrong_content(make_result, tmp_path, changes, cause):
    result = make_result()
    path = resealed(result, tmp_path / f"{result.run_id}.json", **changes)
    with pytest.raises(CorruptResult, match=cause):
        read_result(path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda m: m | {"status": "running"}, "neither finished nor diverged"),
        (lambda m: m | {"final": {**m["final"], "validation_loss": None}}, "without a final validation loss"),
        (lambda m: m | {"status": "diverged"}, "without saying when"),
        (lambda m: m | {"curve": {**m["curve"], "step": [1]}}, "differ in length"),
        (lambda m: m | {"curve": {**m["curve"], "step": 1}}, "object of lists"),
        (lambda m: m | {"final": {}}, "final metrics must be"),
    ],
)
def test_incomplete_metrics_are_neither_stored_nor_read(make_result, tmp_path, change, cause):
    result = make_result()
    broken = dataclasses.replace(result, metrics=change(result.metrics))
    with pytest.raises(ValueError, match=cause):
        write_result(tmp_path, broken)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CorruptResult, match=cause):
        read_result(resealed(broken, tmp_path / f"{result.run_id}.json"))


def test_a_diverged_run_is_a_result(make_result, tmp_path):
    result = make_result(diverged_at=310)
    result.metrics["curve"]["validation_loss"][-1] = math.nan
    back = read_result(write_result(tmp_path, result))
    assert back.diverged and back.metrics["diverged_at"] == 310 and back.metrics["curve"]["validation_loss"][-1] is None


def test_a_configuration_that_json_cannot_hold_is_refused(make_result, tmp_path):
    result = make_result()
    for value in (math.inf, object()):
        with pytest.raises(ValueError, match=f"{result.run_id} cannot be stored"):
            write_result(tmp_path, dataclasses.replace(result, config={"lr": value}))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_costs_one_line_and_nothing_else(make_result, tmp_path, monkeypatch):
    old = make_result(loss=1.5)
    path = write_result(tmp_path, old)
    before = path.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(CannotWrite) as caught:
        write_result(tmp_path, make_result(loss=1.6))
    assert caught.value.errno == errno.ENOSPC and str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the file size through the kernel")
def test_a_write_that_the_system_cuts_short_leaves_the_old_file(make_result, tmp_path):
    import resource

    path = write_result(tmp_path, make_result(loss=1.5))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(CannotWrite):
            write_result(tmp_path, make_result(loss=1.6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_interrupt_before_the_rename_leaves_nothing_behind(make_result, tmp_path, monkeypatch):
    path = write_result(tmp_path, make_result(loss=1.5))
    before = path.read_bytes()

    def interrupted(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_result(tmp_path, make_result(loss=1.6))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_results_are_found_across_experiments_and_damaged_ones_are_named(make_result, tmp_path, caplog):
    first, second, third = make_result(seed=0), make_result(seed=1), make_result(seed=2)
    write_result(tmp_path / "table-1", first)
    write_result(tmp_path / "table-2", second)
    bad = write_result(tmp_path / "table-1", third)
    bad.write_bytes(bad.read_bytes()[:-40])
    assert find_result(tmp_path, second.run_id) == second and find_result(tmp_path, "0" * 16) is None
    with caplog.at_level(logging.WARNING):
        assert find_result(tmp_path, third.run_id) is None
        assert [r.run_id for r in list_results(tmp_path)] == [first.run_id, second.run_id]
    assert len(caplog.records) == 2 and all(str(bad) in record.getMessage() for record in caplog.records)
    write_result(tmp_path / "table-2", third)  # computed again, for another experiment
    assert find_result(tmp_path, third.run_id) == third
    assert list_results(tmp_path / "nothing") == []
