"""What a probe knows of a graph, and what it must not know."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.declared import evaluate
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Origin, Padding, Sizes, probe
from tests.graph.building import index_of, ints

TABLE = {"table": np.ones((50, 8), np.float32)}


def decoder_inputs(folder: Path, extra: Sequence[onnx.NodeProto] = (), outputs: Sequence[str] = ("h",)) -> Index:
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"]),
        helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.BOOL),
        helper.make_node("Shape", ["h"], ["size"]),
        helper.make_node("Equal", ["input_ids", "pad"], ["padding"]),
        *extra,
    ]
    inputs = {"input_ids": (TensorProto.INT64, ["b", "s"]), "attention_mask": (TensorProto.INT64, ["b", "t"])}
    return index_of(nodes, inputs, outputs, {**TABLE, "pad": np.array(0)}, folder)


def test_masks_have_values_and_embeddings_have_none(tmp_path: Path) -> None:
    made = probe(decoder_inputs(tmp_path, outputs=("h", "real", "size")), Sizes(2, 5), Padding("left", (2, 0)))
    assert made.is_data("h")
    assert made.shape("h") == (2, 5, 8)
    assert made.value("size").tolist() == [2, 5, 8]
    assert made.value("real").tolist() == [[False, False, True, True, True], [True] * 5]
    assert made.real.tolist() == made.value("real").tolist()


def test_origins_are_remembered_but_not_through_sizes(tmp_path: Path) -> None:
    made = probe(decoder_inputs(tmp_path, outputs=("h", "real", "size", "padding")), Sizes(2, 5))
    assert made.origin("real") == Origin.MASK
    assert made.origin("padding") == Origin.TOKENS
    assert made.origin("size") == Origin.NONE


def test_given_data_gives_what_depends_on_it(tmp_path: Path) -> None:
    made = probe(decoder_inputs(tmp_path, [helper.make_node("Mul", ["h", "h"], ["y"])], ("y",)), Sizes(2, 5))
    assert made.value("y") is None
    value = made.given({"h": np.full((2, 5, 8), 3, np.float16)}).value("y")
    assert value.dtype == np.float32
    assert (value == 9).all()
    assert made.value("y") is None


def test_odd_nodes_are_unknown_and_hurt_nobody(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["h"], ["z"])], "branch", [], [onnx.ValueInfoProto(name="z")]
    )
    extra = [
        helper.make_node("Magic", ["h"], ["m"], domain="odd"),
        helper.make_node("If", ["yes"], ["i"], then_branch=branch, else_branch=branch),
        helper.make_node("Reshape", ["h", "bad"], ["r"]),
        helper.make_node("Add", ["m", "i"], ["sum"]),
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("Constant", [], ["bad"], value=numpy_helper.from_array(ints(7, 7))),
    ]
    made = probe(decoder_inputs(tmp_path, extra, ("sum", "r")), Sizes(2, 5))
    for name in ("m", "i", "r", "sum", "no such tensor"):
        assert made.shape(name) is None
        assert made.value(name) is None


def test_a_cycle_ends(tmp_path: Path) -> None:
    extra = [helper.make_node("Add", ["a", "h"], ["b"]), helper.make_node("Neg", ["b"], ["a"])]
    assert probe(decoder_inputs(tmp_path, extra, ("b",)), Sizes(2, 5)).shape("b") is None


def test_declared_shapes_stand_in_with_their_symbols(tmp_path: Path) -> None:
    nodes = [helper.make_node("Magic", ["x"], ["m"], domain="odd")]
    declared = [helper.make_tensor_value_info("m", TensorProto.FLOAT, ["b", "2*s + 1", 4])]
    inputs = {"x": (TensorProto.FLOAT, ["b", "s", 8])}
    index = index_of(nodes, inputs, ["m"], {}, tmp_path, value_info=declared)
    assert probe(index, Sizes(3, 5)).shape("m") == (3, 11, 4)


@pytest.mark.parametrize("text", ["b**9", "__import__('os')", "", "b/2", "f(b)", "c"])
def test_only_sums_and_products_are_read_from_symbols(text: str) -> None:
    assert evaluate(text, {"b": 3}) is None


def test_fixed_dimensions_overrule_the_sizes(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["table", "ids"], ["h"])]
    index = index_of(nodes, {"ids": (TensorProto.INT64, ["b", 1])}, ["h"], TABLE, tmp_path)
    made = probe(index, Sizes(2, 5))
    assert (made.sizes.new, made.shape("h")) == (1, (2, 1, 8))


def test_cost_follows_the_question(tmp_path: Path) -> None:
    """A question about the beginning of a long graph touches its beginning only."""
    chain = [helper.make_node("Neg", [f"c{k - 1}" if k else "h"], [f"c{k}"]) for k in range(2000)]
    made = probe(decoder_inputs(tmp_path, chain, ("c1999",)), Sizes(2, 5))
    assert made.shape("c5") == (2, 5, 8)
    assert len(made._facts) < 20
    assert made.shape("c1999") == (2, 5, 8)
