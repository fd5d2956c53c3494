"""Request bodies of OpenAI's completions API, validated and converted to engine requests.

`chat` has those of chat completions; `fields` says which fields are used, ignored or refused.
"""

import dataclasses
import functools
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic
from jaxtyping import UInt32
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.images import ImagePreprocessor
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.rollout.engine import requests
from jaxrl_llm.rollout.engine.grammars import Grammar, GrammarError
from jaxrl_llm.rollout.engine.requests import (
    NUM_STOP_TOKENS,
    AdapterSlot,
    Request,
    SamplingParams,
)
from jaxrl_llm.rollout.structured_outputs import GrammarCompiler, GrammarSource, source_of
from jaxrl_llm.serving import fields
from jaxrl_llm.serving.constraints import ConstrainedBody, Constraint, ResponseFormat
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.sampling_fields import SamplingFields
from jaxrl_llm.serving.tool_call_stream import ExpectedCalls
from jaxrl_llm.text import text_fault
from jaxrl_llm.types import PromptImage

MAX_PROMPTS = 256  # of one request
MAX_STOP_STRINGS = 16
MAX_NESTING = 256  # depth of nested brackets

FAIL_FAST = Field(fail_fast=True)  # a list with a million wrong entries reports only the first
Tokens = Annotated[list[int], FAIL_FAST]
Texts = Annotated[list[str], FAIL_FAST]
PositiveCount = Annotated[int, Field(ge=1, lt=2**31)]
TopLogProbs = Annotated[int, Field(ge=0, le=20)]


class ApiError(Exception):
    """An error reply, with a body in OpenAI's format."""

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
class ChatPrompt:
    """A dialogue of a client and its rendering, before it is tokenized."""

    messages: Sequence[Mapping[str, Any]]  # in the form for the chat template
    options: Mapping[str, Any]  # `tools` and other variables of the template
    text: str
    call_start: str = ""  # behind the text: the beginning of a call that is forced
    uses_template: bool = True  # False: contents joined by newlines


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The served model, without its weights."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos_tokens: tuple[int, ...]
    vocab_size: int
    max_tokens: int  # prompt and reply of one sample
    chat_template: bool = True  # False: messages are joined by newlines
    call_format: str = ""  # how the model writes tool calls; "": it makes none
    image_processor: ImagePreprocessor | None = None  # image preprocessing; None: a text-only model
    # (images, prompt tokens) -> the image inputs of a prompt; called from one thread.
    image_inputs: Callable[[Sequence[PromptImage], int], ImageInputs | None] = (
        lambda images, num_tokens: None
    )
    # The tokens of a dialogue; None: those of its text. Sessions of training runs put in the ids of
    # replies that were sampled (`sessions/dialogue_tree.py`). Called from one thread.
    tokenize_chat: Callable[[ChatPrompt], tuple[int, ...]] | None = None
    answers_any_name: bool = False  # whatever model a request names
    # False: strict tools and a required call constrain no token, and other constraints are refused.
    # So in training without `rollout.support_tokens`: the learner does not know the masks.
    constrains_replies: bool = True

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles the constraints of requests."""
        return GrammarCompiler(self.tokenizer, self.vocab_size)


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A client's request, validated and tokenized."""

    requests: tuple[Request, ...]  # one per prompt
    with_log_probs: bool
    expected_calls: ExpectedCalls | None = None  # None: replies are text alone
    with_token_ids: bool = False  # of the prompt and of the reply
    names_token_ids: bool = False  # log-probs name a token "token_id:17", not by its text
    grammar_source: GrammarSource | None = None  # constrains every reply, once it is compiled
    echoed_texts: tuple[str, ...] = ()  # prompts that replies begin with; (): not echoed
    num_prompt_log_probs: int | None = None  # vLLM's `prompt_logprobs`
    is_prompt_only: bool = False  # the reply has no token of its own (`max_tokens=0`)

    def with_grammar(self, grammar: Grammar) -> "GenerationRequest":
        """The same request with the compiled grammar of its samples."""
        constrained = (dataclasses.replace(each, grammar=grammar) for each in self.requests)
        return dataclasses.replace(self, requests=tuple(constrained))

    def with_adapter(self, adapter: AdapterSlot) -> "GenerationRequest":
        """The same request, sampled with an adapter."""
        adapted = (dataclasses.replace(each, adapter=adapter) for each in self.requests)
        return dataclasses.replace(self, requests=tuple(adapted))

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)

    @property
    def sampling_params(self) -> list[SamplingParams]:
        """Sampling parameters of each sample, prompt by prompt."""
        return [params for request in self.requests for params in request.params]


def check_text(values: Any) -> Any:
    """`values`; raises `ApiError` if its texts are no Unicode, or it is nested too deep."""
    if isinstance(values, dict) and (fault := text_fault(values, MAX_NESTING)):
        keys, problem = fault
        raise ApiError(400, f"{'.'.join(keys)}: {problem}; leave it out", param=keys[0])
    return values


class StreamOptions(Strict):
    rules = fields.STREAM_OPTIONS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with `include_usage`: in every chunk, as vLLM


class Body(ConstrainedBody, SamplingFields):
    """The fields that completions and chat completions have in common."""

    model: str
    n: int | None = Field(None, ge=1, le=128)  # samples of one prompt
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    stop: str | Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions to OpenAI's API, as in vLLM.
    top_k: int | None = Field(None, ge=-1, lt=2**31)  # -1 and 0: all tokens
    min_p: float | None = Field(None, ge=0.0, lt=1.0)
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        """Rejects invalid Unicode, unknown fields and unsupported values, naming the field."""
        if not isinstance(check_text(values), dict):
            return values
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
        options = self.stream_options and self.stream_options.model_dump(exclude_none=True)
        if options and any(options.values()) and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    def generation_request(self, served: ServedModel) -> GenerationRequest:
        """Converts the body into engine requests; raises `ApiError` if it cannot be served."""
        raise NotImplementedError

    def reply_constraint(self) -> Constraint | None:
        """The constraint of the reply; raises `ApiError` if it cannot be read."""
        try:
            return self.constraint()
        except GrammarError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error

    def _generation_request(
        self,
        served: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        param: str,  # the field that holds the prompts
        max_tokens: int | None,
        default_tokens: int,  # without `max_tokens`; lowered to what a long prompt leaves
        num_top: int,  # top log-probs per token; -1: no log-probs at all
        calls: ExpectedCalls | None = None,
        images: Sequence[PromptImage] = (),  # of every prompt
        echoed_texts: Sequence[str] = (),  # prompts that replies begin with; (): not echoed
        num_prompt_log_probs: int | None = None,  # `prompt_logprobs`
        grammar_source: GrammarSource | None = None,
    ) -> GenerationRequest:
        if grammar_source is not None and self.ignore_eos:
            message = f"a reply ends when its {grammar_source.setting} is complete; leave it out"
            raise ApiError(400, f"ignore_eos: {message}", param="ignore_eos")
        stop_tokens = () if self.ignore_eos else served.eos_tokens
        if extra_stop_tokens := self.stop_token_ids:
            check_tokens(served, extra_stop_tokens, "stop_token_ids")
            stop_tokens = tuple(dict.fromkeys((*stop_tokens, *extra_stop_tokens)))
            if (count := len(stop_tokens)) > NUM_STOP_TOKENS:
                message = f"{count} stop tokens with the model's own, at most {NUM_STOP_TOKENS}"
                raise ApiError(400, message, param="stop_token_ids")
        try:
            adjustments = self.adjustments(served.tokenizer, served.vocab_size)
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error
        count = self.n or 1
        if num_prompt_log_probs is not None and self.stream:
            message = "prompt_logprobs is not available with stream=true; leave one of them out"
            raise ApiError(400, message, param="prompt_logprobs")
        num_prompt_top = num_prompt_log_probs
        if echoed_texts and num_top >= 0:
            num_prompt_top = max(num_top, num_prompt_top or 0)
        is_prompt_only = max_tokens == 0
        if is_prompt_only:
            max_tokens = 1  # an engine samples at least one token, which the reply leaves out
        engine_requests = []
        for prompt, keys in zip(prompts, random_keys(self.seed, len(prompts), count), strict=True):
            length = len(prompt)
            if not prompt:
                raise ApiError(400, "the prompt has no tokens; give at least one", param=param)
            limit = max_tokens or max(1, min(default_tokens, served.max_tokens - length))
            if (total := length + limit) > served.max_tokens:
                # Clients recognize this error by OpenAI's wording.
                limit_text = f"This model's maximum context length is {served.max_tokens} tokens."
                request_text = (
                    f"the prompt has {length} tokens and max_tokens is {limit}, together {total}"
                )
                remedy = f"this model takes {served.max_tokens}: shorten the prompt"
                message = f"{limit_text} However, {request_text}; {remedy} or lower max_tokens"
                wrong_param = param if length >= served.max_tokens else "max_tokens"
                raise ApiError(400, message, code="context_length_exceeded", param=wrong_param)
            if (self.min_tokens or 0) > limit:
                message = f"min_tokens={self.min_tokens} is above the limit of {limit} tokens"
                raise ApiError(400, f"{message}; lower it", param="min_tokens")
            params = SamplingParams(
                max_tokens=limit,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=max(0, self.top_k or 0),
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                stop_tokens=stop_tokens,
                stop_strings=tuple(self.stop or ()),
                num_top_log_probs=max(0, num_top),
                **adjustments,
            )
            sights = served.image_inputs(images, length)
            engine_requests.append(
                Request(
                    prompt,
                    keys,
                    (params,) * count,
                    image_inputs=sights,
                    num_prompt_top=num_prompt_top,
                )
            )
        return GenerationRequest(
            requests=tuple(engine_requests),
            with_log_probs=num_top >= 0,
            expected_calls=calls,
            with_token_ids=bool(self.return_token_ids),
            names_token_ids=bool(self.return_tokens_as_token_ids),
            echoed_texts=tuple(echoed_texts),
            num_prompt_log_probs=num_prompt_log_probs,
            is_prompt_only=is_prompt_only,
            grammar_source=grammar_source,
        )


class CompletionBody(Body):
    """`POST /v1/completions`."""

    rules = fields.COMPLETION
    prompt: str | Tokens | Texts | Annotated[list[Tokens], FAIL_FAST]
    max_tokens: int | None = Field(None, ge=0, lt=2**31)  # 0: with `echo`, the prompt alone
    response_format: ResponseFormat | None = None
    logprobs: TopLogProbs | None = None
    best_of: int | None = None
    echo: bool | None = None
    prompt_logprobs: TopLogProbs | None = None  # vLLM's

    @pydantic.model_validator(mode="after")
    def _check_counts(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens=0 needs echo=true, or must be greater than or equal to 1"
            raise ApiError(400, message, param="max_tokens")
        if self.best_of not in (None, self.n or 1):
            message = f"best_of={self.best_of} must be n={self.n or 1}, or left out"
            raise ApiError(400, message, param="best_of")
        if not self.prompts:
            raise ValueError("prompt is empty; give a text, token ids, or a list of either")
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"{len(self.prompts)} prompts, at most {MAX_PROMPTS}")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, from any of the four forms of `prompt`."""
        is_single = isinstance(self.prompt, str) or (
            self.prompt and isinstance(self.prompt[0], int)
        )
        return [self.prompt] if is_single else self.prompt  # type: ignore[return-value]

    def generation_request(self, served: ServedModel) -> GenerationRequest:
        prompts, texts = [], []
        for prompt in self.prompts:
            if isinstance(prompt, str):
                texts.append(prompt)
                prompt = served.tokenizer(prompt)["input_ids"]
            else:
                check_tokens(served, prompt, "prompt")
                texts.append(_text_of(served, prompt) if self.echo else "")
            prompts.append(tuple(prompt))
        num_top = -1 if self.logprobs is None else self.logprobs
        constraint = self.reply_constraint()
        return self._generation_request(
            served,
            prompts,
            "prompt",
            self.max_tokens,
            default_tokens=16,  # OpenAI's
            num_top=num_top,
            echoed_texts=texts if self.echo else (),
            num_prompt_log_probs=self.prompt_logprobs,
            grammar_source=source_of(*constraint) if constraint else None,
        )


def _text_of(served: ServedModel, tokens: Sequence[int]) -> str:
    return str(served.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def check_tokens(served: ServedModel, tokens: Sequence[int], param: str) -> None:
    size = served.vocab_size
    if outside := [token for token in tokens if not 0 <= token < size]:
        message = f"{param}: token id {outside[0]} is outside the vocabulary of {size}"
        raise ApiError(400, message, param=param)


def random_keys(
    seed: int | None, num_prompts: int, num_samples: int
) -> UInt32[np.ndarray, "P G 2"]:
    """Raw PRNG keys of the samples, derived from the seed or, without one, unpredictable."""
    entropy = secrets.randbits(128) if seed is None else [seed % 2**64, 1]
    words = np.random.SeedSequence(entropy).generate_state(2 * num_prompts * num_samples)
    return words.astype(np.uint32).reshape(num_prompts, num_samples, 2)
