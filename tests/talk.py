"""A world that answers with the same tokens."""

from typing import NamedTuple

from jaxrl_llm.types import EpisodeLog

APPENDED = (60, 61, 62)


class Following(NamedTuple):
    tokens: tuple[int, ...]
    rewrites: bool = False
    images: tuple = ()


class Talk:
    """Answers episodes with the same three tokens, so often; remembers what the policy said."""

    def __init__(self, num_answers, late=0):
        self.num_answers, self.turns = num_answers, [[] for _ in num_answers]
        self.waiting, self.late, self.ended = [], late, []

    def begin(self, prompts, num_samples):
        assert len(prompts.prompts) * num_samples == len(self.num_answers)
        return prompts

    def submit_turn(self, number, tokens, stopped):
        self.turns[number].append(list(tokens))
        is_answered = len(self.turns[number]) <= self.num_answers[number]
        if is_answered:
            self.waiting.append((number, Following(APPENDED)))
        return is_answered

    def collect_replies(self, wait):
        """Answers come in another order than the turns, some of them late."""
        kept = 0 if wait else min(self.late, len(self.waiting))
        found, self.waiting = self.waiting[kept:][::-1], self.waiting[:kept]
        return found

    def end(self, number):
        self.ended.append(number)

    def finish(self):
        return [EpisodeLog(num_turns=len(turns)) for turns in self.turns]
