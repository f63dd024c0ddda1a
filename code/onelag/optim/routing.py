"""Which parameter goes to which optimizer, decided by global name, before any split over pipeline stages.

A pipeline stage holds a part of the names, so a pattern may match nothing there; on the whole model every pattern must match something.
"""

import fnmatch
from collections.abc import Iterable, Sequence

from torch import Tensor

# Embeddings and the head are matrices by shape, but their rows are looked up by token: the field gives them to AdamW.
FALLBACK_PATTERNS = ("*embed*", "*lm_head*", "*head.weight", "*norm*", "*bias")


def route(named_parameters: Iterable[tuple[str, Tensor]], fallback: Sequence[str] = FALLBACK_PATTERNS) -> dict[str, str]:
    """{global name: "matrix" | "fallback"}: hidden matrices (2-D, or 3-D stacks of experts) against everything else.

    Args:
        named_parameters: (global name, parameter); meta parameters do.
        fallback: shell patterns of names that go to the fallback optimizer whatever their shape; vectors go there anyway.
    """
    return {
        name: "fallback" if parameter.ndim not in (2, 3) or any(fnmatch.fnmatch(name, pattern) for pattern in fallback) else "matrix"
        for name, parameter in named_parameters
    }


def check_patterns(names: Iterable[str], patterns: Sequence[str]) -> None:
    """Raises ValueError for a pattern that matches no name of the whole model: a misspelled pattern must not pass in silence."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise ValueError(f"the routing pattern {pattern!r} matches none of the model's {len(names)} parameters, e.g. {names[0]!r}")
