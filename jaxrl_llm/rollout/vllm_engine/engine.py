"""vLLM in a process of its own, behind the interface of sampling engines."""

import contextlib
import copy
import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.vllm import DEFAULT_VLLM, MIN_VLLM_TEMPERATURE, VllmConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.hf import config_writer
from jaxrl_llm.models.hf.family_format import CheckpointFormatError
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import requests
from jaxrl_llm.rollout.engine.requests import (
    Completion,
    EngineStatistics,
    FinishReason,
    Progress,
    Request,
    RequestError,
    SamplingParams,
)
from jaxrl_llm.rollout.engine_api import Capabilities, EngineArgs
from jaxrl_llm.rollout.vllm_engine.exported_weights import ExportedWeights
from jaxrl_llm.rollout.vllm_engine.worker_client import WorkerClient, check_interpreter

# Fields of requests and of their sampling parameters that vLLM is given, or that are hints.
_REQUEST_FIELDS = frozenset(
    ("tokens", "keys", "params", "retains_pages", "continues", "num_partial")
)
_SAMPLING_FIELDS = frozenset(
    "max_tokens temperature top_k top_p min_p stop_tokens stop_strings num_top_log_probs".split()  # noqa: SIM905
)


class _Sample(NamedTuple):
    """A sample of an unfinished request."""

    request: int
    place: int  # in the request
    prompt: tuple[int, ...]
    num_partial: int
    params: SamplingParams
    key: np.ndarray
    completion: Completion


class VllmEngine:
    """A sampling engine whose requests run in a vLLM worker.

    The worker is shared with clones, one of which samples at a time: when another one begins, the
    requests in flight of the former are aborted in the worker, and resubmitted with their tokens so
    far when it goes on.
    """

    capabilities = Capabilities(filtered_sampling=True, stop_strings=True, in_flight_updates=True)

    def __init__(self, args: EngineArgs, config: VllmConfig = DEFAULT_VLLM):
        """
        Raises:
          ConfigError: If there is no interpreter with vLLM, or a Hugging Face config cannot
            describe the network.
        """
        if not (config.python or config.address):
            raise ConfigError(
                "config.rollout.vllm.python: rollout.engine='vllm' needs the Python interpreter of"
                " an environment with vLLM (docs/vllm.md), or rollout.vllm.address"
            )
        if config.python:
            check_interpreter(config.python)
        self._args, self.limits, self.max_tokens = args, args.limits, args.max_tokens
        self._config = config
        self._weights: list[ExportedWeights] = []  # made with the first step
        self._worker = WorkerClient(config, start_message(args, config))
        self._turns = _Turns()
        self.statistics = EngineStatistics()
        self._samples: dict[int, _Sample] = {}  # unfinished ones, by their number in the worker
        self._completions: dict[int, list[Completion]] = {}  # of unfinished requests
        self._request_numbers = itertools.count()
        self._sample_numbers = itertools.count()  # unique in the worker
        self._to_submit: list[int] = []
        self._to_abort: list[int] = []
        # Progress that came with another reply than that of a step.
        self._early_progress: list[Progress] = []

    def clone(self) -> "VllmEngine":
        """Returns an engine without requests on the same worker."""
        other = copy.copy(self)
        other.statistics = EngineStatistics()
        other._samples, other._completions = {}, {}
        other._request_numbers = itertools.count()
        other._to_submit, other._to_abort, other._early_progress = [], [], []
        return other

    def reset(self) -> None:
        """Drops all requests."""
        self._to_abort += [number for number in self._samples if number not in self._to_submit]
        self._samples, self._completions = {}, {}
        self._to_submit, self._early_progress = [], []
        self.statistics = EngineStatistics()
        if self._turns.is_current(self) and self._worker.is_running:
            self._abort_in_worker()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """A context that begins without requests; at its end vLLM may sleep."""
        if self._completions:
            raise ValueError("session: requests are unfinished; finish or abort them")
        self.reset()
        statistics = self.statistics
        try:
            yield
        finally:
            self.reset()
            self.statistics = statistics
            if not self._turns.others_wait(self):
                self._worker.sleep()

    def submit(self, request: Request, /) -> int:
        """Queues a request until the next step; raises RequestError if vLLM cannot serve it."""
        self.limits.check(request, "request")
        _check_support(request)
        number = next(self._request_numbers)
        completions = [Completion() for _ in request.params]
        self._completions[number] = completions
        for index, params in enumerate(request.params):
            sample = _Sample(
                number,
                index,
                tuple(request.tokens),
                request.num_partial,
                params,
                request.keys[index],
                completions[index],
            )
            sample_number = next(self._sample_numbers)
            self._samples[sample_number] = sample
            self._to_submit.append(sample_number)
        self.statistics.prefill_tokens += len(request.tokens)
        return number

    def abort(self, number: int, /) -> list[Completion]:
        """Ends a request; returns its completions with their last tokens.

        One that ended with these tokens has the `finish_reason` of its end.
        """
        completions = self._completions.get(number, [])
        in_flight = [
            sample_number
            for sample_number, sample in self._samples.items()
            if sample.request == number and sample_number not in self._to_submit
        ]
        if in_flight and self._turns.is_current(self) and self._worker.is_running:
            self._to_abort += in_flight
            self._early_progress += self._abort_in_worker()
        self._early_progress = [each for each in self._early_progress if each.request != number]
        for sample_number in [n for n, s in self._samples.items() if s.request == number]:
            del self._samples[sample_number]
        self._to_submit = [n for n in self._to_submit if n in self._samples]
        for completion in completions:
            completion.finish_reason = completion.finish_reason or "abort"
        self._completions.pop(number, None)
        return completions

    def completions(self, number: int, /) -> list[Completion]:
        return self._completions[number]

    def free(self, number: int, index: int, /) -> None:
        """vLLM evicts cached prefixes by itself."""

    def receive_weights(self, params: Params, version: int, /) -> None:
        """Hands weights over, unless the worker has them."""
        self._turns.begin(self)
        if not self._weights:
            self._weights.append(ExportedWeights(self._args.network))
        self._worker.hand_over(self._weights[0], params, version)

    def step(self, params: Params, version: int = 0, *, ahead: bool = False) -> list[Progress]:
        """Returns the tokens of a chunk, or those that vLLM has decoded since the last step."""
        del ahead
        self.receive_weights(params, version)
        reply = self._worker.call(
            {
                "do": "step",
                "abort": self._to_abort,
                "submit": [[n, _settings(self._samples[n])] for n in self._to_submit],
                "num_steps": self._args.chunk_steps,
            }
        )
        self._to_abort, self._to_submit = [], []
        early, self._early_progress = self._early_progress, []
        return early + self._recorded(reply)

    def compare_weights(self) -> dict[str, Any]:
        """Compares the weights that vLLM computes with to those of the last hand-over.

        Returns `num_compared` tensors, the names of the `differing` ones with their largest
        difference, and of the `skipped` ones, which cannot be read back.
        """
        return self._worker.compare_weights()

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()
        while self._weights:
            self._weights.pop().close()

    def yield_worker(self) -> None:
        """Takes the requests in flight out of the worker, to be resubmitted with the next step."""
        if not self._worker.is_running:
            return
        self._to_abort += [number for number in self._samples if number not in self._to_submit]
        self._early_progress += self._abort_in_worker()
        self._to_submit = list(self._samples)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._completions)

    def _abort_in_worker(self) -> list[Progress]:
        """Aborts `_to_abort`; returns the progress that all samples made until then."""
        samples, self._to_abort = self._to_abort, []
        return self._recorded(self._worker.call({"do": "abort", "samples": samples}))

    def _recorded(self, reply: Mapping[str, Any]) -> list[Progress]:
        """Appends the tokens of a reply to completions."""
        progress, statistics = [], self.statistics
        for number, tokens, log_probs, versions, top_log_probs, end in reply["progress"]:
            if (sample := self._samples.get(number)) is None:
                continue  # aborted in the meantime
            count, reason = self._num_until_stop(sample, tokens, end)
            if reason and not end:  # a stop string, of which the worker does not know
                self._to_abort.append(number)
            entry = Progress(
                sample.request,
                sample.place,
                tuple(tokens[:count]),
                tuple(log_probs[:count]),
                tuple(versions[:count]),
                tuple(tuple(map(tuple, top)) for top in top_log_probs[:count]),
                reason,
            )
            progress.append(entry)
            completion = sample.completion
            completion.tokens += entry.tokens
            completion.log_probs += entry.log_probs
            completion.versions += entry.versions
            completion.top_log_probs += entry.top_log_probs
            completion.finish_reason = reason
            statistics.decode_tokens += count
            if reason:
                self._end_sample(number)
        statistics.decode_steps += reply["decode_steps"]
        statistics.slot_steps += reply["slot_steps"]
        statistics.decode_s += reply["decode_s"]
        return progress

    def _num_until_stop(
        self, sample: _Sample, tokens: Sequence[int], reason: FinishReason
    ) -> tuple[int, FinishReason]:
        """The tokens up to the first stop string, and how the sample ended then."""
        stop_strings = sample.params.stop_strings
        if not stop_strings or not tokens:
            return len(tokens), reason
        partial = sample.prompt[len(sample.prompt) - sample.num_partial :]
        earlier = [*partial, *sample.completion.tokens]
        assert self._args.decode is not None, "checked by RequestLimits"
        length = requests.num_tokens_to_stop(
            [*earlier, *tokens], len(earlier), stop_strings, self._args.decode
        )
        return (length - len(earlier), "stop") if length else (len(tokens), reason)

    def _end_sample(self, number: int) -> None:
        request = self._samples.pop(number).request
        if all(completion.finish_reason for completion in self._completions[request]):
            del self._completions[request]


class _Turns:
    """Which of the engines that share a worker has its requests there."""

    def __init__(self) -> None:
        self._current: weakref.ref[VllmEngine] | None = None
        self._waiting: weakref.WeakSet[VllmEngine] = weakref.WeakSet()

    def is_current(self, engine: VllmEngine) -> bool:
        return self._current is not None and self._current() is engine

    def others_wait(self, engine: VllmEngine) -> bool:
        """Whether another engine has unfinished requests."""
        return any(each.has_unfinished for each in self._waiting if each is not engine)

    def begin(self, engine: VllmEngine) -> None:
        """Makes `engine` the one whose requests run."""
        if self.is_current(engine):
            return
        current = self._current() if self._current else None
        if current is not None:
            current.yield_worker()
            self._waiting.add(current)
        self._waiting.discard(engine)
        self._current = weakref.ref(engine)


def start_message(args: EngineArgs, config: VllmConfig) -> dict[str, Any]:
    """The message that a worker starts with, without the memory of the weights.

    Raises:
      ConfigError: If a Hugging Face config cannot describe the network.
    """
    network = args.network
    try:
        model_config = config_writer.to_hf_config(network.shape, "lm", network.compute_dtype)
    except CheckpointFormatError as error:
        raise ConfigError(
            f"config.rollout.engine: vLLM reads models by their Hugging Face config: {error}; use"
            " rollout.engine='jaxrl_llm'"
        ) from error
    return {
        "do": "start",
        "model_config": model_config,
        "suppressed_tokens": [list(tokens) for tokens in network.suppressed_tokens],
        "continuous": config.continuous,
        "sleep_level": config.sleep_level,
        "llm_args": {
            "dtype": network.compute_dtype,
            "max_model_len": args.max_tokens,
            "max_num_seqs": args.num_slots,
            "max_logprobs": requests.MAX_TOP_LOG_PROBS,
            "tensor_parallel_size": config.tensor_parallel_size,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            **config.parsed_llm_args(),
        },
    }


def _settings(sample: _Sample) -> dict[str, Any]:
    """A sample as the worker gets it: its tokens so far are part of the prompt."""
    params, tokens = sample.params, sample.completion.tokens
    prompt = [*sample.prompt, *tokens]
    return {
        "tokens": [int(token) for token in prompt],
        "seed": _seed(sample.key),
        "max_tokens": int(params.max_tokens) - len(tokens),
        "temperature": float(params.temperature),
        "top_k": int(params.top_k),
        "top_p": float(params.top_p),
        "min_p": float(params.min_p),
        "stop_tokens": [int(token) for token in params.stop_tokens],
        "num_top_log_probs": int(params.num_top_log_probs),
    }


def _seed(key: np.ndarray) -> int:
    """A sample's raw random key as one number."""
    high, low = (int(part) & 0xFFFFFFFF for part in key)
    return high << 32 | low


def _check_support(request: Request) -> None:
    """Raises RequestError if a request uses a feature that vLLM is not asked for."""
    various_params = {id(params): params for params in request.params}.values()
    items: list[tuple[Any, frozenset[str], str]] = [(request, _REQUEST_FIELDS, "request")]
    items += [(params, _SAMPLING_FIELDS, "params") for params in various_params]
    for item, supported, name in items:
        for field in dataclasses.fields(item):
            value, default = getattr(item, field.name), field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            is_default = type(value) is type(default) and value == default
            if field.name not in supported and not is_default:
                raise RequestError(
                    f"{name}.{field.name}: rollout.engine='vllm' does not support it; leave it out,"
                    " or use rollout.engine='jaxrl_llm'"
                )
    for params in various_params:
        if 0 < params.temperature < MIN_VLLM_TEMPERATURE:
            raise RequestError(
                f"temperature={params.temperature}: vLLM samples at {MIN_VLLM_TEMPERATURE} or"
                " above; raise it, or set it to 0 (greedy)"
            )
