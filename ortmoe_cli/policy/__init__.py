"""Throughput policies: one place for the settings, checked against the runtime and against models."""

from ortmoe_cli.policy.model import Bucket, CudaGraph, Experts, Fusions, Policy
from ortmoe_cli.policy.options import build_session_options
from ortmoe_cli.policy.presets import OrtGptOssThroughputPolicy, OrtQwenThroughputPolicy, find
from ortmoe_cli.policy.problems import PolicyError

__all__ = [
    "Bucket",
    "CudaGraph",
    "Experts",
    "Fusions",
    "OrtGptOssThroughputPolicy",
    "OrtQwenThroughputPolicy",
    "Policy",
    "PolicyError",
    "build_session_options",
    "find",
]
