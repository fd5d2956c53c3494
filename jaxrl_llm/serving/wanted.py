"""From what a client sent to what the engine is asked: token ids, limits, random keys."""

import dataclasses
import secrets
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS, Request, SamplingParams
from jaxrl_llm.serving.errors import ApiError
from jaxrl_llm.serving.protocol import ChatBody, CompletionBody

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclasses.dataclass(frozen=True)
class Served:
    """The model that is served, without its weights."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos_tokens: tuple[int, ...]
    vocab_size: int
    max_tokens: int  # prompt and reply of one sample
    chat_template: bool = True  # False: messages are joined by newlines


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One client's request, checked."""

    requests: tuple[Request, ...]  # one a prompt
    with_log_probs: bool

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)

    @property
    def params(self) -> list[SamplingParams]:
        """How each sample is drawn, prompt by prompt."""
        return [params for request in self.requests for params in request.params]


def completion(served: Served, body: CompletionBody) -> Wanted:
    """Returns what `POST /v1/completions` asks for; an `ApiError` if it cannot be served."""
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompt = served.tokenizer(prompt)["input_ids"]
        else:
            _check_tokens(served, prompt, "prompt")
        prompts.append(tuple(prompt))
    # A default gives way to a long prompt; a number that was asked for does not.
    limits = [
        body.max_tokens or min(_DEFAULT_COMPLETION_TOKENS, _room(served, prompt))
        for prompt in prompts
    ]
    num_top = -1 if body.logprobs is None else body.logprobs
    return _wanted(served, body, prompts, limits, "prompt", num_top)


def chat(served: Served, body: ChatBody) -> Wanted:
    """Returns what `POST /v1/chat/completions` asks for, up to all tokens that fit; see above."""
    if served.chat_template and not served.tokenizer.chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions")
    messages = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.text}
        for m in body.messages
    ]
    try:
        prompts, _ = tokenizer_lib.render_prompts(
            served.tokenizer, [messages], served.chat_template
        )
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from error
    limit = body.max_completion_tokens or body.max_tokens or _room(served, prompts[0])
    num_top = (body.top_logprobs or 0) if body.logprobs else -1
    return _wanted(served, body, prompts, [limit], "messages", num_top)


def _room(served: Served, prompt: Sequence[int]) -> int:
    return max(1, served.max_tokens - len(prompt))


def _check_tokens(served: Served, tokens: Sequence[int], param: str) -> None:
    size = served.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        message = f"{param}: token id {wrong[0]} is outside the vocabulary of {size}"
        raise ApiError(400, message, param=param)


def _wanted(
    served: Served,
    body: CompletionBody | ChatBody,
    prompts: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    prompt_param: str,
    num_top: int,
) -> Wanted:
    """`num_top` likeliest tokens beside each log-prob; -1: no log-probs."""
    stop_tokens = () if body.ignore_eos else served.eos_tokens
    if body.stop_token_ids:
        _check_tokens(served, body.stop_token_ids, "stop_token_ids")
        stop_tokens = tuple(dict.fromkeys((*stop_tokens, *body.stop_token_ids)))
        if (count := len(stop_tokens)) > NUM_STOP_TOKENS:
            message = f"{count} stop tokens with the model's own, at most {NUM_STOP_TOKENS}"
            raise ApiError(400, message, param="stop_token_ids")
    keys = random_keys(body.seed, len(prompts), body.num_samples)
    requests = []
    for prompt, limit, key in zip(prompts, limits, keys, strict=True):
        if not prompt:
            raise ApiError(400, "the prompt has no tokens; give at least one", param=prompt_param)
        if (total := len(prompt) + limit) > served.max_tokens:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and max_tokens is {limit}, together {total};"
                f" this model takes {served.max_tokens}: shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
                param=prompt_param if len(prompt) >= served.max_tokens else "max_tokens",
            )
        params = SamplingParams(
            max_tokens=limit,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            stop_tokens=stop_tokens,
            stop_strings=body.stop_strings,
            num_top_log_probs=max(0, num_top),
        )
        requests.append(Request(prompt, key, (params,) * body.num_samples))
    return Wanted(tuple(requests), with_log_probs=num_top >= 0)


def random_keys(
    seed: int | None, num_prompts: int, num_samples: int
) -> UInt32[np.ndarray, "P G 2"]:
    """Returns raw keys: of the seed, or never seen before."""
    entropy = secrets.randbits(128) if seed is None else [seed % 2**64, 1]
    words = np.random.SeedSequence(entropy).generate_state(2 * num_prompts * num_samples)
    return words.astype(np.uint32).reshape(num_prompts, num_samples, 2)
