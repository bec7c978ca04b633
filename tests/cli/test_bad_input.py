"""Whatever is wrong with the files: one line on stderr, exit code 2, nothing written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.cli.app import run


def model(folder: Path, external: bool = False) -> Path:
    """y = x · w, with w inline or in its own file."""
    weight = numpy_helper.from_array(np.ones((32, 32), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path = folder / "m.onnx"
    onnx.save(proto, path, save_as_external_data=external, location="m.data", size_threshold=0)
    return path


def edited(path: Path, edit: Callable[[onnx.ModelProto], object]) -> None:
    proto = onnx.load(path, load_external_data=False)
    edit(proto)
    path.write_bytes(proto.SerializeToString())


def missing_file(folder: Path) -> None:
    pass


def a_folder(folder: Path) -> None:
    (folder / "m.onnx").mkdir()


def empty_file(folder: Path) -> None:
    (folder / "m.onnx").touch()


def not_onnx(folder: Path) -> None:
    (folder / "m.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")


def cut_off(folder: Path) -> None:
    path = model(folder)
    path.write_bytes(path.read_bytes()[:-100])


def data_missing(folder: Path) -> None:
    model(folder, external=True)
    (folder / "m.data").unlink()


def data_short(folder: Path) -> None:
    model(folder, external=True)
    (folder / "m.data").write_bytes(b"\0" * 100)


def data_outside(folder: Path) -> None:
    path = model(folder, external=True)
    data = (folder / "m.data").rename(folder.parent / "outside.data")
    edited(path, lambda proto: setattr(proto.graph.initializer[0].external_data[0], "value", f"../{data.name}"))


def data_absolute(folder: Path) -> None:
    path = model(folder, external=True)
    edited(path, lambda proto: setattr(proto.graph.initializer[0].external_data[0], "value", str(folder / "m.data")))


def no_nodes(folder: Path) -> None:
    edited(model(folder), lambda proto: proto.graph.ClearField("node"))


def no_graph(folder: Path) -> None:
    edited(model(folder), lambda proto: proto.ClearField("graph"))


def dangling(folder: Path) -> None:
    edited(model(folder), lambda proto: proto.graph.ClearField("initializer"))


def made_twice(folder: Path) -> None:
    edited(model(folder), lambda proto: proto.graph.node.add().CopyFrom(proto.graph.node[0]))


def wrong_length(folder: Path) -> None:
    edited(model(folder), lambda proto: proto.graph.initializer[0].dims.append(2))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def complaint(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that a command line ends with."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ortmoe: error: ")
    assert err.count("\n") == 1
    assert "unexpected" not in err
    return err


@pytest.mark.parametrize("command", ["audit", "fuse"])
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (missing_file, "no such file"),
        (a_folder, "is a folder"),
        (empty_file, "not an ONNX model"),
        (not_onnx, "not an ONNX model"),
        (cut_off, "not an ONNX model"),
        (data_missing, "no file 'm.data' beside the model"),
        (data_short, "'m.data' has 100 bytes, 4096 are needed"),
        (data_outside, "outside the model's folder"),
        (data_absolute, "outside the model's folder"),
        (no_nodes, "the graph is empty"),
        (no_graph, "no graph"),
        (dangling, "reads 'w', which is not made by anything"),
        (made_twice, "'y' is made twice"),
        (wrong_length, "should be 8192 bytes long"),
    ],
)
def test_a_broken_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, break_it: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    break_it(folder)
    before = contents(tmp_path)
    target = ["-o", str(tmp_path / "out.onnx")] if command == "fuse" else []
    line = complaint(capsys, [command, str(folder / "m.onnx"), *target])
    assert words in line
    assert str(folder / "m.onnx") in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("m.onnx", "is the input itself"),
        ("link.onnx", "is the input itself"),
        ("folder", "is a folder"),
        ("nowhere/f.onnx", "no such folder"),
        ("m.onnx/f.onnx", ""),
    ],
)
def test_an_impossible_target(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, words: str) -> None:
    path = model(tmp_path)
    (tmp_path / "link.onnx").symlink_to(path)
    (tmp_path / "folder").mkdir()
    before = contents(tmp_path)
    assert words in complaint(capsys, ["fuse", str(path), "-o", str(tmp_path / target)])
    assert contents(tmp_path) == before
