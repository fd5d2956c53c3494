"""What clients send: OpenAI's completions and chat completions; other fields are refused."""

import reprlib
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxrl_llm.rollout.requests import is_text, number_problem
from jaxrl_llm.serving.errors import ApiError

MAX_SAMPLES = 128  # of one prompt
MAX_PROMPTS = 256  # of one request
MAX_STOP_STRINGS = 16
MAX_TOP_LOG_PROBS = 20

# Fields that are not served, and their values that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}

First = Field(fail_fast=True)  # of a list with a million wrong entries, the first is reported
Tokens = Annotated[list[int], First]
Texts = Annotated[list[str], First]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TopLogProbs = Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)]


def _surrogate_place(value: Any) -> list[str] | None:
    """Returns the keys that lead to half of a surrogate pair in a JSON value, None if none do."""
    left: list[tuple[list[str], Any]] = [([], value)]
    while left:
        keys, value = left.pop()
        if isinstance(value, str) and not is_text(value):
            return keys
        if isinstance(value, dict):
            if wrong := [key for key in value if not is_text(key)]:
                return [*keys, ascii(wrong[0])]
            left += [([*keys, key], inside) for key, inside in value.items()]
        if isinstance(value, list):
            texts = (i for i, inside in enumerate(value) if isinstance(inside, str | list | dict))
            left += [([*keys, str(i)], value[i]) for i in texts]
    return None


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is added to a chunk either way


class _Body(_Strict):
    """What completions and chat completions have in common."""

    model: str
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    stop: str | Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None  # of no consequence
    # Beyond OpenAI's.
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0.0, lt=1.0)
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        """Refuses what is no text and no field; drops fields that ask for nothing."""
        if not isinstance(values, dict):
            return values
        if (keys := _surrogate_place(values)) is not None:
            message = "holds half of a surrogate pair, which is no text; leave it out"
            raise ApiError(400, f"{'.'.join(keys)}: {message}", param=keys[0])
        kept = {}
        for name, value in values.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name not in _NOTHING:
                raise ApiError(400, f"{name[:100]}: no such field", param=name[:100])
            elif value is not None and not any(_same(value, v) for v in _NOTHING[name]):
                raise ApiError(
                    400,
                    f"{name}={reprlib.repr(value)} is not supported by this server; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        return kept

    @pydantic.field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float | None) -> float | None:
        if temperature is not None and (problem := number_problem("temperature", temperature)):
            raise ValueError(problem)
        return temperature

    @pydantic.field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(strings)} stop strings, at most {MAX_STOP_STRINGS}")
        if not all(1 <= len(string) <= 256 for string in strings):
            raise ValueError("a stop string must have 1 to 256 characters")
        return stop

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self) -> "_Body":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(_Body):
    """`POST /v1/completions`."""

    prompt: str | Tokens | Texts | Annotated[list[Tokens], First]
    max_tokens: Count | None = None
    logprobs: TopLogProbs | None = None
    best_of: int | None = None

    @pydantic.model_validator(mode="after")
    def _check_counts(self) -> "CompletionBody":
        if self.best_of not in (None, self.num_samples):
            raise ValueError(f"best_of={self.best_of} must be n={self.num_samples}, or left out")
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


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], First]
    name: str | None = None

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], First] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogProbs | None = None

    @pydantic.model_validator(mode="after")
    def _check_top(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


def _same(value: Any, nothing: Any) -> bool:
    """Returns whether a value is `nothing`, 0 and 0.0 being the same, 0 and False not."""
    return value == nothing and isinstance(value, bool) == isinstance(nothing, bool)
