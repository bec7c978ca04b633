"""MOE2xx: what is wrong with MoE and QMoE nodes that a model came with.

Where the repair is exact, `audit` reports the node as fusable and `fuse` replaces it one by one; the code stays the
same. Otherwise it is reported as already fused, with this code instead of MOE002. Nodes in half precision, which is for
CUDA, are repaired only with `--repair all`.
"""

from ortmoe_cli.rules.rule import Rule

_LEFT = "The node is left as it was."
_REPAIRED = """
    The repaired node computes what the schema of the operator says the old one computes. It was run against that
    formula in double precision, over small and large inputs. The number of nodes stays the same.
"""

RULES = (
    Rule(
        code="MOE201",
        title="fused node does not match the operator's schema",
        what="""
            The node has an attribute or an input that the installed runtime does not know, lacks one that it needs, or
            mixes element types.
        """,
        why="The runtime refuses to load such a model, or a newer runtime than the installed one wrote it.",
        example="MoE  layer 2  already-fused MOE201  the operator QMoE of the installed runtime has no attribute 'x'",
        action="Install the version of the runtime that the model was made for, or export the block unfused.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE202",
        title="fused node with weights in the old order",
        what="""
            The weights of the experts are `[experts, in, out]`. Earlier runtimes wanted that; today the operator reads
            them as `[experts, out, in]`.
        """,
        why="The CPU kernel accepts both shapes where they agree in size, and computes garbage with the old one.",
        example="fc1 [8, 64, 128], fc2 [8, 128, 64] for hidden size 64: should be [8, 128, 64] and [8, 64, 128]",
        action="Make the model again with a current exporter, or transpose the last two axes of fc1, fc2 and fc3.",
        safety=f"""
            {_LEFT} Transposing the weights would change what the model computes in the installed runtime, which no
            comparison could call equal.
        """,
    ),
    Rule(
        code="MOE203",
        title="fused node with separate gate and up matrices",
        what="The node has a third matrix per expert (fc3): gate and up are not packed into one.",
        why="""
            The CPU kernel does not implement fc3, so the model does not run there. The CUDA kernel does, but never
            reads the bias of fc3. Packed into fc1 with rows in turn, the node runs on both.
        """,
        example="before  MoE(x, logits, gate, , down, , up)   after  MoE(x, logits, gate and up in turn, , down)",
        action="""
            `ortmoe fuse` packs silu and swiglu nodes in float32, and with `--repair all` those in half precision, which
            is for CUDA. Other activations with a third matrix cannot be expressed otherwise: run these on CUDA.
        """,
        safety=_REPAIRED,
    ),
    Rule(
        code="MOE204",
        title="fused node that does not normalise the routing weights",
        what="The node has `normalize_routing_weights=0`.",
        why="""
            Up to version 1.31 the CPU kernel of MoE may write its result over its input before it has read it, if
            nothing else needs the input: results are wrong, silently. Fixed in 1.32. With 1 it never happened. QMoE
            ignores the attribute on the CPU and always normalises.
        """,
        example="before  MoE(normalize=0)   after  MoE(normalize=1) × sum of the k largest probabilities",
        action="`ortmoe fuse` rewrites MoE nodes. For QMoE, give the weights as the input router_weights.",
        safety=_REPAIRED,
    ),
    Rule(
        code="MOE205",
        title="fused node with gate and up in halves",
        what="The node has a gated activation and `swiglu_fusion` 0 or 2.",
        why="The CPU kernel implements only 1, gate and up rows in turn. It runs on CUDA as well.",
        example="before  MoE(swiglu_fusion=2)   after  MoE(swiglu_fusion=1), rows of fc1 in turn",
        action="`ortmoe fuse` reorders the rows where both halves are in fc1.",
        safety=_REPAIRED,
    ),
    Rule(
        code="MOE206",
        title="element type that the provider does not implement",
        what="The node is in bfloat16 and meant for the CPU, or QMoE in float32 and meant for CUDA.",
        why="The runtime has no kernel for it, so the session is refused when it is created.",
        example="MoE  layer 0  already-fused MOE206  bfloat16 is not implemented on the CPU",
        action="Run the model on the other provider, or convert it. `--ep` says which one is meant.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE207",
        title="sizes that the CUDA kernels do not take",
        what="Hidden or inner size is small, or not the multiple that the kernels of the provider are made for.",
        why="MoE wants 16 at least and multiples of 8 in half precision, of 4 in float32; QMoE multiples of 64.",
        example="H=60 and I=20: CUDA wants at least 16 and multiples of 8",
        action="Run the model on the CPU. Sizes cannot be changed without changing the model.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE208",
        title="more experts chosen than there are",
        what="The attribute k of the node is larger than the number of experts, or smaller than 1.",
        why="The runtime refuses to run the node.",
        example="k=9 of 8 experts",
        action="Export again; the configuration of the model and its weights do not belong together.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE209",
        title="inputs of a fused node that do not fit each other",
        what="The shapes of the weights, biases or scales contradict each other.",
        why="The runtime refuses to run the node, or reads beyond what belongs to an expert.",
        example="fc1_bias is [8, 64], should be [8, 128]",
        action="Export again, or correct the tensor that the message names.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE210",
        title="routing of a fused node has the wrong number of dimensions",
        what="The input router_probs is not `[tokens, experts]`.",
        why="Only hidden states may have three dimensions. The runtime refuses others.",
        example="router_probs has 3 dimensions; the operator takes [tokens, experts] only",
        action="Put a Reshape to [-1, experts] in front of the input.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE211",
        title="packing of a quantised node is not said",
        what="A QMoE node has no attribute `weights_prepacked`.",
        why="""
            The default, -1, means for CUDA that the weights are packed for its kernels already, and for the CPU that
            they are not. One file can only serve both if it says 0 and holds raw weights.
        """,
        example="QMoE(weights_prepacked=0) runs on CPU and CUDA",
        action="If the weights are raw, set the attribute to 0. The file does not show whether they are.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE212",
        title="sparse mixer that the CPU ignores",
        what="The node has `use_sparse_mixer=1`.",
        why="The CPU kernel ignores the attribute and routes by softmax, silently.",
        example="MoE(use_sparse_mixer=1, k=2)",
        action="Run the model on CUDA, or export the block unfused and let `ortmoe fuse` write it.",
        safety=_LEFT,
    ),
    Rule(
        code="MOE213",
        title="fused node that providers compute differently",
        what="The node uses something that the CPU and the CUDA kernel are known or suspected to compute differently.",
        why="gelu has two forms, 8-bit blocks are multiplied in 8 bits on the CPU, router_weights may not be read.",
        example="gelu is computed in its tanh form on the CPU and seems to be the erf form on CUDA",
        action="Compare the results on the provider that you deploy on. `ortmoe doctor` tests what a machine does.",
        safety=_LEFT,
    ),
)
