"""The interface of sampling engines: what a run needs of one, and what it gives to build one.

`rollout.engine` names the factory of an engine (docs/custom_engine.md); `engines.py` resolves it.
All code that samples is written against these protocols, not against the built-in `engine.Engine`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.rollout_data import NO_SPECULATION
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout.engine.aot_programs import Program
from jaxrl_llm.rollout.engine.host_inputs import RowShape
from jaxrl_llm.rollout.engine.requests import (
    Completion,
    Decode,
    EngineStatistics,
    Progress,
    Request,
    RequestLimits,
)


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Optional features of an engine. A config that needs an absent one is refused at the start.

    The rest is required of every engine: continuous batching of requests with G samples each,
    `temperature`, greedy decoding, stop tokens, `max_tokens`, log-probs and versions of tokens.
    """

    multi_process: bool = False  # the same samples on every process of a run of several
    filtered_sampling: bool = False  # top_k, top_p, min_p
    sampling_support: bool = False  # rollout.support_tokens
    stop_strings: bool = False
    speculation: bool = False  # rollout.speculation
    low_precision: bool = False  # rollout.quantization, rollout.cache_dtype="fp8"
    router_replay: bool = False  # completions report the experts of each token, requests set them
    images: bool = False  # `Request.image_inputs`
    # Running requests continue under newer weights; without it they are aborted and resubmitted.
    in_flight_updates: bool = False


@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """Everything that an engine is built from; sizes of the built-in cache may be ignored."""

    # The policy as it decodes. Rollout weights are in its layout: `layers` is a tuple of layers.
    network: Network
    mesh: Mesh  # the weights of `step` are sharded over it
    num_slots: int  # sequences decoded at the same time
    max_tokens: int  # longest prompt plus response
    chunk_steps: int = 16  # decode steps between two looks of the host
    layout: str = "tensor"  # sharding of the weights, as `config.mesh.rollout`
    speculation: SpeculationConfig = NO_SPECULATION
    decode: Decode | None = None  # detokenizer, needed for stop strings
    keeps_routes: bool = False  # completions report the experts of each token
    cache_tokens: int = 0  # KV cache of all slots; 0: `num_slots` times `max_tokens`
    prompt_shapes: Sequence[RowShape] = ()  # prefill batches (rows, width) to compile for
    prefix_caching: bool = False  # prompts share keys and values of their common beginnings
    window_cache: bool = False  # layers keep no more than their windows; no prefix caching then

    @property
    def limits(self) -> RequestLimits:
        """The requests that an engine of these arguments accepts."""
        num_routes = self.network.num_routes if self.keeps_routes else 0
        return RequestLimits.for_network(self.network, self.max_tokens, self.decode, num_routes)


class SamplingEngine(Protocol):
    """Samples completions of prompts, chunk by chunk, with weights that come with each step.

    Called by one thread. In a run of several processes, all make the same calls in the same order.

    Obligations:
      Determinism: a token follows from the weights, the tokens before it, the sample's key and the
        token's position, up to rounding; neither the batch nor the time matters. So an aborted
        sample continues as a new request (prompt and tokens so far, same key), a resumed run
        repeats itself, and `sampling="async"` without staleness gives the samples of "sync".
      Log-probs: of the sampled token under the whole vocabulary at the sampling temperature (1 for
        greedy), before top_k, top_p and min_p, without `network.suppressed_tokens`; of logits with
        bias, penalties and bans; with a grammar over the tokens that it allows. With
        `support_tokens` they are renormalized over the support, which `Completion.support` reports.
        Importance weights and `training/rollout_probs_diff_mean` compare them with the policy's
        own.
      Versions: each token carries the `version` of the `step` that drew it.
    """

    @property
    def max_tokens(self) -> int:
        """Longest prompt plus response."""
        ...

    @property
    def limits(self) -> RequestLimits:
        """The requests that it accepts. Rollouts carry routes if `num_routes` is above 0."""
        ...

    @property
    def statistics(self) -> EngineStatistics:
        """Counts since the last reset; fields without a meaning stay 0."""
        ...

    def clone(self) -> "SamplingEngine":
        """Returns an engine of the same arguments with no requests; compiled programs are shared.

        Asynchronous runs evaluate with one engine while requests stay in flight in the other.
        """
        ...

    def reset(self) -> None:
        """Drops all requests and frees the KV cache."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """A context that begins without requests and frees the KV cache at its end.

        Statistics stay until the next reset. Raises ValueError if requests are unfinished.
        """
        ...

    def submit(self, request: Request, /) -> int:
        """Queues a request; returns its id, unique until a reset.

        `retains_pages` and `continues` of the request are hints: an engine without retained pages
        computes the prefix again.

        Raises:
          RequestError: If `limits` do not allow it.
        """
        ...

    def abort(self, number: int, /) -> list[Completion]:
        """Ends a request; returns its completions so far, [] if it has ended.

        A completion that ended with tokens that come only now has the `finish_reason` of its end.
        """
        ...

    def completions(self, number: int, /) -> list[Completion]:
        """Returns the G completions of an unfinished request, objects that grow with each step.

        Their `finish_reason` is set with the last token.
        """
        ...

    def free(self, number: int, index: int, /) -> None:
        """Frees what is retained of a finished sample; nothing will continue it."""
        ...

    def step(self, params: Params, version: int = 0, *, ahead: bool = False) -> list[Progress]:
        """Decodes a chunk; returns an entry for each sample with new tokens, or an error.

        Args:
          params: Rollout weights, sharded over the mesh. Not to be kept beyond the next call: their
            memory goes to the next version. Requests in flight may meet newer ones.
          version: Of these weights: completed updates.
          ahead: Nothing is submitted or aborted before the next step, which gets the same weights.
        """
        ...


class EngineFactory(Protocol):
    """Builds engines, as `rollout.engine` names it: a class or a function.

    An attribute `capabilities: Capabilities` declares optional features; without it there are none.
    A factory is called several times in a run (before weights are loaded, for each layout, for an
    evaluation) and allocates no device memory: an engine does that in its first step.
    """

    def __call__(self, args: EngineArgs, /) -> SamplingEngine: ...


@runtime_checkable
class WeightsReceiver(Protocol):
    """An engine with a copy of the weights of its own, for example in another process. Optional."""

    def receive_weights(self, params: Params, version: int, /) -> None:
        """Takes the weights of the following steps, before the first of them.

        `params` are on the mesh in the rollout layout, to be read before the next `step` returns.
        """
        ...


@runtime_checkable
class ClosableEngine(Protocol):
    """An engine that holds a process or a connection, to be closed after the run. Optional."""

    def close(self) -> None: ...


@runtime_checkable
class PrecompiledEngine(Protocol):
    """An engine whose programs compile in threads before the first step. Optional."""

    def programs_to_compile(
        self,
        params: Params,
        filters: Sequence[bool],
        continues: bool = False,
        support_tokens: int = 0,
    ) -> Mapping[str, Callable[[], None]]:
        """Returns by name the functions that compile the programs of a run.

        Args:
          params: Rollout weights; shapes, dtypes and shardings suffice.
          filters: The values of `SamplingParams.is_filtered` in the run.
          continues: Whether requests continue finished samples (agents).
          support_tokens: `SamplingParams.support_tokens` of the run; not passed if 0.
        """
        ...

    def wait_before_steps(self, wait: Callable[[], None], /) -> None:
        """Makes each step call `wait` first, which returns when the programs are compiled."""
        ...

    def lowered_programs(
        self, params: Params, num_prompts: int, prompt_tokens: int, vector_size: int = 0
    ) -> Mapping[str, Callable[[], jax.stages.Lowered]]:
        """Returns by name ("prefill", "decode") the largest programs, for compiled memory plans.

        `vector_size` is the size of an image's embedding; 0: the prompts are text.
        """
        ...


class ServingEngine(SamplingEngine, Protocol):
    """Requirements of the HTTP server beyond sampling. Only the built-in engine serves."""

    @property
    def num_slots(self) -> int:
        """Sequences decoded at the same time."""
        ...

    @property
    def num_active(self) -> int:
        """Samples that have a slot."""
        ...

    def num_compilations(self) -> int:
        """Returns the number of programs compiled so far."""
        ...

    def compile(self, params: Params, program: Program, /) -> None:
        """Compiles a warm-up program; allowed between any two steps."""
        ...
