"""A chat model with tools that a server says it has: what tests of its replies ask and get."""

import asyncio
import contextlib

import httpx2
import openai
import serving_model
from serving_engine import SayingEngine

from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import ServedModel

TEMPLATE = """{% for tool in tools or [] %}tool: {{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: \
{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
TOKENIZER = serving_model.byte_tokenizer(TEMPLATE)
EOS = TOKENIZER.eos_token_id
SERVED = ServedModel("m", TOKENIZER, (EOS,), len(TOKENIZER), max_tokens=2000, call_format="hermes")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "é"}}\n</tool_call>'
ASK = {"role": "user", "content": "What is 1 + 1?"}


def tokens(text):
    return [*TOKENIZER(text)["input_ids"], EOS]


def text_of(request):
    return TOKENIZER.decode(request.tokens)


@contextlib.asynccontextmanager
async def talking(*says, served=SERVED):
    """Gives an `openai` client of a server whose model says these things, and the engine."""
    engine = SayingEngine(*map(tokens, says), decode=TOKENIZER.decode)
    driver = Driver(engine, 0.0, max_waiting=8)
    app = make_app(served, driver, Metrics(driver))
    driver.start(call_soon=asyncio.get_running_loop().call_soon_threadsafe)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        try:
            yield (
                openai.AsyncOpenAI(
                    base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
                ),
                engine,
            )
        finally:
            driver.close()
