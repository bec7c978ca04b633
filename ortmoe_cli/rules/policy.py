"""POLxxx: what keeps a model from the throughput that a policy asks for. `check` and `policy validate` give these."""

from ortmoe_cli.rules.rule import Rule

_UNTOUCHED = "Left as it was: `check` reads and reports, it changes neither the model nor the policy."


def _rule(code: str, title: str, what: str, why: str, example: str, action: str) -> Rule:
    return Rule(code, title, what, why, example, action, _UNTOUCHED)


RULES = (
    _rule(
        "POL101",
        "graph optimisations are not all on",
        "The policy asks for an optimisation level below `all`.",
        """
        Fusions of normalisations, activations and biases happen at the levels `extended` and `all` only. Levels below
        are for debugging.
        """,
        'optimization_level = "basic"',
        'Set `optimization_level = "all"`.',
    ),
    _rule(
        "POL102",
        "TF32 is off for float32 weights",
        "The model multiplies float32 matrices, and the policy keeps tensor cores from rounding them to TF32.",
        "Float32 products without TF32 do not use the tensor cores of the GPU at all.",
        "[provider_options.CUDAExecutionProvider]\nuse_tf32 = false",
        "Set `use_tf32 = true`, or store the weights in float16. Compare results: TF32 has 10 bits of mantissa.",
    ),
    _rule(
        "POL103",
        "CUDA graphs are off",
        "The policy is for CUDA and does not record CUDA graphs.",
        """
        A decoding step of a language model is hundreds of short kernels. Launching each costs more than running it;
        a recorded graph launches all of them at once. `audit --tokens 1` counts them.
        """,
        "[cuda_graph]\nenabled = false",
        "Set `cuda_graph.enabled = true` and list the shapes of decoding as buckets.",
    ),
    _rule(
        "POL104",
        "control flow cannot be recorded",
        "The graph holds `If`, `Loop` or `Scan` nodes.",
        "The runtime refuses to make a session with CUDA graphs for such a model: the host decides what runs next.",
        "1 node with control flow cannot be recorded: '/model/layers.0/If'",
        "If they belong to experts, fuse them. Otherwise export without them, or record a part of the model only.",
    ),
    _rule(
        "POL105",
        "a shape depends on values",
        "Nodes such as `NonZero` make tensors whose size the host has to read back from the device.",
        """
        A recording may not wait for the device. The runtime makes the session and fails at the run that records. Loops
        over the experts that are hit are the usual source.
        """,
        "8 nodes whose result depends in shape on values must wait for the device: '/experts/NonZero'",
        "Fuse the experts: the fused node needs no such sizes.",
    ),
    _rule(
        "POL106",
        "no CUDA kernel for a node",
        """
        The CUDA provider has no kernel for the operator, for its version, or for its element type, so the node would
        run on the CPU. Read off the registry of runtime 1.31.1.
        """,
        "Every such node costs two copies and a wait for each run, and forbids CUDA graphs.",
        "com.microsoft.GroupQueryAttention: there is no CUDA kernel for float (there is for bfloat16, float16)",
        "Export in float16, or at an opset that has kernels. GroupQueryAttention has no float32 kernel on CUDA.",
    ),
    _rule(
        "POL107",
        "copies between host and device",
        """
        Sizes are computed on the host from shapes that are not fixed, and read by kernels that compute on the device.
        The runtime puts a Memcpy node between the two.
        """,
        "One Memcpy node is enough for the runtime to refuse CUDA graphs.",
        "1 tensor must be copied between host and device: 'total', read by '/model/Mul'",
        """
        Cover every dimension and give each bucket a `past`: with fixed shapes the sizes become constants and the copies
        go away.
        """,
    ),
    _rule(
        "POL108",
        "a dynamic dimension is not covered",
        "Inputs of the model have dynamic dimensions that the policy says nothing about.",
        "They stay dynamic in every session, so that shapes are not constants where the policy meant them to be.",
        "2 dynamic dimensions of the inputs not covered by the policy: 's10', 's70'",
        "`ortmoe policy init` lists the dimensions of a model with what each stands for.",
    ),
    _rule(
        "POL109",
        "a dimension of the policy does not exist",
        "The policy names dimensions that no input of the model has.",
        "The runtime ignores an override of an unknown dimension without a word, and the shapes stay dynamic.",
        "the model has no dimension called 'batch_size' (meant: 'batch_size' → 'batch')",
        "Use the names that the exporter wrote, from `ortmoe policy init`.",
    ),
    _rule(
        "POL110",
        "a bucket leaves dimensions dynamic",
        "CUDA graphs are on, and a bucket does not fix every dimension that the policy covers.",
        "A graph replays exactly one shape. With another one it would compute with sizes of the recorded run.",
        "bucket batch 1 × sequence 1: 'past', 'total' stay dynamic, and a graph replays one shape only",
        "Give the bucket a `past`: the length of the cache.",
    ),
    _rule(
        "POL111",
        "a fused node is missing",
        "The policy asks for fused nodes of a kind, and the model has none.",
        "Unrolled experts and attention are what a deployment loses most to: hundreds of nodes instead of one.",
        "no MoE node, 24 expected: 'node_linear_4', 'node_linear_9', 'node_linear_14' and 21 more",
        "Fuse the model. If blocks are refused, `ortmoe audit` says why.",
    ),
    _rule(
        "POL112",
        "blocks are only partly fused",
        "Some blocks are fused nodes and others are not, or there are fewer than the policy says.",
        "A single layer that is left decides the latency of a step, and it is easily overlooked.",
        "46 of 48 blocks are MoE nodes; left: '/layers.46/mlp', '/layers.47/mlp'",
        "Fuse the model again. If blocks are refused, `ortmoe audit` says why.",
    ),
    _rule(
        "POL113",
        "experts are not quantised",
        "The policy asks for quantised experts, and expert weights are stored as floats.",
        """
        Decoding reads the weights of the chosen experts and little else, so its speed is their size. Quantisers that
        look for MatMul nodes pass over expert weights without a word.
        """,
        "19.3 GB of 19.3 GB of expert weights are in floats: '/layers.0/moe/MoE'",
        "Quantise the experts into QMoE nodes, or take `experts` out of the policy.",
    ),
    _rule(
        "POL114",
        "experts are quantised differently",
        "A QMoE node has another width or block size than the policy asks for.",
        "Accuracy and speed of a deployment rest on both. Layers that differ are usually a mistake.",
        "'/layers.0/moe/QMoE' has 8 bits with one scale for each row, not 4 bits in blocks of 32",
        "Quantise again, or change `experts` in the policy.",
    ),
    _rule(
        "POL115",
        "fused under an assumption that is not granted",
        "The model's metadata say that it was fused under a promise, and the policy does not hold it.",
        "The fused model is right only where the promise is kept, for example if callers pad on the right.",
        "the model was fused under the assumption 'right-padding', which the policy does not grant",
        'If the promise holds, add `assume = ["right-padding"]`; if not, fuse again without `--assume`.',
    ),
    _rule(
        "POL116",
        "an optimiser of the runtime breaks the model on CUDA",
        """
        A `com.microsoft.RotaryEmbedding` feeds a `GroupQueryAttention` that has an `attention_bias`, or no cache. On
        CUDA the optimiser `GroupQueryAttentionFusion` of runtime 1.31.1 folds the two.
        """,
        "With a bias it writes an invalid graph, which does not load. Without a cache it ends the process.",
        "2 GroupQueryAttention nodes behind a RotaryEmbedding: 'gqa_layer_0', 'gqa_layer_1'",
        "Set the session key `optimization.disable_specified_optimizers` to `GroupQueryAttentionFusion`.",
    ),
    _rule(
        "POL151",
        "the runtime makes no session",
        "A session with the settings of the policy cannot be made.",
        "What fails here fails in the deployment. With buckets, the message says which one.",
        "bucket batch 1 × sequence 1: the runtime makes no session: …",
        "Read the message. `ortmoe doctor` says what this machine's runtime is.",
    ),
    _rule(
        "POL152",
        "a provider did not load",
        "The session runs without an execution provider that the policy names.",
        """
        If the libraries of CUDA are missing, the runtime prints a line and runs on the CPU, even where fallbacks are
        switched off.
        """,
        "'CUDAExecutionProvider' did not load; the session runs on CPUExecutionProvider without an error",
        "`ortmoe doctor --ep cuda` names the first library that is missing.",
    ),
    _rule(
        "POL153",
        "fused nodes run elsewhere",
        "The provider of the policy loads, but fused nodes were given to another one.",
        "The nodes that matter most run on the CPU, usually because of their element type.",
        "not on CUDAExecutionProvider: 24 GroupQueryAttention",
        "Export in float16. `ortmoe check` without `--runtime` says which kernel is missing.",
    ),
    _rule(
        "POL154",
        "the runtime put in copies",
        "The graph that really runs has Memcpy nodes.",
        "Each is a wait for the device, and CUDA graphs are refused.",
        "the runtime put in 3 copies between host and device",
        "Fix all dimensions in buckets. `ortmoe check` names the tensors.",
    ),
    _rule(
        "POL155",
        "fused nodes are gone at run time",
        "The runtime's own rewrites took fused nodes away.",
        "What was fused and verified is not what runs.",
        "the model holds 24 GroupQueryAttention nodes, the runtime runs 0",
        "Name the optimiser in `optimization.disable_specified_optimizers`.",
    ),
    _rule(
        "POL201",
        "unknown setting",
        "The policy holds a setting that does not exist.",
        "The runtime ignores unknown session and run keys without a word: the deployment would run without it.",
        "session_config.session.disable_prepacing: unknown setting; did you mean 'session.disable_prepacking'?",
        "Take the name that is suggested, or leave the setting out. `ortmoe policy show gpt-oss-20b` has examples.",
    ),
    _rule(
        "POL202",
        "a setting that is passed around but not real",
        "The policy holds a setting that articles recommend and that the runtime does not have.",
        "Some of these are refused, others are ignored silently.",
        "run_config.gpu_graph_capture: accepted as a session key and ignored; …",
        "Use what the message names. The documentation has a page on folklore, with a test for each claim.",
    ),
    _rule(
        "POL203",
        "wrong value",
        "A setting has a value that the runtime does not take.",
        "The runtime fails when the session is made, or worse, reads something else.",
        "provider_options.CUDAExecutionProvider.arena_extend_strategy: 'kDouble' is none of …",
        "Take one of the values of the message.",
    ),
    _rule(
        "POL204",
        "settings contradict each other",
        "Two settings of the policy cannot both hold.",
        "Whichever wins would be a surprise.",
        "cuda_graph.enabled: needs CUDAExecutionProvider among the providers",
        "Drop one of the two.",
    ),
)
