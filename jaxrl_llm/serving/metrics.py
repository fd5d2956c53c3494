"""Prometheus metrics of a server."""

import functools
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.serving.driver import Driver

_REASONS = {
    404: "not_found",
    408: "slow_body",
    413: "body_too_large",
    429: "queue_full",
    499: "client_left",
    503: "not_serving",
    504: "timeout",
}


class _EngineCounters(Collector):
    """Counters that the engine keeps, read when they are asked for."""

    def __init__(self, driver: Driver):
        self._driver = driver

    def collect(self) -> Iterator[CounterMetricFamily]:
        statistics = self._driver.engine.statistics
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                statistics.prefix_cache_queries,
            ),
            (
                "prefix_cache_hits",
                "Of these, tokens whose keys and values were in it.",
                statistics.prefix_cache_hits,
            ),
            ("preemptions", "Samples that lost their KV cache.", statistics.num_preemptions),
            ("prefilled_tokens", "Prompt tokens computed.", statistics.prefill_tokens),
        ):
            yield CounterMetricFamily(f"jaxrl_llm_{name}", text, value=value)


class Metrics:
    """Counters and histograms of one server, and gauges read from its driver."""

    def __init__(self, driver: Driver | None = None):
        """Without a driver, as in a training run, there are no gauges of the engine."""
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, namespace="jaxrl_llm", registry=self.registry)
        histogram = functools.partial(Histogram, namespace="jaxrl_llm", registry=self.registry)
        gauge = functools.partial(Gauge, namespace="jaxrl_llm", registry=self.registry)
        self.requests = counter("requests", "Requests by path and status.", ("path", "status"))
        self.rejected = counter("rejected", "Requests not served, by reason.", ("reason",))
        cancelled_help = "Requests given up: the client left, or the time ran out."
        self.cancelled = counter("cancelled", cancelled_help)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generated_tokens = counter("generated_tokens", "Tokens sampled.")
        self.first_token_s = histogram(
            "time_to_first_token_seconds",
            "From a request's acceptance to the first token of a sample.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
        )
        self.per_token_s = histogram(
            "time_per_token_seconds",
            "Mean time between tokens of a sample, its first piece left out.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
        )
        self.request_s = histogram(
            "request_seconds",
            "From a request's acceptance to its end.",
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
        )
        if driver is None:
            return
        self.registry.register(_EngineCounters(driver))
        engine = driver.engine
        waiting = lambda: max(0, driver.num_unfinished - engine.num_active)  # noqa: E731
        forward_help = "Tokens that a sample got in a decode step."
        for name, text, value in (
            ("slots", "Decode slots.", lambda: engine.num_slots),
            ("active_slots", "Samples that have a slot.", lambda: engine.num_active),
            ("queue_samples", "Samples that wait for a slot.", waiting),
            ("compilations", "Programs compiled so far.", engine.num_compilations),
            (
                "warm_up_programs",
                "Programs to be compiled ahead.",
                lambda: len(driver.pending_programs),
            ),
            ("tokens_per_forward", forward_help, lambda: engine.statistics.tokens_per_forward),
            ("ready", "1 while requests are accepted.", lambda: driver.state == "ready"),
        ):
            gauge(name, text).set_function(value)


def count_requests(app: ASGIApp, metrics: Metrics) -> ASGIApp:
    """Middleware that counts requests by path and status, and rejections by reason."""

    async def app_with_counts(scope: Scope, receive: Receive, send: Send) -> None:
        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Label values are never freed: all unknown paths share one.
                path = getattr(scope.get("route"), "path", "other")
                status = message["status"]
                metrics.requests.labels(path, str(status)).inc()
                if status >= 400 and path.startswith("/v1/"):
                    reason = _REASONS.get(status, "invalid" if status < 500 else "fault")
                    metrics.rejected.labels(reason).inc()
            await send(message)

        await app(scope, receive, counted_send)

    return app_with_counts
