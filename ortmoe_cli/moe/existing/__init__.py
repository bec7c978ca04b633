"""MoE and QMoE nodes that a model came with: checked against the operator's schema and what the runtime really does."""

from ortmoe_cli.moe.existing.audit import already_fused, reaches_fused

__all__ = ["already_fused", "reaches_fused"]
