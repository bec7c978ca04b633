"""MOE004, MOE005 and MOE13x: experts that are quantised, in the model or on request."""

from ortmoe_cli.rules.rule import Rule

_AS_IT_WAS = "Left as it was. The experts are never dequantised or quantised anew behind your back."

FUSED = (
    Rule(
        code="MOE004",
        title="quantised MoE block fused",
        what="""
            The experts are quantised in the model (`MatMulNBits`, `DequantizeLinear`, `GatherBlockQuantized`), and
            their codes, scales and zero points were moved into one `com.microsoft.QMoE` node. Nothing was rounded.
        """,
        why="""
            The bytes of a row are the same in both forms wherever the layout allows; gate and up rows are interleaved,
            transposed weights are repacked code by code, signed codes become unsigned ones with a shifted zero point,
            and a group may become several blocks with the same scale.
        """,
        example="MoE  layer 0  → fused, exact  MOE004  E=64 k=8; int4 in blocks of 32, as in the model",
        action="""
            Nothing to decide. If the contract speaks of rounded activations, read MOE132.
        """,
        safety="""
            Exact. The packed bytes were decoded again and compared, as a float MoE node, with the original on all
            probes, and the QMoE node was run with its weights built in, as the runtime will run it.
        """,
    ),
    Rule(
        code="MOE005",
        title="MoE block fused and its experts quantised",
        what="""
            On request (`--experts int4` or `int8`) the float experts were rounded on the way into a
            `com.microsoft.QMoE` node. Results change; the report gives the measured error of each block.
        """,
        why="""
            Reading the experts' weights bounds the speed of decoding, and 4 bits are an eighth of float32. The error
            is `‖y' − y‖ / ‖y‖` of the routed output, over tokens for every expert, measured with the node as the
            runtime runs it.
        """,
        example="ortmoe fuse model.onnx -o int4.onnx --experts int4 --block-size 32 --quantiser search",
        action="""
            Compare the error of the layers; `--quantiser search`, `--asymmetric`, smaller blocks or `int8` lower it.
            `--max-error 0.05` leaves a block alone that exceeds 5 %. Check the quality of the model on your own task:
            an error of the layers is not an error of the answers.
        """,
        safety="""
            Everything but the rounding is proven as for MOE001: the float form of the block equals the original, and
            the QMoE node equals its own decoded weights. The guarantee is `assumed`, because you asked for it.
        """,
    ),
)

REFUSED = (
    Rule(
        code="MOE131",
        title="quantised experts in a form that QMoE does not have",
        what="""
            The experts are quantised, but their codes and scales do not fit into one `com.microsoft.QMoE` node without
            rounding again.
        """,
        why="""
            The operator takes one width (2, 4 or 8 bits) for all experts and both of their matrices, and scales per row
            or per block of a power of two of inputs, from 16 on. Scales per input, groups of other sizes, columns in
            an order of their own, codes that the graph computes, or only some of the weights quantised do not fit.
        """,
        example="MoE  layer 0  refused MOE131  experts of 4 and 8 bits, the operator takes one width",
        action="Quantise all experts the same way, or fuse the float model with `--experts int4`.",
        safety=_AS_IT_WAS,
    ),
    Rule(
        code="MOE132",
        title="CPU kernel would round activations",
        what="""
            The experts have 8 bits in blocks. The codes fit into `com.microsoft.QMoE`, but for these the CPU kernel
            rounds activations to 8 bits.
        """,
        why="""
            That changes results by about 1 %, and nothing in the model says that this is wanted. Weights of 4 bits, and
            of 8 bits with one scale per row, are computed exactly.
        """,
        example="MoE  layer 0  refused MOE132  experts of 8 bits in blocks of 32",
        action="""
            `--assume rounded-activations` accepts it, `--ep cuda` does not need it, and in the environment of the
            server `ORT_QMOE_CPU_QNBIT_GEMM=0` makes the kernel exact. A model whose products have `accuracy_level=4`
            rounds as well, but elsewhere, so it needs the same consent.
        """,
        safety=_AS_IT_WAS,
    ),
    Rule(
        code="MOE133",
        title="error of quantised experts above the bound",
        what="""
            `--experts` would round the experts of this block with a larger relative error than `--max-error` allows.
        """,
        why="""
            The error was measured with the node as the runtime runs it, so it also holds what the kernel rounds by
            itself (see MOE132).
        """,
        example="MoE  layer 2  refused MOE133  int4 in blocks of 128: the relative error is 9.80%, allowed are 5.00%",
        action="Smaller blocks, `--quantiser search`, `--asymmetric` or `int8`; or a larger bound.",
        safety="Left as it was, in float and unrolled. Fuse without `--experts` to have it fused in float.",
    ),
    Rule(
        code="MOE134",
        title="block size does not suit the experts",
        what="`--block-size` does not divide the hidden or the inner width of the experts.",
        why="The operator wants whole blocks of inputs in both matrices, and rows that end with a byte.",
        example="MoE  layer 0  refused MOE134  blocks of 64 do not divide the 96 inputs of the experts",
        action="The message names the largest block that suits; `--block-size 0` has one scale per row.",
        safety=_AS_IT_WAS,
    ),
)
