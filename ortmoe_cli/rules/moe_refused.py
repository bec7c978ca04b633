"""MOE1xx: Mixture-of-Experts blocks that were left alone, and why."""

from ortmoe_cli.rules.rule import Rule

RULES = (
    Rule(
        code="MOE101",
        title="experts missing from the export",
        what="""
            The router chooses among more experts than the graph computes. The exporter ran one example and kept
            only the experts that this example happened to reach. The message says how many of how many are there.
        """,
        why="""
            This is not an obstacle to fusing, it is a wrong model: every token that the router sends to a missing
            expert loses that expert's share of the result, silently. Models exported from a prompt of one token
            gave wrong numbers on half to all of other inputs.
        """,
        example="MoE  layer 0  refused MOE101  6 of 8 experts are in the file",
        action="""
            Export again so that the graph does not depend on the example: `experts_implementation="batched_mm"`
            where the framework offers it, or an example long enough to reach every expert in every layer. Do not
            deploy this file.
        """,
        safety="Left as it was. No rewrite can bring back weights that are not in the file.",
    ),
    Rule(
        code="MOE102",
        title="expert token counts frozen at export",
        what="""
            Tokens are sorted by expert and split into pieces whose sizes are constants. They are the number of
            tokens that each expert got in the traced example, not what the router decides at run time.
        """,
        why="""
            For any other input tokens reach the wrong expert. The export is right for its own example and wrong for
            the rest.
        """,
        example="Split(sorted tokens, sizes = [3, 0, 5, 1, …])   # constants, should come from the router",
        action="""
            Export again with an exporter that keeps the sizes dynamic (the dynamo exporter does), or with
            `experts_implementation="batched_mm"`. Do not deploy this file.
        """,
        safety="Left as it was: what the block was meant to compute is a guess, and a fused node would differ from it.",
    ),
    Rule(
        code="MOE103",
        title="capacity limit: tokens are dropped",
        what="""
            The router caps how many tokens an expert may take (Switch and NLLB style) and drops the rest. Where a
            token stands in the batch decides whether it is computed.
        """,
        why="""
            `com.microsoft.MoE` has no capacity: it computes every token, so results would differ once an expert
            overflows.
        """,
        example="CumSum(one-hot of the choice) → LessOrEqual(capacity) → Mul   # tokens past the capacity become 0",
        action="""
            If the model tolerates it, export with a capacity that cannot be reached or with dropping switched off;
            the block can then be fused. Otherwise keep it unrolled.
        """,
        safety="Left as it was. The difference shows only when many tokens choose one expert, so it is probed for.",
    ),
    Rule(
        code="MOE104",
        title="routing scales the input of the experts, with more than one expert per token",
        what="""
            The score of an expert multiplies the token before the expert instead of the result after it, and more
            than one expert is used per token.
        """,
        why="""
            Experts are not linear, so the scale cannot be moved behind them. The fused node gives the same token to
            all chosen experts; with one expert per token the scaled token can be passed in, with several it cannot.
        """,
        example="y = Σ expert_e(score_e · x)   instead of   y = Σ score_e · expert_e(x)",
        action="Nothing in this file. Keep the block unrolled.",
        safety="Left as it was: a fused node would compute another function.",
    ),
    Rule(
        code="MOE105",
        title="activation not offered by the operator",
        what="""
            The experts use an activation that `com.microsoft.MoE` cannot compute, or the exact form of one that it
            approximates.
        """,
        why="""
            The operator offers relu, silu, identity, gelu and swiglu, gated and not. Its CPU kernel computes the
            tanh form of gelu and the CUDA kernel seems to compute the erf form, so one file cannot be right on
            both.
        """,
        example="""
            MoE  layer 0  refused MOE105  the activation of the experts is none that is known
                nearest: closest: silu with gate, off by 4.2e-02
        """,
        action="""
            The nearest miss names the closest activation and how far off it is. If you can choose, export the model
            with an activation of the list; never exchange it in the file, the weights were trained with the other.
        """,
        safety="Left as it was.",
    ),
    Rule(
        code="MOE106",
        title="negative routing weights",
        what="Some experts can get a negative weight in the sum.",
        why="The operator makes its weights with a softmax, which only yields positive ones.",
        example="weights = Tanh(logits)   # -1 … 1",
        action="Nothing in this file. Keep the block unrolled.",
        safety="Left as it was: signs would be lost.",
    ),
    Rule(
        code="MOE107",
        title="the block has no exit of its own",
        what="""
            There is no single tensor in which everything that depends on the routing comes together again and that
            has the shape of the hidden states, so there is no one tensor to replace.
        """,
        why="""
            The fused node has a single output. Inner results that something else reads would have to be computed
            anyway.
        """,
        example="the result of one expert is also an output of the graph",
        action="""
            If the extra tensor is a debugging output (router statistics, hidden states of an expert), export
            without it.
        """,
        safety="Left as it was.",
    ),
    Rule(
        code="MOE108",
        title="experts not recognised",
        what="""
            A router was found, but what is computed for the chosen experts is not a feed-forward network of two or
            three matrix products with constant weights.
        """,
        why="Only that form exists as an operator. Guessing at another would change results.",
        example="MoE  layer 2  refused MOE108  the experts read 2 different tensors",
        action="""
            Look at the nearest miss in the report. If the block is an ordinary one, please file an issue with the
            export: no exporter is special-cased, so it is a gap in the method.
        """,
        safety="Left as it was.",
    ),
    Rule(
        code="MOE109",
        title="output is not a weighted sum of the experts",
        what="""
            The experts were recognised, but no weights explain the output: `y = Σ c_e · expert_e(x)` leaves a
            remainder that is larger than rounding.
        """,
        why="Something else happens between the experts and the exit: a norm, a clamp, a mixing of tokens.",
        example="""
            MoE  layer 1  refused MOE109  the output is no weighted sum of the experts
                nearest: remainder 3.1e-02 of the output
        """,
        action="""
            Look at the size of the remainder. Near 1e-3 it is often an activation of a slightly different form;
            near 1 the exit of the block is somewhere else. An issue with the export is welcome.
        """,
        safety="Left as it was. The remainder is what a fused node would get wrong.",
    ),
    Rule(
        code="MOE110",
        title="routing weights not found in the graph",
        what="""
            The weights of the experts are known by value, but no tensor of the graph holds them, neither as ids and
            weights per token nor as one weight per expert.
        """,
        why="""
            The fused node is fed with the original's own routing. Without such a tensor the router would be
            imitated, not reused.
        """,
        example="the weight of a token is spread over several tensors that meet in the sum only",
        action="An issue with the export is welcome: tell which router the model uses.",
        safety="Left as it was.",
    ),
    Rule(
        code="MOE111",
        title="the block cannot be evaluated on its own",
        what="""
            The part of the graph between router and exit was cut out, but it needs a value from outside or does not
            run.
        """,
        why="""
            A block is identified by running it. Usual causes: it reads a graph input other than the hidden states,
            the runtime on this machine lacks an operator, or shapes are fixed to sizes that contradict each other.
        """,
        example="MoE  layer 0  refused MOE111  needs the graph input 'attention_mask'",
        action="The message says what was missing. If an operator or data type is not supported, try a newer runtime.",
        safety="Left as it was: what cannot be run cannot be proven.",
    ),
    Rule(
        code="MOE112",
        title="experts quantised in a way or stored in a type that is not supported",
        what="""
            The experts multiply rounded activations (`MatMulInteger` and its like), or their weights have an element
            type that the method cannot handle.
        """,
        why="""
            `com.microsoft.QMoE` rounds weights only. A product of rounded activations computes something else, which
            no fused node reproduces.
        """,
        example="MoE  layer 0  refused MOE112  experts are quantised (MatMulInteger)",
        action="Fuse the float export, with `--experts int4` or `int8` if it is to be smaller.",
        safety="Left as it was. The experts are never dequantised behind your back.",
    ),
    Rule(
        code="MOE113",
        title="experts differ in shape or activation",
        what="Not all experts of the block have the same width, the same activation or the same biases.",
        why="The operator stacks the weights of all experts into one tensor and applies one activation.",
        example="MoE  layer 0  refused MOE113  experts have the inner widths 128, 256",
        action="Nothing in this file. Pruned models with experts of unequal width stay unrolled.",
        safety="Left as it was.",
    ),
    Rule(
        code="MOE114",
        title="rewrite differs from the original on a probe",
        what="""
            The block was identified and rewritten, but original and rewrite gave different results on one of the
            probes.
        """,
        why="""
            This is the last line of defence, and it held: some property of the block shows only for large values,
            for ties, or when nearly all tokens choose one expert.
        """,
        example="MoE  layer 5  refused MOE114  the rewrite differs (hidden x20: 2.0e-01 of the output)",
        action="Please file an issue: the message names the kind of probe and the size of the difference.",
        safety="Left as it was; the rewrite was thrown away.",
    ),
    Rule(
        code="MOE115",
        title="control flow or model function inside the block",
        what="Part of the block lies inside an `If`, `Loop` or `Scan`, or in a function that is local to the model.",
        why="Blocks inside are recognised, but replacements are only made in the main graph.",
        example="Loop over experts with the body in a subgraph",
        action="Export with loops unrolled or with batched experts, or inline the functions (`onnx.inliner`) first.",
        safety="Left as it was.",
    ),
    Rule(
        code="MOE116",
        title="number of experts per token varies",
        what="""
            How many experts a token uses depends on the token (top-p routing, thresholds) or on an input of the
            model.
        """,
        why="The operator chooses the same number `k` of experts for every token.",
        example="experts with a score above 0.1, between 0 and 8 of them",
        action="Nothing in this file. Keep the block unrolled.",
        safety="Left as it was.",
    ),
)
