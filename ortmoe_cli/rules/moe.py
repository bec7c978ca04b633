"""MOE0xx: Mixture-of-Experts blocks that were recognised."""

from ortmoe_cli.rules.rule import Rule

RULES = (
    Rule(
        code="MOE001",
        title="MoE block fused",
        what="""
            The router, the experts and their weighted sum were found, identified by running them, and verified.
            `audit` reports the block as fusable; `fuse` replaces it with one `com.microsoft.MoE` node and packs the
            weights of the experts into the layout of that node.
        """,
        why="""
            Exporters unroll an MoE layer into a loop over its experts or into large gathers of their weights.
            Either costs nodes or memory traffic: creating a session from an unrolled graph grows with the square of
            its nodes (4,400 nodes 1 s, 35,000 nodes 94 s), and gathered forms copy the weights of the selected
            experts for every token.
        """,
        example="""
            before   TopK → 128 × (NonZero → Gather → MatMul → SiLU·Mul → MatMul → ScatterND) → Add
            after    TopK → ScatterElements → com.microsoft.MoE → Mul
        """,
        action="""
            Nothing to decide: `ortmoe fuse MODEL -o OUT` writes it. Measure before you promise speed on a CPU:
            against gathered exports the fused node was faster at every size, against a loop over large experts it
            was slower for long prompts (0.76 × at 256 tokens).
        """,
        safety="""
            Exact. The routing weights are the original's own tensors, so every router is reproduced, ties included.
            The original and the rewritten block were run against each other over small, large and tied inputs, with
            every expert hit and with nearly all tokens sent to one expert. Results agree to rounding of the
            arithmetic.
        """,
    ),
    Rule(
        code="MOE002",
        title="MoE block already fused",
        what="""
            The model already holds a `com.microsoft.MoE` or `QMoE` node. Its inputs, attributes, weight shapes and
            element types were checked against what the runtime expects.
        """,
        why="""
            Nodes that other tools wrote are not always right: weights in the old `[experts, in, out]` order pass
            the shape check of the CPU kernel and compute garbage, and a missing bias slot or a scale of another
            type keeps the model from loading.
        """,
        example="MoE  layer 3  already-fused  E=8 k=2 H=64 I=128 silu",
        action="""
            Nothing. If the message names a version of the runtime in which this form is known to be wrong, upgrade
            the runtime or export the block unfused and let `ortmoe fuse` write it.
        """,
        safety="The node is left untouched.",
    ),
    Rule(
        code="MOE003",
        title="MoE block fused and repaired",
        what="""
            The export only runs when exactly as many experts are hit as in the example that it was traced with, but
            the file holds all that the intended block needs: the weights of every expert, chosen by ids computed at
            run time. The fused node runs for every input.
        """,
        why="""
            Tracing turns a loop over the experts that are hit into that fixed number of bodies. The graph fails, or
            is used only for inputs like the traced one.
        """,
        example="""
            before   NonZero → Split (7 pieces: 7 of 8 experts were hit in the traced example)
            after    com.microsoft.MoE over all 8 experts
        """,
        action="""
            Nothing to decide. If you compare the fused model with the original, use inputs for which the original
            runs, or compare with the framework.
        """,
        safety="""
            Equal wherever the original runs; where the original fails, the fused model computes the block as the
            file describes it. Inputs on which the original fails are never counted as agreement.
        """,
    ),
)
