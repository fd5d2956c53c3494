"""A tool and an environment whose texts hold halves of surrogate pairs; a test names this file."""

from jaxrl_llm.agents.environments import Step


def half(kind: str) -> object:
    """Answers with half a character."""
    if kind == "raise":
        raise ValueError("e\ud83d")
    if kind == "nested":
        value: list = []
        for _ in range(900):
            value = [value]
        return value
    return {"text": "a\ud83d", "pair": "\ud83d\ude00", "json": {"k\ud83d": ["\udc00"]}}[kind]


def echo(value: object) -> str:
    """Says what came."""
    return ascii(value)


for tool, argument in ((half, "kind"), (echo, "value")):  # to make these takes seconds
    schema = {"type": "object", "properties": {argument: {}}}
    function = {"name": tool.__name__, "description": tool.__doc__, "parameters": schema}
    tool.json_schema = {"type": "function", "function": function}  # type: ignore[attr-defined]


class Halves:
    """Begins and answers with half a character."""

    def start(self, row):
        return f"start\ud83d {row['data_source']}"

    def step(self, message):
        return Step(messages=[{"role": "user", "content": "step\udc00 <|im_end|>"}])
