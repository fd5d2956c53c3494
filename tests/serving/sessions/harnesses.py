"""Harnesses: what users might write, and what goes wrong with it. Run in processes of their own."""

import asyncio
import json
import os
import time
import urllib.error
import urllib.request

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def post(url, body):
    """The (status, body) of a reply."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(base_url, messages, **fields):
    body = {"model": "gpt-4o", "messages": messages, "tools": [ADD], **fields}
    status, reply = post(f"{base_url}/chat/completions", body)
    assert status == 200, reply
    return reply["choices"][0]["message"]


def by_urllib(row, base_url):
    """Two turns; the reward is the row's number."""
    messages = [*row["prompt"]]
    for _ in range(2):
        reply = chat(base_url, messages)
        messages.append(reply)
        for call in reply.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        messages.append({"role": "user", "content": "Go on."})
    return row["number"]


async def by_openai(row, base_url):
    """The client of OpenAI, from the environment alone, streamed; reward functions judge."""
    import openai

    async with openai.AsyncOpenAI() as client:
        assert str(client.base_url).rstrip("/") == base_url
        stream = await client.chat.completions.create(
            model="gpt-4o", messages=row["prompt"], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        completion = await client.completions.create(model="x", prompt=text, max_tokens=3)
    assert completion.usage.completion_tokens == 3


def by_messages(row, base_url):
    """Anthropic's API, with a parallel call."""
    address = os.environ["ANTHROPIC_BASE_URL"]
    body = {"model": "claude", "max_tokens": 50, "messages": row["prompt"]}
    status, reply = post(f"{address}/v1/messages", body)
    assert status == 200, reply
    messages = [*row["prompt"], {"role": "assistant", "content": reply["content"]}]
    messages.append({"role": "user", "content": "Go on."})
    status, _ = post(f"{address}/v1/messages", {**body, "messages": messages})
    return {"reward": status == 200}


def raises(row, base_url):
    chat(base_url, row["prompt"])
    raise ValueError("a defect of the agent")


def exits(row, base_url):
    os._exit(3)


def hangs(row, base_url):
    chat(base_url, row["prompt"])
    time.sleep(60)


def no_number(row, base_url):
    return "good"


def hostile(row, base_url):
    """Bad requests; the statuses are what the test expects."""
    url = f"{base_url}/chat/completions"
    good = {"model": "m", "messages": row["prompt"]}
    address, _, _ = base_url.rpartition("/session/")
    other = f"{address}/session/{'0' * 32}/v1/chat/completions"
    statuses = [
        post(url, b"{")[0],
        post(url, {**good, "messages": []})[0],
        post(url, {**good, "unknown_field": 1})[0],
        post(url, {**good, "messages": [{"role": "user", "content": "x" * 5000}]})[0],
        post(url, {**good, "temperature": -1})[0],
        post(other, good)[0],
        post(f"{address}/session/../../etc/passwd", good)[0],
        post(f"{address}/v1/chat/completions", good)[0],
        post(f"{base_url}/nothing", good)[0],
        post(f"{base_url}/completions", {"model": "m", "prompt": [999999]})[0],
    ]
    assert statuses == [400, 400, 400, 400, 400, 404, 404, 404, 404, 400], statuses
    accepted = [post(url, {**good, "max_tokens": 1})[0] for _ in range(9)]
    # The limit is 8 requests; those above were refused before they were requests.
    assert accepted == [200] * 8 + [400], accepted
    return 1.0


async def many_at_once(row, base_url):
    """Parallel requests; waits without blocking, so episodes may share a process."""
    loop = asyncio.get_running_loop()
    calls = [loop.run_in_executor(None, chat, base_url, row["prompt"]) for _ in range(3)]
    await asyncio.gather(*calls)
    return 1


def two_roles(row, base_url):
    """Two speakers with the same first prompt; the second one goes on, and others are refused."""
    from jaxrl_llm.agents.harness import role_address

    first, second = (role_address(base_url, role) for role in ("proposer", "solver"))
    messages = [*row["prompt"]]
    chat(first, messages)
    messages.append(chat(second, messages))
    messages.append({"role": "user", "content": "Go on."})
    chat(second, messages)
    body = {"model": "m", "messages": row["prompt"]}
    for address in (base_url, role_address(base_url, "judge")):
        status, error = post(f"{address}/chat/completions", body)
        assert status == 404 and "NAME one of proposer, solver" in error["error"]["message"]
    return {"reward": {"proposer": 0.25, "solver": row["number"]}}


def one_role_short(row, base_url):
    return {"reward": {"proposer": 1.0}}
