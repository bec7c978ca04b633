"""Targets that are refused, replacements in place, and failures at every step: all of the output, or nothing of it."""

import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ortmoe_cli.errors import OutputError
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.weights import files
from ortmoe_cli.weights.write import check_output, write_model
from tests.weights.models import build, contents, full, packed
from tests.weights.test_write import comparable, run, with_packed, write


@pytest.fixture(params=["inline", "external"])
def path(request, tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    return build(tmp_path / "in", external=2 * (request.param == "external"), inline=2, location="model.onnx.data")


def refused(path, target, match, **options):
    """Refused both when asked early and when writing, with nothing changed."""
    before = contents(path.parent.parent)
    with pytest.raises(OutputError, match=match):
        check_output(open_model(path), target, **options)
    with pytest.raises(OutputError, match=match):
        write(path, target, ["w0"], **options)
    assert contents(path.parent.parent) == before
    assert not list(path.parent.parent.rglob(".ortmoe*"))


def test_the_input_itself(path, tmp_path, monkeypatch):
    (tmp_path / "soft.onnx").symlink_to(path)
    os.link(path, tmp_path / "hard.onnx")
    (tmp_path / "folder").symlink_to(path.parent)
    monkeypatch.chdir(path.parent)
    for target in (
        path,
        tmp_path / "soft.onnx",
        tmp_path / "hard.onnx",
        tmp_path / "folder/model.onnx",
        Path(path.name),
    ):
        refused(path, target, "is the input itself; give another name, or --in-place")


def test_a_link(path, tmp_path):
    """Neither replaced, as /dev/stdout would be, nor followed to a file that nobody named."""
    (tmp_path / "elsewhere.onnx").write_bytes(b"precious")
    for name in ("out.onnx", "graph.onnx.data"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere.onnx")
    refused(path, tmp_path / "out.onnx", "is a link; give the name of the file")
    refused(path, tmp_path / "graph.onnx", r"graph.onnx.data is a link")


@pytest.mark.parametrize("name", ["", "."])
def test_no_name(path, monkeypatch, name):
    monkeypatch.chdir(path.parent)
    refused(path, Path(name), "needs a file name")


@pytest.mark.parametrize("in_place", [False, True])
def test_the_inputs_data_file(tmp_path, in_place):
    """Neither as the graph nor as the data of the output, under any name, in place or not."""
    (tmp_path / "in").mkdir()
    path = build(tmp_path / "in", location="out.onnx.data")
    refused(path, tmp_path / "in/out.onnx.data", "holds the input's weights", in_place=in_place)
    refused(path, tmp_path / "in/out.onnx", "out.onnx.data holds the input's weights", in_place=in_place)
    os.link(tmp_path / "in/out.onnx.data", tmp_path / "other.onnx.data")
    refused(path, tmp_path / "other.onnx", "other.onnx.data holds the input's weights", in_place=in_place)


def test_the_data_file_of_a_subgraph(tmp_path):
    path = build(tmp_path, external=0, nested=True)
    before = contents(tmp_path)
    with pytest.raises(OutputError, match="holds the input's weights"):
        write(path, tmp_path / "nested.bin")
    assert contents(tmp_path) == before


def test_the_outputs_data_file_is_the_input(tmp_path):
    (tmp_path / "in").mkdir()
    path = build(tmp_path / "in", name="model.onnx.data")
    refused(path, path.with_name("model.onnx"), "holds the input's weights or graph")


def test_places_that_cannot_be_written(path, tmp_path):
    refused(path, tmp_path / "no/such/out.onnx", "no/such: no such folder; create it")
    refused(path, tmp_path / "in", "in is a folder; give the name of a file")
    refused(path, path / "out.onnx", "no such folder")
    (tmp_path / "out.onnx.data").mkdir()
    refused(path, tmp_path / "out.onnx", "out.onnx.data is a folder")
    refused(path, Path("/dev/null"), "not a regular file")
    os.mkfifo(tmp_path / "pipe")
    refused(path, tmp_path / "pipe", "not a regular file")


def test_a_folder_without_permission(path, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir(mode=0o555)
    if os.geteuid():
        refused(path, tmp_path / "locked/out.onnx", "locked is not writable; write out.onnx elsewhere")
        return
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # nothing is locked for root
    refused(path, tmp_path / "locked/out.onnx", "locked is not writable; write out.onnx elsewhere")


def test_a_full_disk(path, tmp_path, monkeypatch):
    usage = files.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage)
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=r"has 1,000 bytes free, the output takes [\d,]+; free [\d,]+ or write"):
        write(path, tmp_path / "out.onnx")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("alias", [None, "soft", "hard"])
def test_in_place(path, tmp_path, alias):
    """The new file holds all; what a link led to is left alone."""
    target, expected, result = path, with_packed(path, ["w0"]), run(path)
    if alias:
        target = path.with_name("alias.onnx")
        os.link(path, target) if alias == "hard" else target.symlink_to(path.name)
    path.chmod(0o640)
    before = contents(path.parent)
    external = "model.onnx.data" in before
    report = write(path, target, ["w0"], in_place=True)
    assert comparable(full(target)) == comparable(expected)
    np.testing.assert_array_equal(run(target), result)
    assert target.stat().st_mode & 0o777 == 0o640
    assert not target.is_symlink()
    assert report.unused == ()
    if alias:
        assert path.read_bytes() == before["model.onnx"]
    assert set(contents(path.parent)) == set(before) | ({target.name + ".data"} if external else set())


def test_in_place_names_the_data_that_is_no_longer_read(tmp_path):
    path = build(tmp_path, location="weights.bin")
    assert write(path, path, in_place=True).unused == (tmp_path / "weights.bin",)
    assert comparable(full(path)) == comparable(full(build(tmp_path, name="again.onnx", location="again.bin")))


def test_in_place_twice(path):
    before = comparable(full(path))
    for _ in range(2):
        write(path, path, in_place=True)
    assert comparable(full(path)) == before


SITUATIONS = ["new", "over an older output", "over an output without data", "in place"]


@pytest.fixture(params=SITUATIONS)
def target(request, path, tmp_path) -> Path:
    """A target with or without something there, that a failure must not touch."""
    if request.param == "in place":
        return path
    result = tmp_path / "out.onnx"
    if request.param != "new":
        write(path, result)
        if request.param == "over an output without data":
            (tmp_path / "out.onnx.data").unlink(missing_ok=True)
    return result


def attempt(path, target, progress=None):
    model = open_model(path)
    weights = [packed(model, ["w0", "w1"])]
    write_model(model, model.proto, weights, model.array, target, in_place=target == path, progress=progress)


STEPS = [("os", "rename"), ("os", "replace"), ("os", "fsync"), ("os", "fchmod"), ("Sink", "copy"), ("Sink", "finish"),
         ("Sink", "write")]  # fmt: skip


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"])
@pytest.mark.parametrize("after", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("step", STEPS, ids=".".join)
def test_a_failure_at_any_step_changes_nothing(path, target, tmp_path, monkeypatch, step, after, error):
    """Each call of each step fails once, before or after it has done its work."""
    owner = files.os if step[0] == "os" else files.Sink
    real, calls = getattr(owner, step[1]), Counter()
    before = contents(tmp_path)

    def failing(*arguments):
        calls["n"] += 1
        if calls["n"] == fail_at and not after:
            raise error
        result = real(*arguments)
        if calls["n"] == fail_at:
            raise error
        return result

    monkeypatch.setattr(owner, step[1], failing)
    expected = comparable(with_packed(path, ["w0", "w1"]))
    for fail_at in range(1, 60):
        calls.clear()
        failed = False
        try:
            attempt(path, target)
        except (OutputError, KeyboardInterrupt):
            failed = True
        assert not list(tmp_path.rglob(".ortmoe*"))
        if not failed or contents(tmp_path) != before:  # the last step of all: the output is there already, and whole
            assert comparable(full(target)) == expected, f"call {fail_at}"
            break
    else:
        raise AssertionError("never finished")
    assert fail_at > (step[1] in ("copy", "finish", "write", "fsync"))


def test_a_real_interrupt(path, target, tmp_path, monkeypatch):
    """The signal arrives while bytes are on the way."""
    monkeypatch.setattr("ortmoe_cli.weights.write._STEP", 1)
    before = contents(tmp_path)
    seen = []

    def press(done, total):
        seen.append(done)
        if done > total / 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        attempt(path, target, press)
    assert len(seen) > 1
    assert contents(tmp_path) == before
    assert not list(tmp_path.rglob(".ortmoe*"))


def test_a_source_that_fails(path, target, tmp_path):
    before = contents(tmp_path)
    model = open_model(path)

    def source(name):
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="w0"):
        write_model(model, model.proto, [packed(model, ["w0"])], source, target, in_place=target == path)
    assert contents(tmp_path) == before


def test_between_the_renames_there_is_no_model_rather_than_a_mixed_one(tmp_path, monkeypatch):
    """Seen by another process, or after a power cut."""
    path, target = build(tmp_path), tmp_path / "out.onnx"
    write(path, target)
    views = []

    def watched(real):
        def call(*arguments):
            views.append((target.exists(), (tmp_path / "out.onnx.data").exists()))
            return real(*arguments)

        return call

    for name in ("rename", "replace"):
        monkeypatch.setattr(files.os, name, watched(getattr(os, name)))
    attempt(path, target)
    assert views == [(True, True), (False, True), (False, False), (False, True)]
