"""The server's metrics, in the format of Prometheus."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.aiohttp import make_aiohttp_handler

from lingvo_gshard.decoding.text_decoder import Part

_PREFIX = "lingvo_gshard"  # The names of the process's own metrics are Prometheus' standard.
# The upper bounds of the histograms' buckets.
_SECS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The counters, gauges and histograms of a server."""

    def __init__(self, queued_tokens: Callable[[], int]) -> None:
        """`queued_tokens` returns the number of input tokens that wait now."""
        registry = CollectorRegistry()
        self._registry = registry
        ProcessCollector(registry=registry)
        ours: dict[str, Any] = {"namespace": _PREFIX, "registry": registry}

        self.lines = Counter("lines", "Lines answered.", **ours)
        self.answer_secs = Histogram(
            "translate_seconds", "From request to response.", buckets=_SECS, **ours
        )
        self._requests = Counter("requests", "Answers.", ["path", "status"], **ours)
        self._tokens = Counter("tokens", "Input tokens decoded.", **ours)
        self._loads = Counter("loads", "Models loaded.", ["outcome"], **ours)
        self._rows = Histogram("batch_rows", "Rows in use.", buckets=_ROWS, **ours)
        queued = Gauge("queued_tokens", "Input tokens in the queue.", **ours)
        queued.set_function(queued_tokens)

    def handler(self) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Returns the handler that answers with all metrics."""
        return make_aiohttp_handler(self._registry)

    def count_request(self, path: str, status: int) -> None:
        self._requests.labels(path, status).inc()

    def count_batch(self, parts: Sequence[Part]) -> None:
        self._rows.observe(len(parts))
        self._tokens.inc(sum(len(part.ids) for part in parts))

    def count_load(self, is_loaded: bool) -> None:
        self._loads.labels("loaded" if is_loaded else "refused").inc()
