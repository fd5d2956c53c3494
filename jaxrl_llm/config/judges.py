"""Generative judges: models that read responses and say how good they are."""

from typing import Annotated, Literal

from jaxrl_llm.config.validation import (
    Address,
    ConfigGroup,
    File,
    Name,
    Problems,
    Range,
    Real,
)


class JudgeConfig(ConfigGroup):
    """One generative judge and its weight in the score (docs/rewards.md)."""

    # An OpenAI-compatible address, "http://host:8000/v1": a provider's, or `jaxrl_llm serve` with
    # any model on devices of its own.
    address: Address = ""
    model: Name = "judge"  # as the server calls it
    # "score": a number for each response; "pairwise": which of two responses to a prompt is better.
    mode: Literal["score", "pairwise"] = "score"
    # What the judge is asked: a Jinja file. "": the built-in one of the mode.
    rubric: File = ""
    min_score: Real = 0.0  # of "score": the range of its numbers, which becomes 0 to 1
    max_score: Real = 10.0  # see min_score
    votes: Annotated[int, Range("[1, 64]")] = 3  # on each response, or pair; their mean counts
    # Of "pairwise": other responses that each one is compared with.
    num_opponents: Annotated[int, Range("[0, 65535]", "0: all of its group")] = 0
    temperature: Annotated[float, Range("[0, 2]")] = 1.0  # of the votes
    max_tokens: Annotated[int, Range("[1, 1000000]")] = 512  # of a verdict
    timeout_s: Annotated[float, Range("[0.01, 1000000]")] = 60.0  # of a request
    num_retries: Annotated[int, Range("[0, 20]")] = 3  # of a request that fails
    max_requests: Annotated[int, Range("[1, 4096]")] = 32  # at the same time
    api_key_variable: Name = ""  # the environment variable with the key; "": none
    weight: Real = 1.0  # in the score
    data_source: Name = "*"  # rows that it scores; "*": all

    def rules(self) -> Problems:
        if not self.address:
            yield "address", "required: of an OpenAI-compatible server, such as http://host:8000/v1"
        if self.min_score >= self.max_score:
            yield "max_score", f"{self.max_score:g} is not above min_score={self.min_score:g}"
        if self.num_opponents and self.mode == "score":
            yield "num_opponents", "a score compares nothing; set mode='pairwise', or 0"
        if self.temperature == 0 and self.votes > 1:
            yield "votes", f"{self.votes} greedy votes are the same; raise temperature, or give one"
