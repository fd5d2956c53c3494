"""The fields of a request body that constrain the text of a reply: OpenAI's and vLLM's."""

import json
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxrl_llm.rollout import structured_outputs
from jaxrl_llm.rollout.engine.grammars import GrammarError
from jaxrl_llm.sampling.reply_grammars import Constraint
from jaxrl_llm.serving import fields
from jaxrl_llm.serving.fields import Strict

Choices = Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)]
Schema = dict[str, Any] | bool
_ANY_OBJECT = {"type": "object"}


with warnings.catch_warnings():
    # The clients' names are those of methods that pydantic has deprecated.
    warnings.filterwarnings("ignore", "Field name .* shadows an attribute")

    class ResponseSchema(Strict):
        """`response_format.json_schema`."""

        rules = fields.RESPONSE_SCHEMA
        schema: Schema  # type: ignore[assignment]

    class StructuredOutputsField(Strict):
        """`structured_outputs` of vLLM: exactly one of its constraints."""

        rules = fields.STRUCTURED_OUTPUTS
        json: str | Schema | None = None  # type: ignore[assignment]
        regex: str | None = None
        choice: Choices | None = None
        grammar: str | None = None
        json_object: bool | None = None
        whitespace_pattern: str | None = None


class ResponseFormat(Strict):
    """`response_format`: text, any JSON object, or JSON that is valid by a schema."""

    rules = fields.RESPONSE_FORMAT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ResponseSchema | None = None

    @pydantic.model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type 'json_schema', and to each of them")
        return self


class ConstrainedBody(Strict):
    """The constraints of a body, which has at most one: its `response_format`, or vLLM's."""

    # vLLM's; those with `guided_` are its names before 0.11.
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @pydantic.model_validator(mode="after")
    def _check_constraints(self) -> "ConstrainedBody":
        settings = [setting for setting, *_ in self._constraints()]
        if len(settings) > 1:
            message = f"{settings[0]} and {settings[1]} both constrain the reply"
            raise ValueError(f"{message}; send one of them")
        if self.structured_outputs and not settings:
            names = "json, regex, choice, grammar or json_object"
            raise ValueError(f"structured_outputs has no constraint; give {names}")
        return self

    def _constraints(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yields (field, kind of constraint, value, pattern of white space)."""
        response_format: ResponseFormat | None = getattr(self, "response_format", None)
        if response_format and response_format.type == "json_object":
            yield "response_format", "json", _ANY_OBJECT, ""
        if response_format and response_format.json_schema:
            yield "response_format", "json", response_format.json_schema.schema, ""
        groups = [("guided_", self)]
        if self.structured_outputs:
            groups.append(("structured_outputs.", self.structured_outputs))  # type: ignore
        for prefix, group in groups:
            attribute = prefix if group is self else ""
            space = getattr(group, f"{attribute}whitespace_pattern") or ""
            for kind in ("json", "regex", "choice", "grammar"):
                if (value := getattr(group, attribute + kind)) is not None:
                    yield prefix + kind, kind, value, space
        if self.structured_outputs and self.structured_outputs.json_object:
            yield "structured_outputs.json_object", "json", _ANY_OBJECT, ""

    def constraint(self) -> Constraint | None:
        """The constraint of the reply; None: any text. Raises `GrammarError`."""
        for setting, kind, value, space in self._constraints():
            match kind:
                case "json":
                    schema = _schema(value, setting) if isinstance(value, str) else value
                    return Constraint(structured_outputs.json_part(schema, space), setting)
                case "regex":
                    return Constraint(structured_outputs.regex_part(value), setting)
                case "choice":
                    return Constraint(structured_outputs.choice_part(value), setting)
                case "grammar":
                    return Constraint(structured_outputs.lark_part(value, setting), setting)
        return None


def _schema(text: str, setting: str) -> Any:
    """A JSON schema that was sent as text."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{setting}: is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{setting}: a JSON schema is an object, got {text[:100]!r}")
    return schema
