"""Changes to a finished block: nodes put behind a tensor, weights edited in place."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Array = NDArray[Any]


class Patient:
    """A model being changed. Every step is one node; names are made up."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self._new: list[NodeProto] = []
        self._count = 0

    # --- finding

    def node_of(self, tensor: str) -> NodeProto:
        return next(n for n in self.model.graph.node if tensor in n.output)

    def products(self, weight: str) -> list[str]:
        """Results of the products with the initializers whose names end so, in graph order."""
        behind = {t.name: t.name for t in self.model.graph.initializer if t.name.endswith(weight)}
        found = []
        for node in self.model.graph.node:
            for name in node.input:
                if name in behind:
                    if node.op_type in ("MatMul", "Gemm", "Einsum"):
                        found.append(node.output[0])
                    elif node.op_type in ("Gather", "GatherND", "Transpose", "Reshape", "Squeeze"):
                        behind[node.output[0]] = name
        return found

    def outputs(self, op: str) -> list[str]:
        return [n.output[0] for n in self.model.graph.node if n.op_type == op]

    # --- changing

    def constant(self, value: Any) -> str:
        self._count += 1
        name = f"changed/c{self._count}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        name = f"changed/{op}{self._count}"
        self._new.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def behind(
        self, tensor: str, change: Callable[["Patient", str], str], only: Callable[[NodeProto], bool] | None = None
    ) -> None:
        """Whoever read `tensor` reads what `change` makes of it (with `only`: those readers)."""
        self._new = []
        made = change(self, tensor)
        mine = {o for n in self._new for o in n.output}
        nodes = self.model.graph.node
        for node in nodes:
            if only is None or only(node):
                for k, name in enumerate(node.input):
                    if name == tensor:
                        node.input[k] = made
        for output in self.model.graph.output:
            if output.name == tensor:
                raise ValueError("change an inner tensor")
        at = next((k for k, n in enumerate(nodes) if tensor in n.output), -1)
        wanted = {name for n in self._new for name in n.input if name not in mine}
        at = max([at, *(k for k, n in enumerate(nodes) if wanted & set(n.output))])
        for offset, node in enumerate(self._new):
            nodes.insert(at + 1 + offset, node)

    def edit(self, name: str, change: Callable[[Array], Array]) -> None:
        """Other values for an initializer."""
        tensor = next(t for t in self.model.graph.initializer if t.name == name)
        tensor.CopyFrom(
            numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy())), name)
        )

    def output(self, tensor: str) -> None:
        """Hand a tensor out."""
        self.model.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))


def clip(limit: float) -> Callable[[Patient, str], str]:
    return lambda p, t: p.op("Clip", t, p.constant(np.float32(-limit)), p.constant(np.float32(limit)))


def scale(factor: float) -> Callable[[Patient, str], str]:
    return lambda p, t: p.op("Mul", t, p.constant(np.float32(factor)))


def softcap(limit: float) -> Callable[[Patient, str], str]:
    def change(p: Patient, t: str) -> str:
        return scale(limit)(p, p.op("Tanh", scale(1 / limit)(p, t)))

    return change


def dead_zone(limit: float) -> Callable[[Patient, str], str]:
    def change(p: Patient, t: str) -> str:
        small = p.op("Less", p.op("Abs", t), p.constant(np.float32(limit)))
        return p.op("Where", small, p.constant(np.float32(0)), t)

    return change


def nonlinear_beyond(limit: float) -> Callable[[Patient, str], str]:
    """Relu(t − limit) is added."""
    return lambda p, t: p.op("Add", t, p.op("Relu", p.op("Sub", t, p.constant(np.float32(limit)))))


def masked_from(place: int, rows: int = 1) -> Callable[[Patient, str], str]:
    """(T·rows,…): zero from this position of the flattened tokens on."""

    def change(p: Patient, t: str) -> str:
        count = p.op("Squeeze", p.op("Shape", t, start=0, end=1))
        index = p.op("Range", p.constant(np.int64(0)), count, p.constant(np.int64(1)))
        inside = p.op("Cast", p.op("Less", index, p.constant(np.int64(place * rows))), to=TensorProto.FLOAT)
        return p.op("Mul", t, p.op("Unsqueeze", inside, p.constant(np.array([1], np.int64))))

    return change


def scaled_by_length(p: Patient, t: str) -> str:
    """(T,…): times the logarithm of T."""
    count = p.op("Cast", p.op("Squeeze", p.op("Shape", t, start=0, end=1)), to=TensorProto.FLOAT)
    return p.op("Mul", t, p.op("Log", p.op("Add", count, p.constant(np.float32(1)))))


def halved_when_longer(limit: int) -> Callable[[Patient, str], str]:
    """(T,…): halved when there are more than so many tokens."""

    def change(p: Patient, t: str) -> str:
        longer = p.op("Greater", p.op("Squeeze", p.op("Shape", t, start=0, end=1)), p.constant(np.int64(limit)))
        factor = p.op("Where", longer, p.constant(np.float32(0.5)), p.constant(np.float32(1)))
        return p.op("Mul", t, factor)

    return change


def grows_beyond(limit: int) -> Callable[[Patient, str], str]:
    """(T,…): times max(1, T / limit). The number is never compared with anything."""

    def change(p: Patient, t: str) -> str:
        count = p.op("Cast", p.op("Squeeze", p.op("Shape", t, start=0, end=1)), to=TensorProto.FLOAT)
        part = p.op("Div", count, p.constant(np.float32(limit)))
        return p.op("Mul", t, p.op("Max", part, p.constant(np.float32(1))))

    return change


def masked_by_difference(place: float) -> Callable[[Patient, str], str]:
    """(T,…): zero where position − place is positive: compared with zero, after a shift that need not be whole."""

    def change(p: Patient, t: str) -> str:
        count = p.op("Squeeze", p.op("Shape", t, start=0, end=1))
        index = p.op("Range", p.constant(np.int64(0)), count, p.constant(np.int64(1)))
        shifted = p.op("Sub", p.op("Cast", index, to=TensorProto.FLOAT), p.constant(np.float32(place)))
        inside = p.op("Cast", p.op("LessOrEqual", shifted, p.constant(np.float32(0))), to=TensorProto.FLOAT)
        return p.op("Mul", t, p.op("Unsqueeze", inside, p.constant(np.array([1], np.int64))))

    return change
