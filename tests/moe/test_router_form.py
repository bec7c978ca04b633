"""The node fed with raw logits: only where it can do the router's work, and the report says what that means."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from ortmoe_cli import moe
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Context, Fusion, Options
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import write_model
from tests.moe import graphs, mutations, routers, surgery
from tests.moe.graphs import Graph, H, Parts
from tests.moe.test_forms import FORMS, block, only

Router = Callable[[Graph, str], tuple[str, str]]


def sigmoid(g: Graph, logits: str) -> tuple[str, str]:
    top, ids = g.op("TopK", g.op("Sigmoid", logits), g.ints(graphs.K), outputs=2, axis=-1)
    return ids, g.op("Div", top, g.op("ReduceSum", top, g.ints(-1), keepdims=1))


def scaled(g: Graph, logits: str, factor: float) -> tuple[str, str]:
    ids, weights = graphs.softmax_router(g, logits)
    return ids, g.op("Mul", weights, g.constant(np.float32(factor)))


KNOWN: dict[str, Router] = {
    "softmax renormalised": graphs.softmax_router,
    "softmax": partial(graphs.softmax_router, renormalise=False),
    "top-k, then softmax": routers.top_softmax,
    "L1": routers.l1,
    "softmax renormalised, scaled": lambda g, logits: scaled(g, logits, 2.5),
}
OTHERS: dict[str, Router] = {
    "sigmoid": sigmoid,
    "temperature": partial(graphs.softmax_router, temperature=1.7),
    "selection bias": graphs.sigmoid_router,
    "ties to the last": routers.last_on_ties,
    "large eps": routers.with_eps,
    "the least win": routers.negated_largest,
    "one louder": routers.one_expert_louder,
    "renamed": routers.renamed,
    "small ones dropped": partial(routers.dropped_below, least=0.05),
}


def find(model: ModelProto, path: Path, **options: Any) -> tuple[Fusion, Index, Cutter]:
    onnx.save(model, path)
    index = Index(open_model(path))
    cutter = Cutter(index)
    found = only(moe.find(Context(index, cutter, Options(**options))))
    assert isinstance(found, Fusion), found
    return found, index, cutter


def fed_raw(found: Fusion) -> bool:
    return not any(n.op_type == "Log" for n in found.island.nodes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("router", KNOWN)
def test_known_router(form: str, router: str, tmp_path: Path) -> None:
    """Equal in the runtime, with fewer nodes; ties and what they mean are said."""
    model = block(form, Parts(router=KNOWN[router]))
    found, index, cutter = find(model, tmp_path / "before.onnx", router="logits")
    assert fed_raw(found)
    assert found.guarantee == "assumed"
    assert "highest number" in found.contract[0]
    assert "ties" not in {c.regime for c in found.checks}
    plain, _, _ = find(model, tmp_path / "plain.onnx")
    assert not fed_raw(plain)
    assert plain.guarantee == "exact"
    assert "ties" in {c.regime for c in plain.checks}
    assert int(found.facts["nodes after"]) < int(plain.facts["nodes after"])
    after = tmp_path / "after.onnx"
    proto = splice(index.model, [found.island])
    write_model(index.model, proto, found.weights, lambda name: lookup(index, cutter, name), after)
    first, second = (
        ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]) for p in (tmp_path / "before.onnx", after)
    )
    rng = np.random.default_rng(2)
    for batch, seq, size in ((1, 1, 1.0), (2, 50, 1.0), (1, 300, 0.05), (1, 80, 8.0)):
        feeds = {"x": (rng.standard_normal((batch, seq, H)) * size).astype(np.float32)}
        want, got = first.run(None, feeds)[0], second.run(None, feeds)[0]
        assert np.abs(want - got).max() < 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("router", OTHERS)
def test_other_routers_keep_their_weights(router: str, tmp_path: Path) -> None:
    found, _, _ = find(block("gathered", Parts(router=OTHERS[router])), tmp_path / "m.onnx", router="logits")
    assert not fed_raw(found)
    assert found.guarantee == "exact"
    assert "the router's own weights: " in str(found.facts["routing form"])


def test_auto_feeds_raw_logits_for_cuda_only(tmp_path: Path) -> None:
    model = block("gathered", Parts())
    assert not fed_raw(find(model, tmp_path / "m.onnx", router="auto", ep="cpu")[0])
    found, _, _ = find(model, tmp_path / "m.onnx", router="auto", ep="cuda")
    assert fed_raw(found)
    assert found.guarantee == "exact"
    assert found.contract[0].startswith("on the CPU")
    assert not fed_raw(find(model, tmp_path / "m.onnx", router="weights", ep="cuda")[0])


def test_logits_of_another_type_are_not_rounded_unasked(tmp_path: Path) -> None:
    """A router in float32 before experts in half precision: rounded logits would choose other experts."""
    model = block("dense bmm", Parts())
    halves = [t for t in model.graph.initializer if t.name.startswith("experts.")]
    for tensor in halves:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for node in list(model.graph.node):
        for k, name in enumerate(node.input):
            if name.startswith("experts."):
                other = 1 - k
                node.input[other] = _cast(model, node, node.input[other], TensorProto.FLOAT16)
                made = node.output[0]
                node.output[0] = f"{made}/half"
                position = list(model.graph.node).index(node)
                back = onnx.helper.make_node("Cast", [f"{made}/half"], [made], to=TensorProto.FLOAT)
                model.graph.node.insert(position + 1, back)
    found, _, _ = find(model, tmp_path / "m.onnx", router="auto", ep="cuda")
    assert not fed_raw(found)
    assert "round" in str(found.facts["routing form"])
    found, _, _ = find(model, tmp_path / "m.onnx", router="logits", ep="cuda")
    assert fed_raw(found)
    assert any("rounded to float16" in sentence for sentence in found.contract)


def _cast(model: ModelProto, before: Any, tensor: str, to: int) -> str:
    position = list(model.graph.node).index(before)
    made = f"{tensor}/{len(model.graph.node)}"
    model.graph.node.insert(position, onnx.helper.make_node("Cast", [tensor], [made], to=to))
    return made


@pytest.mark.parametrize("limit", [50.0, 2000.0])
def test_a_clip_of_the_logits_is_seen(limit: float, tmp_path: Path) -> None:
    """Where logits are clipped the raw ones differ; nothing of it shows at usual sizes."""
    patient = surgery.Patient(block("gathered", Parts()))
    mutations.logits(surgery.clip(limit))(patient)
    found, _, _ = find(patient.model, tmp_path / "m.onnx", router="logits")
    assert not fed_raw(found)
    assert found.guarantee == "exact"
    assert "results differ" in str(found.facts["routing form"])
