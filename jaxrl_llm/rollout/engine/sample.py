"""A sample in the engine: its request, its tokens so far, its slot and pages, and its grammar."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.rollout.engine.device_programs import Outputs
from jaxrl_llm.rollout.engine.grammars import GrammarMatcher
from jaxrl_llm.rollout.engine.logit_adjustments import AdjustedRow
from jaxrl_llm.rollout.engine.requests import Completion, Progress, Request, SamplingParams


class Sample:
    """One sample from submission to its end: sample `index` of request `number`."""

    def __init__(self, number: int, index: int, request: Request):
        self.request, self.index, self.slot = number, index, -1  # -1: waiting
        self.prompt, self.params = request.tokens, request.params[index]
        self.resumed_tokens = request.tokens[len(request.tokens) - request.num_partial :]
        self.routes, self.sights, self.offset = request.routes, request.image_inputs, request.offset
        self.key = request.keys[index]
        self.retains_pages, self.num_prompt_top = request.retains_pages, request.num_prompt_top
        # The log-probs of a prompt need all of its hidden states.
        self.continued_sample = request.continues if self.num_prompt_top is None else None
        self.pages: list[int] = []  # in the order of its positions
        self.num_cached_tokens = 0  # tokens that are already in its pages when it enters a slot
        # Of its first full pages, for the prefix cache; empty: nothing is shared.
        self.page_hashes: list[bytes] = []
        self.num_registered = 0  # of these pages, those that the allocator was told of
        self.weights_epoch = 0  # weight changes before its pages were begun
        # (page, offset of its first token in the prompt) to write when it enters.
        self.page_writes: list[tuple[int, int]] = []
        self.completion = Completion()
        self.error: Exception | None = None
        self.adapter = request.adapter
        self._grammar = request.grammar
        self._matcher: GrammarMatcher | None = None

    @property
    def arrival(self) -> tuple[int, int]:  # the lowest arrived first
        return self.request, self.index

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion.tokens)

    @property
    def max_tokens(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.completion.tokens)

    def token_range(self, begin: int, end: int) -> tuple[int, ...]:
        """Its tokens from position `begin` to `end`, exclusive."""
        prompt, n = self.prompt[begin:end], len(self.prompt)
        return (*prompt, *self.completion.tokens[max(0, begin - n) : max(0, end - n)])

    @property
    def adapter_number(self) -> int:
        return self.adapter.number if self.adapter else 0

    def has_images(self, begin: int) -> bool:
        """Whether any of its tokens from position `begin` on is of an image."""
        images = self.sights
        return images is not None and bool(np.any(np.asarray(images.feature_index)[:, begin:] >= 0))

    @property
    def remaining_params(self) -> SamplingParams:
        """Sampling parameters with `max_tokens` reduced to the tokens left."""
        left = self.max_tokens - self.num_tokens
        return dataclasses.replace(self.params, max_tokens=left)

    @property
    def adjusted_row(self) -> AdjustedRow:
        """Its tokens for the adjustment of logits; a resumed sample's are output."""
        return AdjustedRow(self.params, self.tokens, len(self.prompt) - len(self.resumed_tokens))

    @property
    def needs_full_prefill(self) -> bool:
        """Whether its whole prompt needs prefill, batched with others; else from
        `num_cached_tokens` on.
        """
        return not self.num_cached_tokens and not self.completion.tokens

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar restricts its tokens."""
        return self._grammar is not None

    @property
    def stop_tokens(self) -> Sequence[int]:
        return self.params.stop_tokens

    def advanced_matcher(self) -> GrammarMatcher:
        """The state of its grammar after all its tokens; raises `GrammarError` if they break it.

        It outlasts a preemption. A request that continues a sample begins with its tokens.
        """
        assert self._grammar is not None
        matcher = self._matcher = self._matcher or self._grammar.matcher()
        count = matcher.num_advanced - len(self.resumed_tokens)
        if count < 0:
            matcher.advance(self.resumed_tokens[count:])
        matcher.advance(self.completion.tokens[max(0, count) :])
        return matcher

    def append_outputs(self, sampled: Outputs, column: int, version: int) -> int:
        """Appends one column of outputs; returns the number of its tokens."""
        is_valid = sampled.tokens[:, column] >= 0
        count, c = int(is_valid.sum()), self.completion
        c.tokens += sampled.tokens[is_valid, column].tolist()
        c.log_probs += sampled.log_probs[is_valid, column].tolist()
        c.versions += [version] * count
        if sampled.routes.shape[-1] and count:
            c.routes.append(np.asarray(sampled.routes[is_valid, column]))
        if (k := self.params.support_tokens) and count:
            c.support.append(np.asarray(sampled.support[is_valid, column, :k]))
        if k := self.params.num_top_log_probs:
            tokens = sampled.top_tokens[is_valid, column, :k].tolist()
            log_probs = sampled.top_log_probs[is_valid, column, :k].tolist()
            c.top_log_probs += map(tuple, map(zip, tokens, log_probs))
        return count

    def progress(self, first: int) -> Progress:
        """The sampled tokens from index `first` on, and how the sample ended."""
        c = self.completion
        new = (tuple(each[first:]) for each in (c.tokens, c.log_probs, c.versions, c.top_log_probs))
        prompt = c.prompt_log_probs if first == 0 else None
        return Progress._make((self.request, self.index, *new, c.finish_reason, self.error, prompt))
