"""GQAxxx: grouped-query attention, fused and left alone."""

from ortmoe_cli.rules.rule import Rule

RULES = (
    Rule(
        code="GQA001",
        title="attention fused",
        what="""
            Queries, keys and values, the cache, the scale, the softcap, the sinks and the mask were identified by
            evaluating them, and verified. `fuse` replaces the attention with one
            `com.microsoft.GroupQueryAttention`.
        """,
        why="""
            Unrolled attention repeats every key and value head for each query head of its group, writes the whole
            score matrix to memory and copies the cache on every step. The fused node does none of this.
        """,
        example="""
            before   Concat(past, k) → Expand (× group) → MatMul(q, kᵀ) → Mul → Add(mask) → Softmax → MatMul
            after    com.microsoft.GroupQueryAttention
        """,
        action="""
            Nothing to decide. Rotary embeddings and the mask stay as the export computes them, so left and right
            padding, windows and caches mean what they meant before.
        """,
        safety="""
            Exact: original and rewrite were run against each other for prompts, decode steps and padded batches.
            Rows of padding tokens may hold other numbers; no real token reads them.
        """,
    ),
    Rule(
        code="GQA002",
        title="attention already fused",
        what="""
            The model already holds a `com.microsoft.GroupQueryAttention` node. Its inputs and attributes were
            checked.
        """,
        why="""
            Nodes that other tools wrote are not always right: `local_window_size = 0` computes garbage, and lengths
            that are taken from the sum of the mask are wrong for left padding.
        """,
        example="GQA  layer 0  already-fused  heads=32 kv_heads=8 head_size=128",
        action="""
            Nothing. If you pad on the left, compare a padded batch with the framework before you deploy such a
            model.
        """,
        safety="The node is left untouched.",
    ),
    Rule(
        code="GQA003",
        title="attention fused, fewer inputs accepted",
        what="""
            As GQA001, but the runtime refuses some inputs for the fused node that the original takes. They are
            listed under `contract` in the report.
        """,
        why="""
            `GroupQueryAttention` takes several new tokens *and* a past for one sequence only. With a batch of more
            than one, this combination (chunked prefill, speculative decoding of a batch) ends in an error of the
            runtime. It takes neither an empty batch (the kernel ends the process) nor a call without new tokens.
        """,
        example="contract: several new tokens after a cache are accepted for one sequence at a time …",
        action="""
            Prompts and ordinary decoding are not affected. If you need chunked prefill for batches, feed one
            sequence at a time or leave attention alone with `--only moe`.
        """,
        safety="""
            Narrowed: equal results for every input that is accepted, and a loud error, never another result, for
            the rest.
        """,
    ),
    Rule(
        code="GQA101",
        title="bidirectional attention (encoder)",
        what="Tokens may look at later tokens. This is an encoder, or a decoder without a causal mask.",
        why="The fused node is emitted as causal attention; making an encoder causal changes every result.",
        example="the mask depends on padding only, or there is none",
        action="""
            Nothing for an encoder. If the model is meant to be a decoder, its export lost the causal mask: compare
            it with the framework.
        """,
        safety="Left as it was.",
    ),
    Rule(
        code="GQA102",
        title="key and value heads differ in size (MLA)",
        what="Multi-head latent attention: keys and values have heads of different sizes.",
        why="`GroupQueryAttention` takes one head size for both and rejects anything else.",
        example="GQA  layer 0  refused GQA102  key heads have size 192, value heads 128 …",
        action="Nothing in this file. MoE blocks of the same model fuse all the same.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA103",
        title="cross attention",
        what="Keys and values are computed from other tokens than the queries, for example from an encoder.",
        why="""
            The fused node assumes that query `i` and key `i` are the same token; its mask and its cache rest on
            that.
        """,
        example="q from the decoder's hidden states, k and v from the encoder's output",
        action="Nothing in this file.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA104",
        title="head size is not a multiple of 8",
        what="The heads have a size that the kernels of the fused node do not support.",
        why="`GroupQueryAttention` needs a head size that is a multiple of 8, on the CPU as well as on CUDA.",
        example="GQA  layer 0  refused GQA104  the heads have size 20, which is not a multiple of 8",
        action="Nothing in this file; padding the heads would change the weights and the cache.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA105",
        title="mask cannot be carried over",
        what="""
            What is blocked in the scores is neither a causal mask, with or without a window, nor something that can
            be computed before the node: it depends on the data, lets some tokens see their future, or leaves a
            token no key. Or it could not be shown that it hides the future at every length.
        """,
        why="""
            The fused node is causal and takes one bias, computed beforehand, of shape `[batch or 1, heads or 1,
            new, total]`. It cannot take back what causality blocks.
        """,
        example="GQA  layer 0  refused GQA105  in a prompt, 12 of 24 queries see keys of their future",
        action="""
            The message says in which of the probed situations (prompt, decode step, padding) it failed, or which
            number in the mask may let it act otherwise on inputs that are too long to try. A prefix that sees itself
            in both directions has to stay as it is.
        """,
        safety="Left as it was: a dropped mask is the classic silent error of attention fusion.",
    ),
    Rule(
        code="GQA106",
        title="repeated heads are not contiguous",
        what="""
            Key and value heads are repeated in another order than head 0 for the first group, head 1 for the
            second, and so on.
        """,
        why="""
            The fused node shares key head `j` among the query heads `j·g … j·g+g−1`. Tiled repeats pair them
            differently.
        """,
        example="k repeated as 0 1 0 1 (tiled) instead of 0 0 1 1",
        action="Nothing in this file. The query projection would have to be permuted, which moves its weights.",
        safety="Left as it was: the shapes fit, but other heads would be paired.",
    ),
    Rule(
        code="GQA107",
        title="attention could not be evaluated",
        what="The part of the graph around the scores needs a value from outside, or does not run on this machine.",
        why="Attention is identified by evaluating it. What cannot be evaluated cannot be proven.",
        example="GQA  layer 0  refused GQA107  the shape of 'key_states' could not be derived",
        action="The message says what was missing. For an operator that the runtime lacks, try a newer runtime.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA108",
        title="unknown operation between scores and softmax",
        what="""
            Something other than a constant scale, a softcap, a mask or sinks changes the scores before the softmax, or
            something changes the weights after it.
        """,
        why="""
            The fused node offers these four. Leaving any other out would change results, perhaps for long inputs
            only: a factor that grows with the position, or an input that switches something.
        """,
        example="scores of several heads are mixed before the softmax",
        action="The nearest miss in the report names the operation. An issue with the export is welcome.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA109",
        title="rewrite differs from the original on a probe",
        what="""
            Attention was identified and rewritten, but original and rewrite gave different results on one of the
            probes.
        """,
        why="""
            The last line of defence, and it held: some property shows only with padding, with a long past or for
            large values.
        """,
        example="GQA  layer 4  refused GQA109  in a left-padded decode the fused operator differs by 3.0e-01",
        action="""
            Please file an issue: the message names the situation and the size of the difference.
        """,
        safety="Left as it was; the rewrite was thrown away.",
    ),
    Rule(
        code="GQA110",
        title="element type not supported",
        what="Queries, keys and values have a type for which the fused node has no kernel on the target.",
        why="On the CPU there are kernels for float and float16; on CUDA for float16 and bfloat16, and none for float.",
        example="GQA  layer 0  refused GQA110  element type 11 is not supported by GroupQueryAttention",
        action="Convert the model to a type that the target supports, or choose the target with `--ep`.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA111",
        title="layout of the scores not supported",
        what="""
            The scores have three dimensions, or the queries of a group were folded into the sequence instead of
            repeating the keys.
        """,
        why="""
            Tracing a decode step with one token makes exporters fold `[batch, heads, 1, size]` into `[batch · kv
            heads, group, size]`. Such a graph holds for one new token only.
        """,
        example="Softmax over [batch · kv_heads, group, total]",
        action="Export with more than one new token in the example.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA112",
        title="another fused attention node",
        what="""
            The exporter, or an optimiser after it, wrote a fused attention node such as
            `com.microsoft.MultiHeadAttention`, which repeats keys and values instead of sharing them, or an
            `Attention` node that does not tell its heads.
        """,
        why="These nodes are one kernel already. Turning them into `GroupQueryAttention` is not built yet.",
        example="GQA  layer 0  refused GQA112  a MultiHeadAttention node: fused, but not grouped",
        action="Fuse the plain export, before any other optimiser has seen it.",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA113",
        title="values scaled, one-sided or static cache",
        what="""
            The cache is not a plain pair of past and new: only keys or only values have one, keys or values are scaled
            or cut on the way, or the cache is a buffer of fixed length that is written in place.
        """,
        why="The fused node appends to keys and values alike and returns both caches as it read them.",
        example="ScatterND(cache, position, k)   instead of   Concat(past, k)",
        action="Export with a dynamic cache (`past` and `present` tensors that grow by the new tokens).",
        safety="Left as it was.",
    ),
    Rule(
        code="GQA114",
        title="invalid GroupQueryAttention node",
        what="The model came with a `GroupQueryAttention` node that contradicts the operator's schema.",
        why="""
            The runtime refuses such a node, or computes garbage: with a window of 0, with heads that do not divide into
            groups, or without the lengths of the sequences.
        """,
        example="GQA  layer 0  refused GQA114  a GroupQueryAttention node with a window of 0 …",
        action="Export again without the tool that wrote the node, and fuse the plain attention.",
        safety="Left as it was; it was not made by `fuse`.",
    ),
)
