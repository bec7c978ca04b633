"""What becomes of an identified block: a float node, a quantised one as it is, or one that is rounded on request."""

from dataclasses import replace

from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.emit import Rewrite, emit
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.quantised.check import EXACT, ROUNDED, NodeCheck, bare
from ortmoe_cli.moe.quantised.emit import emit_quantised, emit_rounded, is_quantised
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.outcome import Check, Options
from ortmoe_cli.weights.quantise import Scheme


def rewrite_of(index: Index, cutter: Cutter, block: Block, source: Source, name: str, options: Options) -> Rewrite:
    """The replacement of a block. Raises Refused."""
    if is_quantised(index, block):
        return emit_quantised(index, cutter, block, source, name, options)
    if options.rounding is None:
        return emit(index, block, source, name)
    rounding, plain = emit_rounded(index, block, source, name, options.rounding)
    return replace(rounding, proof=plain)


def node_checks(
    index: Index, cutter: Cutter, block: Block, rewrite: Rewrite, check: NodeCheck, source: Source, options: Options
) -> tuple[Rewrite, tuple[Check, ...]]:
    """The rewrite with what was measured on its node. Raises Refused where the node is not what its weights say, or
    where the error is larger than allowed."""
    if rewrite.proof is None:
        return rewrite, ()
    name = rewrite.island.name
    if rewrite.terms.code != "MOE005" or options.rounding is None:
        again = emit_quantised(index, cutter, bare(block), source, name, options)
        (error,) = _differences(check, again)
        return rewrite, (Check("QMoE node with its weights built in", error),)
    again, plain = emit_rounded(index, bare(block), source, name, options.rounding)
    scheme = options.rounding
    kernel, error = _differences(check, again, plain)
    if options.max_error is not None and error > options.max_error:
        raise Refused(
            "MOE133",
            f"{scheme.describe()}: the relative error is {error:.2%}, allowed are {options.max_error:.2%}",
            "a smaller --block-size, --quantiser search, --asymmetric or int8 lower it",
        )
    sentence = f"expert weights are rounded to {scheme.describe()} ({_method(scheme)}): relative error {error:.2%}"
    terms = replace(
        rewrite.terms,
        message=f"{rewrite.terms.message}; relative error {error:.2%}",
        contract=(sentence,),
        facts={**rewrite.terms.facts, "relative error": round(error, 6), "kernel error": float(f"{kernel:.2e}")},
    )
    checks = (
        Check("rounded experts against the float ones", error),
        Check("QMoE node with its weights built in", kernel),
    )
    return replace(rewrite, terms=terms), checks


def _method(scheme: Scheme) -> str:
    return "to the nearest" if scheme.method == "rtn" else "scales searched"


def _differences(check: NodeCheck, rewrite: Rewrite, *others: Rewrite) -> list[float]:
    """The node against the float node of the same weights, decoded, and against others."""
    assert rewrite.proof is not None
    rounds = rewrite.terms.facts.get("bits") == 8 and bool(rewrite.terms.facts.get("block"))
    error, *more = check.differences(rewrite, rewrite.proof, *others)
    if error > (ROUNDED if rounds else EXACT):
        raise Refused("MOE114", f"the quantised node differs from its own weights ({error:.1e} of the output)")
    return [error, *more]
