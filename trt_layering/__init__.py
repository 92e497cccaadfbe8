"""Run neural networks in less memory than their weights need.

The public names; each is imported when it is first used, so that running a chain loads nothing that only building
needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trt_layering.backends.onnxruntime.runtime import share_thread_pool
    from trt_layering.building import Built, build
    from trt_layering.errors import (
        BackendError,
        BudgetError,
        BuildError,
        ClosedError,
        ConfigError,
        CorruptError,
        DiskError,
        ForeignError,
        InputError,
        LayeringError,
        MemoryLimitError,
        ModelError,
        NotBuiltError,
        QueueFullError,
        ReadError,
        ServiceError,
        StoreError,
        TimedOutError,
        UnavailableError,
        UnknownModelError,
        UsageError,
    )
    from trt_layering.planning import Forecast, forecast
    from trt_layering.profiling import profile
    from trt_layering.runtime.chain import Chain, open_chain
    from trt_layering.runtime.footprint import Footprint, footprint
    from trt_layering.runtime.loader import LoaderOptions
    from trt_layering.runtime.trace import Trace
    from trt_layering.store.manifest import Profile
    from trt_layering.verification import Verification, verify

__version__ = "0.1.0"

_ERRORS = (
    "BackendError", "BudgetError", "BuildError", "ClosedError", "ConfigError", "CorruptError", "DiskError",
    "ForeignError", "InputError", "LayeringError", "MemoryLimitError", "ModelError", "NotBuiltError", "QueueFullError",
    "ReadError", "ServiceError", "StoreError", "TimedOutError", "UnavailableError", "UnknownModelError", "UsageError",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_ERRORS, "errors"),
    "Built": "building",
    "Chain": "runtime.chain",
    "Footprint": "runtime.footprint",
    "Forecast": "planning",
    "LoaderOptions": "runtime.loader",
    "Profile": "store.manifest",
    "Trace": "runtime.trace",
    "Verification": "verification",
    "build": "building",
    "footprint": "runtime.footprint",
    "forecast": "planning",
    "open_chain": "runtime.chain",
    "profile": "profiling",
    "share_thread_pool": "backends.onnxruntime.runtime",
    "verify": "verification",
}

__all__ = [
    "BackendError",
    "BudgetError",
    "BuildError",
    "Built",
    "Chain",
    "ClosedError",
    "ConfigError",
    "CorruptError",
    "DiskError",
    "Footprint",
    "Forecast",
    "ForeignError",
    "InputError",
    "LayeringError",
    "LoaderOptions",
    "MemoryLimitError",
    "ModelError",
    "NotBuiltError",
    "Profile",
    "QueueFullError",
    "ReadError",
    "ServiceError",
    "StoreError",
    "TimedOutError",
    "Trace",
    "UnavailableError",
    "UnknownModelError",
    "UsageError",
    "Verification",
    "build",
    "footprint",
    "forecast",
    "open_chain",
    "profile",
    "share_thread_pool",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
