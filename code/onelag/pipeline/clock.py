"""How long this rank computed and how long it waited: the measured bubble."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Host time spent inside `computing()`; on a GPU that is the time to launch, not to run, so no bubble is derived from it there."""

    def __init__(self):
        self._busy, self._since = 0.0, time.perf_counter()

    @contextmanager
    def computing(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._busy += time.perf_counter() - start

    def lap(self) -> tuple[float, float]:
        """(busy, elapsed) seconds since the last lap."""
        now = time.perf_counter()
        result = self._busy, now - self._since
        self._busy, self._since = 0.0, now
        return result
