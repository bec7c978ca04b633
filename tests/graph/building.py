"""Small graphs for the tests of the graph floor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model

OPSET = 18


def index_of(
    nodes: Sequence[onnx.NodeProto], inputs: dict[str, tuple[int, list[Any]]], outputs: Sequence[str],
    constants: dict[str, np.ndarray], folder: Path, **more: Any,
) -> Index:  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, t, d) for n, (t, d) in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()], **more,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("odd", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "m.onnx")
    return Index(open_model(folder / "m.onnx"))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)
