"""Float experts quantised on request: the error that is reported is the error that the runtime shows."""

import numpy as np
import pytest

from ortmoe_cli.outcome import Fusion, Options, Refusal
from ortmoe_cli.weights.quantise import Scheme
from tests.moe.graphs import Parts, clamped, dense_bmm, gathered, sigmoid_router, static_loop
from tests.moe.quantised.blocks import block


def rounded(scheme: Scheme, **more) -> Options:
    return Options(rounding=scheme, **more)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(4, 16), Scheme(4, 16, False), Scheme(4, 16, True, "search"), Scheme(4, 0, False, "search"),
        Scheme(8, 0), Scheme(8, 16),
    ],
    ids=lambda s: f"{s.describe()} {s.method}",
)  # fmt: skip
@pytest.mark.parametrize("form", [static_loop, gathered, dense_bmm])
def test_the_reported_error_is_what_the_runtime_shows(form, scheme: Scheme, bench) -> None:
    b = bench(block(form, Parts(activate=clamped(), bias=True)))
    found = b.find(rounded(scheme))
    assert isinstance(found, Fusion)
    assert (found.code, found.guarantee) == ("MOE005", "assumed")
    assert found.proof is not None
    assert all(check.error < 1e-4 for check in found.checks[:-2])
    reported = float(found.facts["relative error"])
    assert any(f"{reported:.2%}" in sentence for sentence in found.contract)
    proto = b.write(found)
    assert [n.op_type for n in proto.graph.node].count("QMoE") == 1
    assert b.difference() == pytest.approx(reported, rel=0.25)
    assert (reported < 0.03) == (scheme.bits == 8)
    before = 6 * 3 * 32 * 48 * 4
    assert found.facts["bytes before"] == before
    assert found.facts["bytes after"] == sum(w.nbytes for w in found.weights if "bias" not in w.name) < before / 3


def test_the_proof_is_the_float_form(bench) -> None:
    b = bench(block(static_loop))
    found = b.find(rounded(Scheme(4, 16)))
    assert isinstance(found, Fusion)
    assert isinstance(found.proof, Fusion)
    b.write(found.proof)
    assert b.difference() < 2e-6


def test_searching_lowers_the_error(bench) -> None:
    b = bench(block(gathered, Parts(router=sigmoid_router)))
    errors = [b.find(rounded(Scheme(4, 16, True, method))).facts["relative error"] for method in ("rtn", "search")]
    assert errors[1] < 0.95 * errors[0]


def test_an_error_above_the_bound_is_refused(bench) -> None:
    b = bench(block(static_loop))
    found = b.find(rounded(Scheme(4, 16), max_error=0.01))
    assert isinstance(found, Refusal)
    assert found.code == "MOE133"
    assert isinstance(b.find(rounded(Scheme(4, 16), max_error=0.5)), Fusion)


def test_blocks_that_do_not_fit_are_refused_with_one_that_does(bench) -> None:
    found = bench(block(static_loop)).find(rounded(Scheme(4, 32)))
    assert isinstance(found, Refusal)
    assert (found.code, found.nearest) == ("MOE134", "--block-size 16")


def test_a_fixed_part_does_not_make_the_error_look_smaller(bench) -> None:
    """What is added to the experts is no part of the measure."""
    from tests.moe import graphs

    def with_residual(g, parts):
        return g.op("Add", static_loop(g, parts), g.op("Mul", "x", g.constant(np.float32(100))))

    plain = bench(block(static_loop)).find(rounded(Scheme(4, 16)))
    added = bench(block(with_residual)).find(rounded(Scheme(4, 16)))
    assert graphs.H == 32
    assert added.facts["relative error"] == pytest.approx(plain.facts["relative error"], rel=0.3)


def test_quantised_experts_are_not_quantised_again(bench) -> None:
    from tests.moe.quantised.blocks import MatMulNBits, quantised

    found = bench(quantised(block(static_loop), MatMulNBits(4, 16))).find(rounded(Scheme(8, 0)))
    assert isinstance(found, Fusion)
    assert (found.code, found.guarantee, found.facts["bits"]) == ("MOE004", "exact", 4)
