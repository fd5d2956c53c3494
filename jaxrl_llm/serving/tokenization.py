"""Request bodies of `/tokenize` and `/detokenize`, as vLLM's."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from jaxrl_llm.serving import fields
from jaxrl_llm.serving.chat import ChatBody
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.protocol import ServedModel, Tokens, check_tokens


class TokenizePrompt(Strict):
    """A text, as `/v1/completions` reads its prompt."""

    rules = fields.TOKENIZE
    model: str = ""  # "": the served one
    prompt: str
    add_special_tokens: bool | None = None  # default: true
    return_token_strs: bool | None = None

    def tokens(self, served: ServedModel) -> tuple[int, ...]:
        special = self.add_special_tokens is not False
        return tuple(served.tokenizer(self.prompt, add_special_tokens=special)["input_ids"])


class TokenizeChat(ChatBody):
    """A dialogue, as `/v1/chat/completions` reads it, with the same fields."""

    model: str = ""  # "": the served one
    return_token_strs: bool | None = None

    def tokens(self, served: ServedModel) -> tuple[int, ...]:
        return self.rendered_prompt(served).tokens


def _form(body: Any) -> str:
    is_chat = isinstance(body, TokenizeChat) or (isinstance(body, Mapping) and "messages" in body)
    return "chat form" if is_chat else "text form"


# The tags are no names of fields, which places of errors are searched for.
TokenizeBody = Annotated[
    Annotated[TokenizePrompt, Tag("text form")] | Annotated[TokenizeChat, Tag("chat form")],
    Discriminator(_form),
]


class DetokenizeBody(Strict):
    """Token ids to be decoded, special tokens included."""

    rules = fields.DETOKENIZE
    model: str = ""  # "": the served one
    tokens: Tokens

    def text(self, served: ServedModel) -> str:
        check_tokens(served, self.tokens, "tokens")
        # Without clean-up of spaces: tokenizing the text again is to give the same tokens.
        decoded = served.tokenizer.decode(self.tokens, clean_up_tokenization_spaces=False)
        return str(decoded)


def tokenize_reply(body: TokenizePrompt | TokenizeChat, served: ServedModel) -> dict[str, Any]:
    """The reply of `/tokenize`; raises `ApiError` for a dialogue that cannot be read."""
    tokens = list(body.tokens(served))
    strings = served.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    counts = {"count": len(tokens), "max_model_len": served.max_tokens}
    return {**counts, "tokens": tokens, "token_strs": strings}
