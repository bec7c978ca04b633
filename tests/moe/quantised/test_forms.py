"""Quantised experts in every form that can be moved into QMoE: proven, written, and equal in the runtime."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

from ortmoe_cli.outcome import Fusion, Options, Refusal
from tests.moe.graphs import Parts, clamped, dense_bmm, dense_loop, gathered, hit_list, sigmoid_router, static_loop
from tests.moe.quantised.blocks import Dequantize, GatherBlockQuantized, MatMulNBits, block, quantised

EACH = {  # experts with matrices [in, out] of their own
    "4 bits": MatMulNBits(4, 16),
    "4 bits, zero points": MatMulNBits(4, 16, False),
    "4 bits, blocks that end within a row": MatMulNBits(4, 32),
    "4 bits, one block": MatMulNBits(4, 64),
    "2 bits": MatMulNBits(2, 32),
    "2 bits, zero points": MatMulNBits(2, 16, False),
    "8 bits, one block": MatMulNBits(8, 64),
    "8 bits, one block, zero points": MatMulNBits(8, 128, False),
    "rounding asked for": MatMulNBits(4, 16, accuracy_level=4),
    "int4 blocks": Dequantize(4, 0, 16),
    "uint4 blocks, zero points": Dequantize(4, 0, 16, signed=False, symmetric=False),
    "int4 per row": Dequantize(4, 1),
    "int8 per row": Dequantize(8, 1),
    "uint8 per row, zero points": Dequantize(8, 1, signed=False, symmetric=False),
    "int8 per tensor": Dequantize(8, None),
}
STACKED = {  # [E, out, in]
    "int4 blocks": Dequantize(4, 2, 16),
    "uint4 blocks, zero points": Dequantize(4, 2, 16, signed=False, symmetric=False),
    "int8 per row of all experts": Dequantize(8, 1),
    "int8 per expert": Dequantize(8, 0),
    "int8 in all": Dequantize(8, None, symmetric=False),
    "lookups of 4 bits": GatherBlockQuantized(4, 16),
}
TURNED = {  # [E, in, out]
    "int4 blocks": Dequantize(4, 1, 16),
    "uint4 blocks, zero points": Dequantize(4, 1, 16, signed=False, symmetric=False),
    "int8 per row of all experts": Dequantize(8, 2),
}
FORMS = {
    **{f"static loop, {name}": (static_loop, how) for name, how in EACH.items()},
    "dense loop, 4 bits": (dense_loop, EACH["4 bits"]),
    "dense loop, zero points": (dense_loop, EACH["4 bits, zero points"]),
    "dense loop, int4 blocks": (dense_loop, EACH["int4 blocks"]),
    **{f"gathered, {name}": (gathered, how) for name, how in STACKED.items()},
    **{f"dense bmm, {name}": (dense_bmm, how) for name, how in TURNED.items()},
    "hit list, int4 blocks": (hit_list(4), STACKED["int4 blocks"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_codes_are_moved_and_results_equal(name, bench) -> None:
    form, how = FORMS[name]
    b = bench(quantised(block(form), how))
    found = b.find()
    assert isinstance(found, Fusion), found
    assert found.guarantee == ("repaired" if "hit list" in name else "exact")
    assert found.facts["bits"] == how.bits
    proto = b.write(found)
    assert [n.op_type for n in proto.graph.node].count("QMoE") == 1
    assert not any(n.op_type in ("MatMulNBits", "DequantizeLinear", "GatherBlockQuantized") for n in proto.graph.node)
    if "hit list" not in name and "rounding" not in name:
        assert b.difference() < 2e-6
    node = next(n for n in proto.graph.node if n.op_type == "QMoE")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["normalize_routing_weights"] == 1
    assert attributes["weights_prepacked"] == 0
    assert attributes["expert_weight_bits"] == how.bits


def test_the_bytes_of_the_model_are_reused(bench) -> None:
    b = bench(quantised(block(static_loop, Parts(activate=clamped(), bias=True)), MatMulNBits(4, 16, False)))
    found = b.find()
    assert isinstance(found, Fusion)
    weights = {t.name.split("/")[-1]: numpy_helper.to_array(t) for t in b.write(found).graph.initializer}
    for e in range(6):
        first, second = (b.model.array(f"experts.{e}.w{k}_codes") for k in (1, 2))
        gate_up = first.reshape(96, 16)
        assert weights["fc1_codes"][e, 0::2].tobytes() == gate_up[:48].tobytes()
        assert weights["fc1_codes"][e, 1::2].tobytes() == gate_up[48:].tobytes()
        assert weights["fc2_codes"][e].tobytes() == second.tobytes()
        assert weights["fc2_scales"][e].tobytes() == b.model.array(f"experts.{e}.w2_scales").tobytes()
        zeros = b.model.array(f"experts.{e}.w2_zeros").reshape(32, 2) & [0xFF, 0x0F]  # the fourth is not there
        assert np.array_equal(weights["fc2_zeros"][e], zeros)
    assert b.difference() < 2e-6


def test_other_routers_and_biases_go_along(bench) -> None:
    b = bench(
        quantised(block(gathered, Parts(router=sigmoid_router, activate=clamped(), bias=True)), Dequantize(4, 2, 16))
    )
    found = b.find()
    assert isinstance(found, Fusion)
    b.write(found)
    assert b.difference() < 2e-6


def refused(outcome) -> str:
    assert isinstance(outcome, Refusal), outcome
    return outcome.code


@pytest.mark.parametrize(
    ("form", "how"),
    [
        (static_loop, {"w1": MatMulNBits(4, 16), "w2": MatMulNBits(8, 16)}),
        (static_loop, {"w1": MatMulNBits(4, 16)}),
        (static_loop, {"w2": Dequantize(8, 1)}),
        (static_loop, Dequantize(8, 0)),  # a scale per input
        (static_loop, Dequantize(4, 0, 8)),  # blocks too small
        (static_loop, Dequantize(4, 1, 16)),  # blocks of rows, a scale per input
        (gathered, {"w1": Dequantize(4, 2, 16), "w2": Dequantize(8, 1)}),
    ],
)
def test_what_the_operator_cannot_hold_is_refused(form, how, bench) -> None:
    assert refused(bench(quantised(block(form), how)).find()) == "MOE131"


def test_groups_of_both_matrices_may_differ(bench) -> None:
    b = bench(quantised(block(static_loop), {"w1": MatMulNBits(4, 32), "w2": MatMulNBits(4, 16)}))
    found = b.find()
    assert isinstance(found, Fusion)
    assert found.facts["block"] == 16
    b.write(found)
    assert b.difference() < 2e-6


def test_blocks_of_8_bits_need_consent_on_cpu(bench) -> None:
    model = quantised(block(static_loop), MatMulNBits(8, 16))
    b = bench(model)
    assert refused(b.find()) == "MOE132"
    found = b.find(Options(assume=frozenset({"rounded-activations"})))
    assert isinstance(found, Fusion)
    assert found.guarantee == "assumed"
    assert any("rounds activations" in sentence for sentence in found.contract)
    b.write(found)
    (kernel,) = [check.error for check in found.checks if "built in" in check.regime]
    assert 1e-3 < kernel < 3e-2, "the kernel no longer rounds, or rounds more"
    assert b.difference() == pytest.approx(kernel, rel=0.7)
    assert isinstance(b.find(Options(ep="cuda")), Fusion)


def test_a_model_that_rounds_itself_still_needs_consent(bench) -> None:
    """Its rounding is not the node's: results would move by as much, to somewhere else."""
    built = bench(quantised(block(static_loop), MatMulNBits(8, 16, accuracy_level=4)))
    assert built.find().code == "MOE132"
    found = built.find(Options(assume=frozenset({"rounded-activations"})))
    assert isinstance(found, Fusion)
    assert (found.guarantee, found.assumes) == ("assumed", ("rounded-activations",))


@pytest.mark.parametrize("how", [MatMulNBits(4, 16), Dequantize(4, 0, 16)])
def test_codes_in_wrong_places_are_noticed(how, bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from ortmoe_cli.weights import stored

    right = stored.Matrix.packed_codes

    def swapped(self, model):
        data = right(self, model)
        return data << 4 | data >> 4

    monkeypatch.setattr(stored.Matrix, "packed_codes", swapped)
    assert refused(bench(quantised(block(static_loop), how)).find()) == "MOE114"


def test_wrong_scales_are_noticed(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from ortmoe_cli.weights import recode

    right = recode.RecodedWeight._taken

    def wrong(self, piece):
        taken = right(self, piece)
        return taken[:, ::-1] if self.part == "scales" else taken

    monkeypatch.setattr(recode.RecodedWeight, "_taken", wrong)
    assert refused(bench(quantised(block(static_loop), MatMulNBits(4, 16))).find()) == "MOE114"


def test_a_node_that_differs_from_its_weights_is_noticed(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from ortmoe_cli.moe.quantised import emit

    right = emit.activation_attributes
    calls: list[int] = []

    def wrong(activation):
        calls.append(1)
        found = dict(right(activation))
        return found | ({"activation_alpha": 1.1} if len(calls) % 2 == 0 else {})  # the QMoE node is made second

    monkeypatch.setattr(emit, "activation_attributes", wrong)
    assert refused(bench(quantised(block(static_loop), MatMulNBits(4, 16))).find()) == "MOE114"


def test_dequantised_weights_never_become_a_float_node(bench) -> None:
    found = bench(quantised(block(gathered), STACKED["int4 blocks"])).find()
    assert isinstance(found, Fusion)
    assert all(w.elem_type in (1, 2) for w in found.weights)
    float_bytes = sum(4 * int(np.prod(w.shape)) for w in found.weights if w.name.endswith("codes"))
    assert sum(w.nbytes for w in found.weights) < float_bytes
