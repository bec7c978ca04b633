"""Quantised experts: found where they lie, moved into QMoE as they are, or made from float ones on request."""
