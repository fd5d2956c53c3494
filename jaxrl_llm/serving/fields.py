"""Every field that clients of OpenAI's API and of vLLM send, and what this server does with it.

`docs/serving.md` shows this table; a test walks the types of the `openai` package and asks that no
field is missing. Where a field is used, the models of `protocol` and `chat` hold its type.
"""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported_parameter"  # the code of the error, as OpenAI's


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the server treats a request field.

    "used"; "ignored": any value is accepted, because it cannot change the answer; "refused": null
    and the values in `neutral`, which ask for nothing, are accepted, and others are status 400.
    """

    kind: Literal["used", "ignored", "refused"]
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether the value has no effect; 0 equals 0.0 and 1 equals 1.0, but not a boolean."""
        return self.kind == "ignored" or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.neutral
        )


USED, IGNORED, REFUSED = Rule("used"), Rule("ignored"), Rule("refused")


def refused_except(*neutral: Any) -> Rule:
    """A field of which only these values, and null, are accepted."""
    return Rule("refused", neutral)


BOTH: Mapping[str, Rule] = {
    # OpenAI's.
    "model": USED,
    "n": USED,
    "temperature": USED,
    "top_p": USED,
    "stop": USED,
    "seed": USED,
    "stream": USED,
    "stream_options": USED,
    "max_tokens": USED,
    "logprobs": USED,
    "user": IGNORED,
    "metadata": IGNORED,
    "store": IGNORED,
    "service_tier": IGNORED,
    "safety_identifier": IGNORED,
    "prompt_cache_key": IGNORED,
    "prompt_cache_options": IGNORED,
    "prompt_cache_retention": IGNORED,
    "frequency_penalty": USED,
    "presence_penalty": USED,
    "logit_bias": USED,
    "response_format": USED,
    # vLLM's.
    "top_k": USED,
    "min_p": USED,
    "stop_token_ids": USED,
    "ignore_eos": USED,
    "request_id": IGNORED,
    "priority": IGNORED,
    "cache_salt": IGNORED,
    "spaces_between_special_tokens": IGNORED,  # special tokens are left out
    "guided_decoding_backend": IGNORED,
    "repetition_penalty": USED,
    "length_penalty": refused_except(1),
    "use_beam_search": refused_except(False),
    "early_stopping": refused_except(False),
    "min_tokens": USED,
    "skip_special_tokens": refused_except(True),
    "include_stop_str_in_output": refused_except(False),
    "detokenize": refused_except(True),
    "bad_words": USED,
    "logits_processors": refused_except([]),
    "allowed_token_ids": REFUSED,
    "truncate_prompt_tokens": REFUSED,
    "prompt_logprobs": USED,
    "return_token_ids": USED,
    "return_tokens_as_token_ids": USED,
    "kv_transfer_params": refused_except({}),
    "vllm_xargs": refused_except({}),
    "structured_outputs": USED,
    "structural_tag": REFUSED,
    "guided_json": USED,
    "guided_regex": USED,
    "guided_choice": USED,
    "guided_grammar": USED,
    "guided_whitespace_pattern": USED,
    "thinking_token_budget": REFUSED,
    "repetition_detection": REFUSED,
}

CHAT: Mapping[str, Rule] = {
    **BOTH,
    "messages": USED,
    "max_completion_tokens": USED,
    "top_logprobs": USED,
    "tools": USED,
    "tool_choice": USED,
    "parallel_tool_calls": USED,
    "reasoning_effort": USED,
    "verbosity": USED,
    "prediction": IGNORED,  # it makes a reply faster, not another
    "modalities": refused_except(["text"]),
    "functions": refused_except([]),
    "function_call": refused_except("none", "auto"),
    "audio": REFUSED,
    "moderation": REFUSED,
    "web_search_options": REFUSED,
    # vLLM's.
    "chat_template_kwargs": USED,
    "chat_template": REFUSED,
    "add_generation_prompt": refused_except(True),
    "echo": refused_except(False),
    "continue_final_message": refused_except(False),
    "add_special_tokens": refused_except(False),
    "include_reasoning": USED,
    "documents": refused_except([]),
    "mm_processor_kwargs": refused_except({}),
}

COMPLETION: Mapping[str, Rule] = {
    **BOTH,
    "prompt": USED,
    "best_of": USED,
    "echo": USED,
    "suffix": refused_except(""),
    "prompt_embeds": REFUSED,
    "add_special_tokens": refused_except(True),
    # Chats'; what asks for nothing there asks for nothing here.
    "tools": refused_except([]),
    "tool_choice": refused_except("none", "auto"),
    "parallel_tool_calls": IGNORED,
    "functions": refused_except([]),
    "function_call": refused_except("none", "auto"),
    "modalities": refused_except(["text"]),
}

# With `messages`, `/tokenize` has the fields of a chat.
TOKENIZE: Mapping[str, Rule] = {
    "model": USED,
    "prompt": USED,
    "add_special_tokens": USED,
    "return_token_strs": USED,
    "mm_processor_kwargs": refused_except({}),
}
DETOKENIZE: Mapping[str, Rule] = {"model": USED, "tokens": USED}

RESPONSE_FORMAT: Mapping[str, Rule] = {"type": USED, "json_schema": USED}
RESPONSE_SCHEMA: Mapping[str, Rule] = {
    "name": IGNORED,
    "description": IGNORED,  # the client shows the model what it wants
    "schema": USED,
    "strict": IGNORED,  # a schema is followed in either case
}
STRUCTURED_OUTPUTS: Mapping[str, Rule] = {
    "json": USED,
    "regex": USED,
    "choice": USED,
    "grammar": USED,
    "json_object": USED,
    "whitespace_pattern": USED,
    "structural_tag": REFUSED,
    "disable_fallback": IGNORED,  # there is none
    "disable_any_whitespace": refused_except(False),
    "disable_additional_properties": refused_except(False),
    "backend": IGNORED,
}

STREAM_OPTIONS: Mapping[str, Rule] = {
    "include_usage": USED,
    "continuous_usage_stats": USED,  # vLLM's
    "include_obfuscation": IGNORED,  # nothing is added to a chunk either way
}

# Notes of clients about what is cached, and what other servers wrote into a message.
_CACHED: Mapping[str, Rule] = {"cache_control": IGNORED, "prompt_cache_breakpoint": IGNORED}

# Of every role.
MESSAGE: Mapping[str, Rule] = {
    **_CACHED,
    "role": USED,
    "content": USED,
    "name": USED,
    "tool_calls": USED,
    "tool_call_id": USED,
    "reasoning_content": USED,
    "reasoning": USED,
    "annotations": IGNORED,
    "provider_specific_fields": IGNORED,
    "refusal": refused_except(""),
    "audio": REFUSED,
    "function_call": REFUSED,
}
TOOL_CALL: Mapping[str, Rule] = {
    **_CACHED,
    "id": USED,
    "type": USED,
    "function": USED,
    "index": IGNORED,
    "provider_specific_fields": IGNORED,
    "custom": REFUSED,
}
CALLED_FUNCTION: Mapping[str, Rule] = {"name": USED, "arguments": USED}

# A part of a message's content.
PART: Mapping[str, Rule] = {
    **_CACHED,
    "type": USED,
    "text": USED,
    "image_url": USED,
    "uuid": IGNORED,
    "annotations": IGNORED,
    "refusal": REFUSED,
    "input_audio": REFUSED,
    "file": REFUSED,
}
IMAGE_URL: Mapping[str, Rule] = {"url": USED, "detail": IGNORED}

TOOL: Mapping[str, Rule] = {**_CACHED, "type": USED, "function": USED, "custom": REFUSED}
FUNCTION: Mapping[str, Rule] = {
    **_CACHED,
    "name": USED,
    "description": USED,
    "parameters": USED,
    "strict": USED,
}
TOOL_CHOICE: Mapping[str, Rule] = {
    "type": USED,
    "function": USED,
    "custom": REFUSED,
    "allowed_tools": REFUSED,
}
CHOSEN_FUNCTION: Mapping[str, Rule] = {"name": USED}

# Anthropic's Messages API.
MESSAGES: Mapping[str, Rule] = {
    "model": USED,
    "messages": USED,
    "system": USED,
    "max_tokens": USED,
    "stop_sequences": USED,
    "stream": USED,
    "temperature": USED,
    "top_p": USED,
    "top_k": USED,
    "tools": USED,
    "tool_choice": USED,
    "thinking": USED,
    "output_config": USED,
    "metadata": IGNORED,
    "service_tier": IGNORED,
    "cache_control": IGNORED,
    "speed": IGNORED,
    "inference_geo": IGNORED,
    "user_profile_id": IGNORED,
    "workspace_id": IGNORED,
    "diagnostics": IGNORED,
    "container": REFUSED,
    "context_management": refused_except({}),
    "mcp_servers": refused_except([]),
    "output_format": REFUSED,
}
API_MESSAGE: Mapping[str, Rule] = {"role": USED, "content": USED}
BLOCK: Mapping[str, Rule] = {
    "type": USED,
    "text": USED,
    "source": USED,
    "thinking": USED,
    "id": USED,
    "name": USED,
    "input": USED,
    "tool_use_id": USED,
    "content": USED,
    "cache_control": IGNORED,
    "signature": IGNORED,  # replies have an empty one
    "is_error": IGNORED,  # chat templates show a result, which says so itself
    "caller": IGNORED,
    "citations": refused_except([]),
    "toolset_name": REFUSED,
    "transformations": refused_except([]),
}
BLOCK_SOURCE: Mapping[str, Rule] = {"type": USED, "media_type": USED, "data": USED}
API_TOOL: Mapping[str, Rule] = {
    "type": USED,
    "name": USED,
    "description": USED,
    "input_schema": USED,
    "cache_control": IGNORED,
    "strict": USED,
    "input_examples": IGNORED,
    "eager_input_streaming": IGNORED,
    "defer_loading": refused_except(False),
    "allowed_callers": refused_except(["direct"]),
}
API_TOOL_CHOICE: Mapping[str, Rule] = {
    "type": USED,
    "name": USED,
    "disable_parallel_tool_use": USED,
}
THINKING: Mapping[str, Rule] = {
    "type": USED,
    "display": USED,
    "budget_tokens": IGNORED,  # only `max_tokens` ends thinking
}
OUTPUT_CONFIG: Mapping[str, Rule] = {"effort": USED, "format": USED}
OUTPUT_FORMAT: Mapping[str, Rule] = {"type": USED, "schema": USED}

# The tables by the place of their fields in a body.
PLACES: Mapping[str, Mapping[str, Rule]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    "response_format.json_schema": RESPONSE_SCHEMA,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "messages": MESSAGE,
    "messages.tool_calls": TOOL_CALL,
    "messages.tool_calls.function": CALLED_FUNCTION,
    "messages.content": PART,
    "messages.content.image_url": IMAGE_URL,
    "tools": TOOL,
    "tools.function": FUNCTION,
    "tool_choice": TOOL_CHOICE,
    "tool_choice.function": CHOSEN_FUNCTION,
    "/v1/messages": MESSAGES,
    "/v1/messages messages": API_MESSAGE,
    "/v1/messages messages.content": BLOCK,
    "/v1/messages messages.content.source": BLOCK_SOURCE,
    "/v1/messages tools": API_TOOL,
    "/v1/messages tool_choice": API_TOOL_CHOICE,
    "/v1/messages thinking": THINKING,
    "/v1/messages output_config": OUTPUT_CONFIG,
    "/v1/messages output_config.format": OUTPUT_FORMAT,
}


class Strict(pydantic.BaseModel):
    """Fields of exactly their types; of others, only values that ask for nothing.

    A null asks for nothing in every field, also in one that nobody knows: clients write all fields
    of their own types.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    rules: ClassVar[Mapping[str, Rule]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        """Drops fields that ask for nothing; refuses those that ask for what is not supported."""
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if field := cls.model_fields.get(name):
                if value is not None or field.is_required():
                    kept[name] = value
            elif value is None:
                continue
            elif (rule := cls.rules.get(name)) is None:
                kept[name] = value  # refused as unknown, with its place
            elif not rule.accepts(value):
                message = "{name}={value} is not supported by this server; leave it out"
                shown = {"name": name, "value": reprlib.repr(value)}
                raise PydanticCustomError(UNSUPPORTED, message, shown)
        return kept
