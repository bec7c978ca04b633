"""Blocks of `tests.moe.graphs` with their experts stored quantised."""

from collections.abc import Callable, Mapping

import onnx
from makers.quantised import Dequantize, Editor, Form, GatherBlockQuantized, MatMulNBits

from tests.moe.graphs import Graph, Parts

__all__ = ["Dequantize", "GatherBlockQuantized", "MatMulNBits", "block", "quantised"]


def block(form: Callable[[Graph, Parts], str], parts: Parts | None = None) -> onnx.ModelProto:
    g = Graph()
    return g.model(form(g, parts or Parts()))


def quantised(model: onnx.ModelProto, how: Mapping[str, Form] | Form) -> onnx.ModelProto:
    """Every expert weight whose name ends with a key of `how` in that form (all of them in one form)."""
    editor = Editor(model)
    for tensor in list(model.graph.initializer):
        if not tensor.name.startswith("experts") or tensor.name.rsplit(".", 1)[-1] not in ("w1", "w2"):
            continue
        ending = tensor.name.rsplit(".", 1)[-1]
        form = how.get(ending) if isinstance(how, Mapping) else how
        if form is not None:
            form(editor, tensor.name)
    editor.model.ir_version = 10
    return editor.model
