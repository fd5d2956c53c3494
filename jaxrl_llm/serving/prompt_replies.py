"""The prompt in a reply: `echo` as in OpenAI's completions, `prompt_logprobs` as in vLLM."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rollout.engine.requests import PromptLogProbs

Json = dict[str, Any]


def json_log_prob(log_prob: float) -> float:
    """A log-prob that JSON can represent: minus infinity becomes -9999, as in OpenAI's API."""
    return log_prob if math.isfinite(log_prob) else -9999.0


def echoed_log_probs(
    tokens: Sequence[int],
    log_probs: PromptLogProbs,
    num_top: int,
    offsets: Sequence[int],
    token_text: Callable[[int], str],
) -> Json:
    """The `logprobs` of a prompt in OpenAI's completions; null for its first token.

    `offsets` are where the text of each token begins.
    """
    values = [json_log_prob(p) for p in log_probs.log_probs[1:].tolist()]
    tops = [
        {token_text(t): json_log_prob(p) for t, p in reversed([*zip(ids, top, strict=True)])}
        for ids, top in zip(
            log_probs.top_tokens[1:, :num_top].tolist(),
            log_probs.top_log_probs[1:, :num_top].tolist(),
            strict=True,
        )
    ]
    return {
        "tokens": [token_text(token) for token in tokens],
        "token_logprobs": [None, *values],
        "top_logprobs": [None, *tops] if num_top else None,
        "text_offset": list(offsets),
    }


def joined_log_probs(prompt: Json, reply: Json) -> Json:
    """The `logprobs` of a prompt and of the reply to it, as those of one text."""
    return {
        key: None if values is None else [*values, *(reply[key] or ())]
        for key, values in prompt.items()
    }


def prompt_log_probs(
    tokens: Sequence[int],
    log_probs: PromptLogProbs,
    num_top: int,
    token_text: Callable[[int], str],
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each token but the first, log-probs by token id."""

    def entry(token: int, log_prob: float, rank: int) -> Json:
        value = json_log_prob(log_prob)
        return {"logprob": value, "rank": rank, "decoded_token": token_text(token)}

    entries: list[Json | None] = [None]
    own = zip(tokens, log_probs.log_probs.tolist(), log_probs.ranks.tolist(), strict=True)
    tops = zip(log_probs.top_tokens.tolist(), log_probs.top_log_probs.tolist(), strict=True)
    for (token, log_prob, rank), (ids, values) in itertools.islice(
        zip(own, tops, strict=True), 1, None
    ):
        likeliest = enumerate(zip(ids[:num_top], values[:num_top], strict=True), 1)
        by_token = {str(t): entry(t, p, number) for number, (t, p) in likeliest}
        entries.append({str(token): entry(token, log_prob, rank), **by_token})
    return entries
