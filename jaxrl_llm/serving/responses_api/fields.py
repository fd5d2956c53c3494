"""The field tables of OpenAI's Responses API; see `fields`."""

from collections.abc import Mapping

from jaxrl_llm.serving.fields import BOTH, IGNORED, REFUSED, USED, Rule, refused_except

PATH = "/v1/responses"

# Fields of chats that have another name or place here.
_RENAMED = (
    *("max_tokens", "logprobs", "response_format", "echo", "suffix", "structural_tag"),
    "truncate_prompt_tokens",
)

RESPONSES: Mapping[str, Rule] = {
    **{name: rule for name, rule in BOTH.items() if name not in _RENAMED},
    "input": USED,
    "instructions": USED,
    "previous_response_id": USED,
    "store": USED,
    "metadata": USED,
    "include": USED,
    "max_output_tokens": USED,
    "top_logprobs": USED,
    "tools": USED,
    "tool_choice": USED,
    "parallel_tool_calls": USED,
    "reasoning": USED,
    "text": USED,
    "max_tool_calls": IGNORED,  # of tools that run on the server, of which there are none
    "access_programs": IGNORED,
    "image": IGNORED,
    "truncation": refused_except("disabled"),
    "background": refused_except(False),
    "context_management": refused_except([]),
    "conversation": REFUSED,
    "prompt": REFUSED,
    "moderation": REFUSED,
    # vLLM's.
    "prompt_logprobs": REFUSED,
    "chat_template_kwargs": USED,
    "previous_input_messages": REFUSED,
    "enable_response_messages": refused_except(False),
    "mm_processor_kwargs": refused_except({}),
}
# An input item, of any type. The server makes ids, and no item is half done.
ITEM: Mapping[str, Rule] = {
    "type": USED,
    "id": USED,
    "role": USED,
    "content": USED,
    "call_id": USED,
    "name": USED,
    "arguments": USED,
    "output": USED,
    "summary": USED,
    "status": IGNORED,
    "phase": IGNORED,
    "caller": IGNORED,
    "namespace": REFUSED,
    "async": refused_except(False),
    "encrypted_content": refused_except(""),
}
ITEM_PART: Mapping[str, Rule] = {
    "type": USED,
    "text": USED,
    "image_url": USED,
    "detail": IGNORED,
    "annotations": IGNORED,
    "logprobs": IGNORED,
    "prompt_cache_breakpoint": IGNORED,
    "file_id": REFUSED,
    "refusal": REFUSED,
}
RESPONSE_TOOL: Mapping[str, Rule] = {
    "type": USED,
    "name": USED,
    "description": USED,
    "parameters": USED,
    "strict": USED,
    "output_schema": IGNORED,
    "defer_loading": refused_except(False),
    "allowed_callers": refused_except(["direct"]),
    "async": refused_except(False),
}
RESPONSE_TOOL_CHOICE: Mapping[str, Rule] = {
    "type": USED,
    "name": USED,
    "mode": REFUSED,
    "tools": REFUSED,
}
REASONING: Mapping[str, Rule] = {
    "effort": USED,
    "summary": IGNORED,  # the thinking itself is in the reply
    "generate_summary": IGNORED,
    "context": IGNORED,  # the chat template decides which thinking it shows
    "mode": refused_except("standard"),
}
TEXT: Mapping[str, Rule] = {"format": USED, "verbosity": USED}

PLACES: Mapping[str, Mapping[str, Rule]] = {
    PATH: RESPONSES,
    f"{PATH} input": ITEM,
    f"{PATH} input.content": ITEM_PART,
    f"{PATH} tools": RESPONSE_TOOL,
    f"{PATH} tool_choice": RESPONSE_TOOL_CHOICE,
    f"{PATH} reasoning": REASONING,
    f"{PATH} text": TEXT,
}
