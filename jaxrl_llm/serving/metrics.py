"""What a Prometheus server may read about serving."""

from collections.abc import Callable

import prometheus_client

from jaxrl_llm.serving.driver import Driver


class Metrics:
    """Counters and histograms of one server, with gauges that are read from its driver."""

    def __init__(self, driver: Driver):
        self.registry = prometheus_client.CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()):
            return prometheus_client.Counter(
                f"jaxrl_llm_{name}", text, labels, registry=self.registry
            )

        def histogram(name: str, text: str, *buckets: float):
            return prometheus_client.Histogram(
                f"jaxrl_llm_{name}", text, buckets=buckets, registry=self.registry
            )

        self.requests = counter("requests", "Requests by path and status.", ("path", "status"))
        self.rejected = counter("rejected", "Requests not served, by reason.", ("reason",))
        self.cancelled = counter(
            "cancelled", "Requests given up: the client left, or the time ran out."
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generated_tokens = counter("generated_tokens", "Tokens sampled.")
        self.first_token_s = histogram(
            "time_to_first_token_seconds",
            "From a request's acceptance to the first token of a sample.",
            *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
        )
        self.per_token_s = histogram(
            "time_per_token_seconds",
            "Mean time between tokens of a sample, its first piece left out.",
            *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
        )
        self.request_s = histogram(
            "request_seconds",
            "From a request's acceptance to its end.",
            *(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
        )

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            prometheus_client.Gauge(f"jaxrl_llm_{name}", text, registry=self.registry).set_function(
                value
            )

        engine = driver.engine
        gauge("slots", "Decode slots.", lambda: engine.num_slots)
        gauge("active_slots", "Samples that stand in a slot.", lambda: engine.num_active)
        gauge(
            "queue_samples",
            "Samples that wait for a slot.",
            lambda: max(0, driver.num_unfinished - engine.num_active),
        )
        gauge("compilations", "Programs compiled so far.", engine.num_compilations)
        gauge(
            "warm_up_programs",
            "Programs still to be compiled ahead of need.",
            lambda: len(driver.programs),
        )
        gauge(
            "tokens_per_forward",
            "Tokens that a sample got in a decode step.",
            lambda: engine.statistics.tokens_per_forward,
        )
        gauge("ready", "1 while requests are accepted.", lambda: driver.state == "ready")
