"""Attention: found by structure, identified and proven by evaluation, replaced by one GroupQueryAttention node."""

from ortmoe_cli.attention.find import find

__all__ = ["find"]
