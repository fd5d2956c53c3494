"""Shows the examples of docstrings as code: their output holds brackets that are no links."""

import re

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts each example of a docstring into a block of code."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(example: re.Match[str]) -> str:
    return f"{example[1]}```pycon\n{example[0]}\n{example[1]}```"
