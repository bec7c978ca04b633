"""Measures models under the runtime: each in a process of its own, all in one run."""
