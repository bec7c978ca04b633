"""The comparison of whole models where the fused one rounds: it is made with the blocks before rounding.

No bound on a rounded model's outputs proves that it was put together rightly. So the same model is written once more
with the float nodes that were proven block by block, and that one has to equal the original. What was rounded differs
from it in the weights of these nodes only; how far the outputs are off then is measured and told, not judged.
"""

import tempfile
from pathlib import Path

from ortmoe_cli.engine.inspect import Inspection
from ortmoe_cli.engine.parity import MEMORY, compare_models
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.moe.quantised.reader import Reader
from ortmoe_cli.outcome import Fusion, Progress
from ortmoe_cli.report.words import size
from ortmoe_cli.weights.write import write_model


def compare(found: Inspection, written: Path, progress: Progress) -> list[str]:
    """Compare the written model with the original. Notes for the report; ParityError if they differ otherwise than by
    the rounding that was agreed to."""
    if not any(_rounds(fusion) for fusion in found.fusions):
        return compare_models(found.index, written, progress, exits=_exits(found))
    proofs = [fusion.proof if fusion.proof and _rounds(fusion) else fusion for fusion in found.fusions]
    packed = [weight for proof in proofs for weight in proof.weights]
    if sum(weight.nbytes for weight in packed) + found.model.weight_bytes > MEMORY:
        return [
            "rounded experts: compared block by block, not as a whole: the float models do not fit into memory twice"
        ]
    source = Reader(found.index, found.cutter, {})
    with tempfile.TemporaryDirectory(prefix="ortmoe-") as folder:
        proof = Path(folder) / "proof.onnx"
        write_model(found.model, splice(found.model, [fusion.island for fusion in proofs]), packed, source, proof)
        return compare_models(found.index, proof, progress, rounded=written, exits=_exits(found))


def _exits(found: Inspection) -> list[str]:
    """The tensors that the fused model computes in another way."""
    return [name for fusion in found.fusions for name in fusion.island.outputs]


def rounding_notes(found: Inspection) -> list[str]:
    """What quantising the experts saved and cost, in one line."""
    rounded = [{**fusion.facts, "at": _where(fusion)} for fusion in found.fusions if fusion.code == "MOE005"]
    if not rounded:
        return []
    before, after = (sum(int(facts[f"bytes {when}"]) for facts in rounded) for when in ("before", "after"))
    least, most = (chosen(rounded, key=lambda facts: facts["relative error"]) for chosen in (min, max))
    error = f"relative error {least['relative error']:.2%}{least['at']}"
    if most is not least:
        error += f" to {most['relative error']:.2%}{most['at']}"
    return [f"experts quantised: {size(before)} → {size(after)}, {error}"]


def _where(fusion: Fusion) -> str:
    return "" if fusion.layer is None else f" (layer {fusion.layer})"


def _rounds(fusion: Fusion) -> bool:
    return fusion.proof is not None and fusion.guarantee == "assumed"
