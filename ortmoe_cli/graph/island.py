"""Replacements: a few new nodes that take the place of a region of the graph, as pure data.

Islands are built with onnx-graphsurgeon, node by node, in the names of the graph they will join. The graph itself is
never handed to graphsurgeon, which would lose metadata and hold every weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import NodeProto, helper


@dataclass(frozen=True, eq=False)
class Island:
    """New nodes for a graph.

    `inputs` are tensors of the graph that it reads; `outputs` are tensors of the graph that it makes from now on,
    under their own names, in place of their old producers. `constants` are small; `weights` names packed ones that
    the writer provides (see `weights.pack`), with their (element type, shape).
    """

    name: str
    nodes: tuple[NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray]
    weights: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    opsets: Mapping[str, int] = field(default_factory=dict)


class IslandBuilder:
    """Builds an Island. Tensors are names; every new name starts with the island's own."""

    def __init__(self, name: str, opset: int) -> None:
        self._name, self._opset = name, opset
        self._nodes: list[gs.Node] = []
        self._variables: dict[str, gs.Variable] = {}
        self._constants: dict[str, np.ndarray] = {}
        self._constant_names: dict[tuple[object, ...], str] = {}
        self._weights: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._made: set[str] = set()
        self._produced: dict[str, str] = {}

    def constant(self, value: np.ndarray) -> str:
        """A small constant; equal ones share a name."""
        value = np.asarray(value)
        key = (value.dtype.str, value.dtype.name, value.shape, value.tobytes())
        if key not in self._constant_names:
            name = f"{self._name}/const_{len(self._constant_names)}"
            self._constant_names[key], self._constants[name] = name, value
        return self._constant_names[key]

    def weight(self, name: str, elem_type: int, shape: tuple[int, ...]) -> str:
        """A packed weight that the writer will provide; `name` is made unique by the island's name."""
        full = f"{self._name}/{name}"
        self._weights[full] = (elem_type, shape)
        return full

    def op(
        self, op_type: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any
    ) -> str | tuple[str, ...]:
        """Add a node ('' for an input that is left out); the name of its output, or a tuple of them for outputs > 1."""
        label = f"{self._name}/{op_type}_{len(self._nodes)}"
        made = tuple(f"{label}:{k}" if outputs > 1 else label for k in range(outputs))
        self._nodes.append(
            gs.Node(
                op=op_type,
                name=label,
                domain=domain or None,
                attrs={key: _attribute(value) for key, value in attributes.items()},
                inputs=[self._variable(name) for name in inputs],
                outputs=[self._variable(name) for name in made],
            )
        )
        self._made.update(made)
        return made if outputs > 1 else made[0]

    def one(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """`op` with one output."""
        made = self.op(op_type, inputs, domain=domain, **attributes)
        assert isinstance(made, str)
        return made

    def cast(self, tensor: str, elem_type: int) -> str:
        return self.one("Cast", tensor, to=elem_type)

    def produce(self, graph_tensor: str, tensor: str) -> None:
        """From now on `graph_tensor` is `tensor`, which this island made."""
        if tensor not in self._made or tensor in self._produced.values():
            tensor = self.one("Identity", tensor)
        self._produced[graph_tensor] = tensor

    def build(self) -> Island:
        """The finished island. What it reads and did not make is read from the graph."""
        own = {*self._constants, *self._weights, *self._made, ""}
        reads = dict.fromkeys(v.name for node in self._nodes for v in node.inputs if v.name not in own)
        for graph_tensor, tensor in self._produced.items():
            if graph_tensor in reads:
                raise ValueError(f"island {self._name} reads '{graph_tensor}', which it replaces")
            self._variables[tensor].name = graph_tensor
        graph = gs.Graph(
            nodes=self._nodes,
            inputs=[self._variable(name) for name in reads],
            outputs=[self._variables[tensor] for tensor in self._produced.values()],
            opset=self._opset,
            import_domains=[helper.make_opsetid("", self._opset), helper.make_opsetid("com.microsoft", 1)],
        )
        nodes = tuple(_clean(node) for node in gs.export_onnx(graph, do_type_check=False).graph.node)
        domains = {node.domain for node in nodes if node.domain}
        return Island(
            self._name,
            nodes,
            tuple(reads),
            tuple(self._produced),
            dict(self._constants),
            dict(self._weights),
            dict.fromkeys(sorted(domains), 1),
        )

    def _variable(self, name: str) -> gs.Variable:
        if name == "":
            return gs.Variable.empty()
        if name not in self._variables:
            self._variables[name] = gs.Variable(name)
        return self._variables[name]


def _attribute(value: Any) -> Any:
    """graphsurgeon writes a numpy array as a list of numbers, and a Constant as a tensor."""
    return gs.Constant("value", value) if isinstance(value, np.ndarray) else value


def _clean(node: NodeProto) -> NodeProto:
    """Attribute tensors get no name, so that equal islands are equal bytes."""
    for attribute in node.attribute:
        if attribute.HasField("t"):
            attribute.t.name = ""
    return node
