"""What is asked of the engine, and what it gives back. Token ids throughout."""

import dataclasses
from typing import Literal

import numpy as np

# Of one sample; the device compares each new token with them. The config allows 8, the rest is
# left to the model's own ends of sequence.
NUM_STOP_TOKENS = 16
MAX_TOP_LOG_PROBS = 32

# "": still running; "stop": a stop token or a stop string; "length": its limit of tokens; "error":
# what the host does for this sample alone raised.
FinishReason = Literal["", "stop", "length", "abort", "error"]
# Of one place in a sequence: (token, log-prob) pairs, the likeliest first.
TopLogProbs = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn.

    A stop token ends the sample and is its last token. A stop string ends it with the first
    token that completes the string in the sample's text: that token is kept whole, whatever
    text it holds after the string (`stopping.text_before` cuts a text there).
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy; else at least MIN_TEMPERATURE
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_top_log_probs: int = 0  # likeliest tokens reported at every place; 0: off

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the samples wanted of it; the prompt is read once for all of them.

    The random number of a token follows from the key of its sample and its position in the
    sequence, prompt included. So a sample that was aborted goes on as a request of its own:
    prompt and tokens so far as the prompt, the same key, what is left of `max_tokens`.
    """

    tokens: tuple[int, ...]
    keys: np.ndarray  # [n, 2] uint32, one raw random key a sample
    params: tuple[SamplingParams, ...]  # n of them


@dataclasses.dataclass
class Completion:
    """One sample as far as it came."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # stop token included
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights that drew each
    top_log_probs: list[TopLogProbs] = dataclasses.field(default_factory=list)  # none if off
    finish_reason: FinishReason = ""

    @property
    def stopped(self) -> bool:
        """Whether it ended by itself, not by its length limit or an abort."""
        return self.finish_reason == "stop"


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one turn of the engine added to one sample."""

    request: int  # as `Engine.submit` returned it
    sample: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]  # of the weights that drew each token
    top_log_probs: tuple[TopLogProbs, ...]  # empty if off
    finish_reason: FinishReason  # "" while the sample is running
    error: Exception | None = None  # why, if that is "error"
