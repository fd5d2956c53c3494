"""An environment for a policy that knows nothing: it repeats what it hears, and likes vowels."""

import time

from jaxrl_llm.agents.environments import Step


class Talker:
    def start(self, row):
        self.turns = 0
        return "talk"

    def step(self, message):
        self.turns += 1
        said = message["content"]
        time.sleep(0.01 * (len(said) % 3))  # answers come in another order than turns
        score = sum(letter in "aeiou" for letter in said) / 8
        return Step(said[:4] or "?", done=self.turns == 4, reward=score)
