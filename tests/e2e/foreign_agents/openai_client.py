"""The client of OpenAI, in a loop of its own. The other agents have the same task and reward."""

import json

import openai
from calculator_task import MAX_TURNS, calculator, reward


async def solve(row, base_url):
    tool = {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        messages = [*row["prompt"]]
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(
                model="gpt-4o", messages=messages, tools=[tool]
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return reward(message.content, row)
            for call in message.tool_calls:
                result = calculator(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
