"""Layers of equal structure are identified once. A layer that differs from its twin in a number is no twin."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper

from ortmoe_cli import moe
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Context, Fusion, Options, Refusal
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import write_model
from tests.moe import graphs, mutations, surgery
from tests.moe.graphs import Graph, H, Parts
from tests.moe.surgery import Patient

FORMS = mutations.FORMS


def layer(form: str, number: float | None, seed: int, parts: Parts | None = None) -> ModelProto:
    """A block, every expert clipped at a number."""
    g = Graph(seed)
    patient = Patient(g.model(FORMS[form](g, parts or Parts())))
    if number is not None:
        mutations.downs(surgery.clip(number))(patient)
    return patient.model


def stacked(layers: list[ModelProto]) -> ModelProto:
    """One after the other, each with the residual."""
    nodes, weights, source = [], [], "x"
    for n, model in enumerate(layers):
        names = {"x": source, "": ""}
        for tensor in model.graph.initializer:
            names[tensor.name] = f"layers.{n}.{tensor.name}"
            tensor.name = names[tensor.name]
            weights.append(tensor)
        for node in model.graph.node:
            node.input[:] = [names.get(name, f"l{n}/{name}") for name in node.input]
            node.output[:] = [f"l{n}/{name}" for name in node.output]
            node.name = f"l{n}/{node.name}"
            nodes.append(node)
        nodes.append(helper.make_node("Add", [source, f"l{n}/y"], [f"l{n}/sum"]))
        source = f"l{n}/sum"
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", "seq", H]) for n in ("x", source)]
    graph = helper.make_graph(nodes, "layers", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def find(model: ModelProto, path: Path, verify: str = "full") -> tuple[list[object], Index, Cutter]:
    onnx.save(model, path)
    index = Index(open_model(path))
    cutter = Cutter(index)
    return list(moe.find(Context(index, cutter, Options(verify=verify)))), index, cutter  # type: ignore[arg-type]


@pytest.mark.parametrize("verify", ["full", "sample", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_equal_layers_are_twins(form: str, verify: str, tmp_path: Path) -> None:
    found, index, cutter = find(stacked([layer(form, None, seed) for seed in (1, 2, 3)]), tmp_path / "m.onnx", verify)
    fusions = [f for f in found if isinstance(f, Fusion)]
    assert len(fusions) == 3, found
    proto = splice(index.model, [f.island for f in fusions])
    packed = [w for f in fusions for w in f.weights]
    write_model(index.model, proto, packed, lambda name: lookup(index, cutter, name), tmp_path / "after.onnx")
    paths = (tmp_path / "m.onnx", tmp_path / "after.onnx")
    first, second = (ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]) for p in paths)
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 30, H)).astype(np.float32) / 8}
    want, got = first.run(None, feeds)[0], second.run(None, feeds)[0]
    assert np.abs(want - got).max() < 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("verify", ["full", "sample"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [50.0, 1e6, 1e12])
def test_a_layer_that_clips_is_no_twin(form: str, number: float, verify: str, tmp_path: Path) -> None:
    """The first layer's clip is never reached; the second's is."""
    found, _, _ = find(stacked([layer(form, 3e38, 1), layer(form, number, 2)]), tmp_path / "m.onnx", verify)
    assert isinstance(found[1], Refusal), found[1]


@pytest.mark.parametrize("verify", ["full", "sample"])
@pytest.mark.parametrize("form", FORMS)
def test_another_limit_in_the_second_layer_is_its_own(form: str, verify: str, tmp_path: Path) -> None:
    limits = (7.0, 40.0)
    layers = [layer(form, None, n, Parts(activate=graphs.clamped(1.702, limit))) for n, limit in enumerate(limits, 1)]
    found, _, _ = find(stacked(layers), tmp_path / "m.onnx", verify)
    for fusion, limit in zip(found, limits, strict=True):
        assert isinstance(fusion, Fusion), fusion
        node = next(n for n in fusion.island.nodes if n.op_type == "MoE")
        assert {a.name: a.f for a in node.attribute}["swiglu_limit"] == limit


@pytest.mark.parametrize("form", FORMS)
def test_another_number_of_chosen_experts_is_its_own(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = layer(form, None, 1)
    monkeypatch.setattr(graphs, "K", 3)
    found, _, _ = find(stacked([first, layer(form, None, 2)]), tmp_path / "m.onnx")
    assert [f.facts["k"] for f in found if isinstance(f, Fusion)] == [2, 3]
