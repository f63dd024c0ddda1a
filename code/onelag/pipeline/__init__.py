"""The pipeline: one process per stage, no flush, a weight delay of exactly one update (PipeDream-2BW).

`order` says which F, B, U runs where on which weight version; `timeline` and `gantt` predict and draw it; `trace` records a real run.
`schedules` (with `stage`, `channel`, `replicas`, `checkpoint`) is the engine on torch.distributed; `baselines` the synchronous rivals.
"""

from importlib import import_module

# Imported on first use: the order and the timeline are plain Python and must not pay for torch.distributed.
_HOME = {
    "Action": "order",
    "stage_order": "order",
    "stage_actions": "order",
    "check_feasible": "order",
    "in_flight": "order",
    "simulate": "timeline",
    "Recorder": "trace",
    "Schedule2BW": "schedules",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
