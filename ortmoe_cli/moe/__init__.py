"""Mixture-of-Experts blocks: found by structure, identified and proven by evaluation, replaced by one MoE node."""

from ortmoe_cli.moe.find import find

__all__ = ["find"]
