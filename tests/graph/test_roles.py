"""Roles of graph inputs by what they feed. Every input is called by a letter: names must not help."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.roles import Role, cache_axis, roles

INT, REAL, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
CONSTANTS = {
    "words": np.ones((100, 8), np.float32), "places": np.ones((40, 8), np.float32),
    "kinds": np.ones((2, 8), np.float32),
    "cos": np.ones((40, 4), np.float32), "sin": np.ones((40, 4), np.float32), "rates": np.ones((1, 4), np.float32),
    "one": np.array(1, np.int64), "real one": np.float32(1), "last": np.array([-1]), "grid": np.arange(6).reshape(2, 3),
}  # fmt: skip


def found(folder: Path, inputs: dict[str, tuple[int, list[Any]]], *nodes: tuple[Any, ...]) -> dict[str, Role]:
    return roles(indexed(folder, inputs, *nodes))


def indexed(folder: Path, inputs: dict[str, tuple[int, list[Any]]], *nodes: tuple[Any, ...]) -> Index:
    """nodes: (op, inputs, outputs, attributes)."""
    made = [helper.make_node(op, reads, makes, **(rest[0] if rest else {})) for op, reads, makes, *rest in nodes]
    graph = helper.make_graph(
        made, "g", [helper.make_tensor_value_info(n, t, d) for n, (t, d) in inputs.items()],
        [onnx.ValueInfoProto(name=made[-1].output[0])],
        [numpy_helper.from_array(value, name) for name, value in CONSTANTS.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "m.onnx")
    return Index(open_model(folder / "m.onnx"))


TOKENS = ("Gather", ["words", "a"], ["h"])
IDS = {"a": (INT, ["b", "s"])}


def test_the_largest_table_belongs_to_the_tokens(tmp_path: Path) -> None:
    inputs = {"z": (INT, ["b", "s"]), "t": (INT, ["b", "s"]), **IDS}
    nodes = (("Add", ["z", "one"], ["z1"]), ("Gather", ["places", "z1"], ["p"]), ("Gather", ["kinds", "t"], ["k"]))
    assert found(tmp_path, inputs, TOKENS, *nodes) == {"a": Role.TOKENS, "z": Role.POSITIONS, "t": Role.OTHER}


def test_of_equal_tables_the_first_input_has_the_tokens(tmp_path: Path) -> None:
    inputs = {"a": (INT, ["b", "s"]), "p": (INT, ["b", "s"])}
    first, second = ("Gather", ["cos", "a"], ["x"]), ("Gather", ["sin", "p"], ["y"])
    assert found(tmp_path, inputs, first, second) == {"a": Role.TOKENS, "p": Role.POSITIONS}


@pytest.mark.parametrize(
    "nodes",
    [
        (("Gather", ["cos", "p"], ["c"]), ("Gather", ["sin", "p"], ["d"])),
        (("Unsqueeze", ["p", "last"], ["u"]), ("GatherND", ["cos", "u"], ["c"]), ("GatherND", ["sin", "u"], ["d"])),
        (("Unsqueeze", ["p", "last"], ["u"]), ("Cast", ["u"], ["f"], {"to": REAL}), ("MatMul", ["f", "rates"], ["c"])),
        (("Cast", ["p"], ["f"], {"to": REAL}), ("Mul", ["f", "real one"], ["g"]), ("Cos", ["g"], ["c"])),
    ],
    ids=["tables", "tables by GatherND", "frequencies", "cosine"],
)
def test_what_turns_heads_is_a_position(nodes: tuple[Any, ...], tmp_path: Path) -> None:
    assert found(tmp_path, {**IDS, "p": (INT, ["b", "s"])}, TOKENS, *nodes)["p"] is Role.POSITIONS


def test_a_mask_may_be_counted_into_angles(tmp_path: Path) -> None:
    nodes = (("CumSum", ["m", "one"], ["n"]), ("Cast", ["n"], ["f"], {"to": REAL}), ("Cos", ["f"], ["c"]))
    assert found(tmp_path, {**IDS, "m": (INT, ["b", "t"])}, TOKENS, *nodes)["m"] is Role.MASK


def test_a_mask_may_be_data_of_an_index_grid(tmp_path: Path) -> None:
    assert found(tmp_path, {**IDS, "m": (INT, ["b", "t"])}, TOKENS, ("Gather", ["m", "grid"], ["x"]))["m"] is Role.MASK


@pytest.mark.parametrize("elem_type", [REAL, BOOL])
def test_masks_of_rank_four(elem_type: int, tmp_path: Path) -> None:
    node = ("Identity", ["m"], ["x"])
    assert found(tmp_path, {**IDS, "m": (elem_type, ["b", 1, "s", "t"])}, TOKENS, node)["m"] is Role.MASK


def test_what_is_appended_to_is_a_cache(tmp_path: Path) -> None:
    inputs = {**IDS, "k": (REAL, ["b", "p", 2, 8])}
    nodes = (("Concat", ["k"], ["k1"], {"axis": 0}), ("Concat", ["k1", "h"], ["present"], {"axis": 1}))
    index = indexed(tmp_path, inputs, TOKENS, *nodes)
    assert roles(index)["k"] is Role.PAST
    assert cache_axis(index, "k") == 1


def test_hidden_states_and_the_rest(tmp_path: Path) -> None:
    inputs = {"x": (REAL, ["b", "s", 8]), "c": (INT, ["s"]), "n": (INT, []), "o": (INT, [3, "b", "s"])}
    nodes = tuple(("Identity", [name], [f"{name}1"]) for name in inputs)
    wanted = {"x": Role.HIDDEN, "c": Role.POSITIONS, "n": Role.OTHER, "o": Role.POSITIONS}
    assert found(tmp_path, inputs, *nodes) == wanted
