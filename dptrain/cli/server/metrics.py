"""What a server counts, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters of one server, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, waiting: Callable[[], float]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "dptrain_requests", "Requests, by route and HTTP status.", ["route", "status"], registry=registry
        )
        about = "Seconds from a request's headers to its answer."
        self._seconds = Histogram("dptrain_request_seconds", about, ["route"], buckets=_SECONDS, registry=registry)
        self._rows = Histogram("dptrain_batch_rows", "Rows of a prediction.", buckets=_ROWS, registry=registry)
        about = "Requests of a prediction."
        self._joined = Histogram("dptrain_batch_requests", about, buckets=_ROWS, registry=registry)
        about = "Models loaded after the first, by result."
        self.reloads = Counter("dptrain_reloads", about, ["result"], registry=registry)
        about = "1 for the model that is served."
        self._model = Gauge("dptrain_model_info", about, ["name", "version"], registry=registry)
        about = "When the model was loaded."
        self._loaded = Gauge("dptrain_model_loaded_timestamp_seconds", about, registry=registry)
        about = "Requests in the queue."
        Gauge("dptrain_waiting_requests", about, registry=registry).set_function(waiting)

    def add_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def add_batch(self, requests: int, rows: int) -> None:
        """Count a prediction."""
        self._joined.observe(requests)
        self._rows.observe(rows)

    def set_model(self, name: str, version: str) -> None:
        """Note which model is served from now on."""
        self._model.clear()
        self._model.labels(name, version).set(1)
        self._loaded.set_to_current_time()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self._registry)
