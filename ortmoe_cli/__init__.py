"""Finds and fuses the Mixture-of-Experts and grouped-query attention of exported ONNX models.

The names below are the public Python interface; each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortmoe_cli.policy import OrtGptOssThroughputPolicy as OrtGptOssThroughputPolicy
    from ortmoe_cli.policy import OrtQwenThroughputPolicy as OrtQwenThroughputPolicy
    from ortmoe_cli.policy import Policy as Policy
    from ortmoe_cli.policy import build_session_options as build_session_options
    from ortmoe_cli.policy.session import session as session

_PUBLIC = {
    "OrtGptOssThroughputPolicy": "ortmoe_cli.policy",
    "OrtQwenThroughputPolicy": "ortmoe_cli.policy",
    "Policy": "ortmoe_cli.policy",
    "build_session_options": "ortmoe_cli.policy",
    "session": "ortmoe_cli.policy.session",
}

__all__ = ["OrtGptOssThroughputPolicy", "OrtQwenThroughputPolicy", "Policy", "build_session_options", "session"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
