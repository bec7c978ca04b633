"""The two things that ortmoe does with a model: look (`audit`) and rewrite (`fuse`)."""

from ortmoe_cli.engine.audit import audit
from ortmoe_cli.engine.fuse import fuse

__all__ = ["audit", "fuse"]
