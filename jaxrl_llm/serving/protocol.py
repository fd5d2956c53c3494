"""What clients send, OpenAI's completions, and what the engine is asked then; chats: `chat`.

`fields` says which fields are used, which make no difference and which are refused.
"""

import dataclasses
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic
from jaxtyping import UInt32
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.pictures import Pictures
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.rollout import requests
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS, Request, SamplingParams
from jaxrl_llm.serving import fields
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.tool_call_stream import ExpectedCalls
from jaxrl_llm.text import text_fault
from jaxrl_llm.types import Picture

MAX_PROMPTS = 256  # of one request
MAX_STOP_STRINGS = 16
MAX_NESTING = 256  # brackets within brackets

First = Field(fail_fast=True)  # of a list with a million wrong entries, the first is reported
Tokens = Annotated[list[int], First]
Texts = Annotated[list[str], First]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TopLogProbs = Annotated[int, Field(ge=0, le=20)]


class ApiError(Exception):
    """A request that is answered by an error, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str = "",
        param: str = "",
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        error = {"message": message, "type": kind, "param": param or None, "code": code or None}
        self.body = {"error": error}


@dataclasses.dataclass(frozen=True)
class Served:
    """The model that is served, without its weights."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos_tokens: tuple[int, ...]
    vocab_size: int
    max_tokens: int  # prompt and reply of one sample
    chat_template: bool = True  # False: messages are joined by newlines
    call_format: str = ""  # in which the model calls tools; "": it calls none
    pictures: Pictures | None = None  # prepares images; None: the model reads text alone
    # What images are to a prompt of so many tokens; called by one thread.
    see: Callable[[Sequence[Picture], int], Sights | None] = lambda images, num_tokens: None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One client's request, checked."""

    requests: tuple[Request, ...]  # one a prompt
    with_log_probs: bool
    calls: ExpectedCalls | None = None  # None: what looks like a call is text

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)

    @property
    def params(self) -> list[SamplingParams]:
        """How each sample is drawn, prompt by prompt."""
        return [params for request in self.requests for params in request.params]


class StreamOptions(Strict):
    rules = fields.STREAM_OPTIONS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with `include_usage`: in every chunk, as vLLM


class Body(Strict):
    """What completions and chat completions have in common."""

    model: str
    n: int | None = Field(None, ge=1, le=128)  # samples of one prompt
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    stop: str | Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's.
    top_k: int | None = Field(None, ge=-1, lt=2**31)  # -1 and 0: all tokens
    min_p: float | None = Field(None, ge=0.0, lt=1.0)
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        """Refuses what is no text and no field, by name."""
        if not isinstance(values, dict):
            return values
        if fault := text_fault(values, MAX_NESTING):
            keys, problem = fault
            raise ApiError(400, f"{'.'.join(keys)}: {problem}; leave it out", param=keys[0])
        for name, value in values.items():
            if value is None or name in cls.model_fields:
                continue
            if (rule := cls.rules.get(name)) is None:
                raise ApiError(400, f"{name[:100]}: no such field", param=name[:100])
            if not rule.accepts(value):
                message = f"{name}={reprlib.repr(value)} is not supported by this server"
                code = fields.UNSUPPORTED
                raise ApiError(400, f"{message}; leave it out", code=code, param=name)
        return values

    @pydantic.field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float | None) -> float | None:
        if problem := requests.number_problem("temperature", temperature or 0):
            raise ValueError(problem)
        return temperature

    @pydantic.field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> list[str]:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(strings)} stop strings, at most {MAX_STOP_STRINGS}")
        if not all(1 <= len(string) <= 256 for string in strings):
            raise ValueError("a stop string must have 1 to 256 characters")
        return strings

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self) -> "Body":
        asked = self.stream_options and self.stream_options.model_dump(exclude_none=True)
        if asked and any(asked.values()) and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    def wanted(self, served: Served) -> Wanted:
        """Returns what the engine is asked; raises an `ApiError` if it cannot be served."""
        raise NotImplementedError

    def _wanted(
        self,
        served: Served,
        prompts: Sequence[tuple[int, ...]],
        param: str,  # that holds the prompts
        max_tokens: int | None,
        default_tokens: int,  # gives way to a long prompt; `max_tokens` does not
        num_top: int,  # likeliest tokens beside each log-prob; -1: no log-probs
        calls: ExpectedCalls | None = None,
        images: Sequence[Picture] = (),  # of every prompt
    ) -> Wanted:
        stop_tokens = () if self.ignore_eos else served.eos_tokens
        if own := self.stop_token_ids:
            _check_tokens(served, own, "stop_token_ids")
            stop_tokens = tuple(dict.fromkeys((*stop_tokens, *own)))
            if (count := len(stop_tokens)) > NUM_STOP_TOKENS:
                message = f"{count} stop tokens with the model's own, at most {NUM_STOP_TOKENS}"
                raise ApiError(400, message, param="stop_token_ids")
        count = self.n or 1
        asked = []
        for prompt, keys in zip(prompts, random_keys(self.seed, len(prompts), count), strict=True):
            length = len(prompt)
            if not prompt:
                raise ApiError(400, "the prompt has no tokens; give at least one", param=param)
            limit = max_tokens or max(1, min(default_tokens, served.max_tokens - length))
            if (total := length + limit) > served.max_tokens:
                # Clients tell this from other refusals by OpenAI's own words.
                most = f"This model's maximum context length is {served.max_tokens} tokens."
                asks = f"the prompt has {length} tokens and max_tokens is {limit}, together {total}"
                rule = f"this model takes {served.max_tokens}: shorten the prompt"
                message = f"{most} However, {asks}; {rule} or lower max_tokens"
                wrong = param if length >= served.max_tokens else "max_tokens"
                raise ApiError(400, message, code="context_length_exceeded", param=wrong)
            params = SamplingParams(
                max_tokens=limit,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=max(0, self.top_k or 0),
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                stop_tokens=stop_tokens,
                stop_strings=tuple(self.stop or ()),
                num_top_log_probs=max(0, num_top),
            )
            sights = served.see(images, length)
            asked.append(Request(prompt, keys, (params,) * count, sights=sights))
        return Wanted(tuple(asked), num_top >= 0, calls)


class CompletionBody(Body):
    """`POST /v1/completions`."""

    rules = fields.COMPLETION
    prompt: str | Tokens | Texts | Annotated[list[Tokens], First]
    max_tokens: Count | None = None
    logprobs: TopLogProbs | None = None
    best_of: int | None = None

    @pydantic.model_validator(mode="after")
    def _check_counts(self) -> "CompletionBody":
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of={self.best_of} must be n={self.n or 1}, or left out")
        if not self.prompts:
            raise ValueError("prompt is empty; give a text, token ids, or a list of either")
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"{len(self.prompts)} prompts, at most {MAX_PROMPTS}")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever of the four forms came."""
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if one else self.prompt  # type: ignore[return-value]

    def wanted(self, served: Served) -> Wanted:
        prompts = []
        for prompt in self.prompts:
            if isinstance(prompt, str):
                prompt = served.tokenizer(prompt)["input_ids"]
            else:
                _check_tokens(served, prompt, "prompt")
            prompts.append(tuple(prompt))
        num_top = -1 if self.logprobs is None else self.logprobs
        # Without `max_tokens` 16 tokens, as OpenAI.
        return self._wanted(served, prompts, "prompt", self.max_tokens, 16, num_top)


def _check_tokens(served: Served, tokens: Sequence[int], param: str) -> None:
    size = served.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        message = f"{param}: token id {wrong[0]} is outside the vocabulary of {size}"
        raise ApiError(400, message, param=param)


def random_keys(
    seed: int | None, num_prompts: int, num_samples: int
) -> UInt32[np.ndarray, "P G 2"]:
    """Returns raw keys: of the seed, or never seen before."""
    entropy = secrets.randbits(128) if seed is None else [seed % 2**64, 1]
    words = np.random.SeedSequence(entropy).generate_state(2 * num_prompts * num_samples)
    return words.astype(np.uint32).reshape(num_prompts, num_samples, 2)
