"""Pieces of equal structure: what makes two of them equal, and what does not."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.twins import Piece

_LAYER = 5


def _layers(tmp_path: Path, **second: Any) -> Index:
    """Two layers: a product with a transposed weight, a leaky unit, a scale, a slice, and a sum. `second`: what differs
    in the second."""
    rng = np.random.default_rng(0)
    nodes, constants, x = [], [], "x"
    for layer in range(2):
        how = {"alpha": 0.1, "scale": 2.0, "start": 0, "width": 8, **(second if layer else {})}
        p = f"l{layer}."
        values = {
            "w": rng.standard_normal((how["width"], 8)).astype(np.float32),
            "scale": np.array(how["scale"], np.float32),
            "start": np.array([how["start"]], np.int64),
            "end": np.array([8], np.int64),
        }
        constants += [numpy_helper.from_array(value, p + name) for name, value in values.items()]
        nodes += [
            helper.make_node("Transpose", [p + "w"], [p + "wt"], perm=[1, 0]),
            helper.make_node("MatMul", [x, p + "wt"], [p + "y"]),
            helper.make_node("LeakyRelu", [p + "y"], [p + "a"], alpha=how["alpha"]),
            helper.make_node("Mul", [p + "a", p + "scale"], [p + "s"]),
            helper.make_node("Slice", [p + "s", p + "start", p + "end"], [p + "out"]),
        ]
        x = p + "out"
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", x)]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], constants)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return Index(open_model(path))


def _piece(index: Index) -> Piece:
    return Piece(index, range(1, _LAYER))  # the transposed weight is a constant, not part of the piece


def test_layers_with_other_weights_are_equal(tmp_path: Path) -> None:
    names = _piece(_layers(tmp_path)).twin(_LAYER)
    assert names is not None
    assert names["x"] == "l0.out"
    assert names["l0.out"] == "l1.out"
    assert names["l0.w"] == "l1.w"  # behind the constant that the product reads


@pytest.mark.parametrize("change", [{"alpha": 0.2}, {"scale": 3.0}, {"start": 1}, {"width": 16}])
def test_what_is_computed_must_be_the_same(tmp_path: Path, change: dict[str, float]) -> None:
    assert _piece(_layers(tmp_path, **change)).twin(_LAYER) is None


@pytest.mark.parametrize("shift", [-1, 1, 4, 6, 100])
def test_other_places_are_other_pieces(tmp_path: Path, shift: int) -> None:
    assert _piece(_layers(tmp_path)).twin(shift) is None
