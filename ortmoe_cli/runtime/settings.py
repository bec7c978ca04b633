"""The settings that the runtime really has: provider options, session keys and run keys, with their types.

Unknown session and run keys are accepted and ignored by the runtime, so this list is what stands between a misspelt key
and a deployment that silently lacks it. `tests/runtime` holds every line against the installed binaries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"

BOOL = ("0", "1")
INT = "integer"
TEXT = "text"

Scalar = str | int | bool


@dataclass(frozen=True)
class Setting:
    """One setting of the runtime. `values`: what it takes, as words, or INT or TEXT; `needs`: what it rests on."""

    name: str
    values: tuple[str, ...] | str
    meaning: str
    needs: str = ""

    def problem(self, value: Scalar) -> str | None:
        """Why a value is wrong, or None."""
        text = as_text(value)
        if isinstance(self.values, tuple):
            return None if text in self.values else f"'{text}' is none of {', '.join(self.values)}"
        if self.values == INT and not text.removeprefix("-").isdecimal():
            return f"'{text}' is no integer"
        return None


def as_text(value: Scalar) -> str:
    """How a value is handed to the runtime: everything is text, and truth is 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _table(*settings: Setting) -> Mapping[str, Setting]:
    return {setting.name: setting for setting in settings}


CUDA_OPTIONS = _table(
    Setting("device_id", INT, "which GPU"),
    Setting("gpu_mem_limit", INT, "bytes that the arena may take"),
    Setting(
        "arena_extend_strategy",
        ("kNextPowerOfTwo", "kSameAsRequested"),
        "how the arena grows; kSameAsRequested wastes less when shapes are few",
    ),
    Setting(
        "enable_cuda_graph",
        BOOL,
        "record the kernels of a run once and replay them without launching each",
        "every compute node on CUDA, no Memcpy nodes, no control flow, the same shapes and addresses (IOBinding)",
    ),
    Setting("use_tf32", BOOL, "multiply float32 with 10-bit mantissas on tensor cores", "float32 weights, SM 8.0+"),
    Setting(
        "sdpa_kernel",
        INT,
        "attention kernels that may run, as a sum of 1 flash, 2 memory-efficient, 8 cuDNN, 16 math; 0 is the default",
    ),
    Setting("prefer_nhwc", BOOL, "channels last for convolutions"),
    Setting("use_ep_level_unified_stream", BOOL, "one stream for the whole session", "needed by some captures"),
    Setting("do_copy_in_default_stream", BOOL, "copy on the compute stream; 0 may race"),
    Setting("tunable_op_enable", BOOL, "use kernels that were tuned before"),
    Setting("tunable_op_tuning_enable", BOOL, "try kernels at the first run of each shape", "tunable_op_enable"),
    Setting("tunable_op_max_tuning_duration_ms", INT, "how long to try", "tunable_op_tuning_enable"),
    Setting("cudnn_conv_algo_search", ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"), "how convolutions are chosen"),
    Setting("cudnn_conv_use_max_workspace", BOOL, "let convolutions take all the workspace they want"),
    Setting("cudnn_conv1d_pad_to_nc1d", BOOL, "shape of one-dimensional convolutions"),
    Setting("fuse_conv_bias", BOOL, "fuse a convolution with its bias"),
    Setting("enable_cudnn", BOOL, "use cuDNN where it is installed"),
    Setting("enable_skip_layer_norm_strict_mode", BOOL, "accumulate layer norms in float32; slower"),
)
"""Options of the CUDA provider that make sense in a file."""

POINTERS = ("user_compute_stream", "has_user_compute_stream", "gpu_external_alloc", "gpu_external_free",
            "gpu_external_empty_cache")  # fmt: skip
"""Options that hold addresses of a running process: real, but for code only."""

PROVIDER_OPTIONS: Mapping[str, Mapping[str, Setting]] = {CUDA: CUDA_OPTIONS, CPU: {}}

SESSION_KEYS = _table(
    Setting("session.disable_prepacking", BOOL, "do not copy weights into the layout of the kernels; saves memory"),
    Setting("session.prepack.enable_parallel", BOOL, "prepack weights on several threads"),
    Setting("session.use_env_allocators", BOOL, "share the arenas of the environment between sessions"),
    Setting(
        "session.use_device_allocator_for_initializers",
        BOOL,
        "put weights into device memory outside of the arena, so that the arena does not grow past them",
    ),
    Setting(
        "session.disable_cpu_ep_fallback",
        BOOL,
        "fail when a node would run on the CPU",
        "shape arithmetic runs on the CPU by design, so this needs fixed shapes",
    ),
    Setting("session.record_ep_graph_assignment_info", BOOL, "remember which provider each node went to"),
    Setting(
        "session.intra_op.allow_spinning", BOOL, "threads spin while they wait; 0 saves CPU time on shared machines"
    ),
    Setting("session.inter_op.allow_spinning", BOOL, "the same between nodes"),
    Setting("session.intra_op_thread_affinities", TEXT, "which cores the threads run on"),
    Setting("session.force_spinning_stop", BOOL, "stop spinning when a run ends"),
    Setting("session.dynamic_block_base", INT, "how finely CPU work is divided"),
    Setting("session.set_denormal_as_zero", BOOL, "flush denormal numbers to zero"),
    Setting("session.disable_qdq_constant_folding", BOOL, "leave quantised constants as they are"),
    Setting("session.qdq_matmulnbits_accuracy_level", INT, "how MatMulNBits made from pairs accumulates (0 to 4)"),
    Setting("session.disable_aot_function_inlining", BOOL, "keep model functions as calls"),
    Setting("session.strict_shape_type_inference", BOOL, "fail where shapes contradict each other"),
    Setting("optimization.enable_gelu_approximation", BOOL, "replace Gelu by its tanh form; changes results"),
    Setting("optimization.enable_cast_chain_elimination", BOOL, "drop casts there and back; changes results"),
    Setting(
        "optimization.disable_specified_optimizers", TEXT, "names of graph optimisers to leave out, with ';' between"
    ),
    Setting("optimization.constant_folding_max_output_size_in_bytes", INT, "do not fold constants beyond this size"),
    Setting("mlas.use_lut_gemm", BOOL, "table look-ups for 2-bit products"),
    Setting("ep.cuda.fpa_intb_gemm", INT, "fused dequantisation and product for int4 and int8 weights; bits of kinds"),
    Setting("ep.cuda.qmoe_row_tile_size", INT, "rows of QMoE that are worked on at once"),
    Setting("ep.cuda.enable_gemm_auto_tune", BOOL, "try kernels for each product"),
)
"""Session configuration entries. The runtime accepts any other key, and ignores it."""

RUN_KEYS = _table(
    Setting(
        "gpu_graph_id",
        INT,
        "which CUDA graph a run records or replays; -1 runs without",
        "enable_cuda_graph",
    ),
    Setting("memory.enable_memory_arena_shrinkage", TEXT, "give memory back after the run, for example 'gpu:0'"),
    Setting("disable_synchronize_execution_providers", BOOL, "do not wait for the device at the end of a run"),
)
"""Run configuration entries, set for each run."""

LEVELS: Mapping[str, str] = {
    "all": "ORT_ENABLE_ALL",
    "layout": "ORT_ENABLE_LAYOUT",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "disabled": "ORT_DISABLE_ALL",
}
"""Levels of graph optimisation and what the runtime calls them."""

FOLKLORE: Mapping[str, str] = {
    "cuda_graph_enable_partial": "the runtime has no partial CUDA graphs and refuses this provider option; give each "
    "bucket a graph_id, and -1 to those that run without a graph",
    "cuda_graph_partial": "the runtime has no partial CUDA graphs; give each bucket a graph_id, and -1 to those that "
    "run without a graph",
    "max_batch_size": "there is no such provider option and the runtime refuses it; the largest batch is that of the "
    "largest bucket",
    "gpu_graph_capture": "accepted as a session key and ignored; graphs are switched on by cuda_graph.enabled and "
    "chosen by the run key gpu_graph_id",
    "cuda_mem_limit": "was renamed gpu_mem_limit and is refused now",
    "enable_cuda_graphs": "the provider option is called enable_cuda_graph",
    "moe_fusion": "no optimiser of the runtime makes MoE nodes; 'ortmoe fuse' does, before the session is created",
    "enable_moe_fusion": "no optimiser of the runtime makes MoE nodes; 'ortmoe fuse' does",
    "session.graph_optimization_level": "the level is a property of the session, not an entry; use optimization_level",
}
"""Settings that are passed around and are not what they seem."""


def explain(name: str, known: Mapping[str, Setting] | Mapping[str, object]) -> str:
    """Why a name is not accepted: folklore, or a slip with the nearest real name."""
    if name in FOLKLORE:
        return FOLKLORE[name]
    if name in POINTERS:
        return "holds an address of a running process; set it in code"
    near = nearest(name, known)
    return f"did you mean '{near}'?" if near else "the runtime does not know it"


def nearest(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str | None:
    """The known name that was probably meant."""
    typed = name.lower()
    whole = {key.lower(): key for key in known}
    found = get_close_matches(typed, list(whole), n=1, cutoff=0.6)
    if found:
        return whole[found[0]]
    tails = {key.rpartition(".")[2]: key for key in whole}
    close = get_close_matches(typed.rpartition(".")[2], list(tails), n=1, cutoff=0.7)
    return whole[tails[close[0]]] if close else None
