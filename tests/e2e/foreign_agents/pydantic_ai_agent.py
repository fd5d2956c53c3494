"""An agent of pydantic-ai."""

import pydantic_ai
from calculator_task import MAX_TURNS, calculator, reward
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def solve(row, base_url):
    provider = OpenAIProvider(base_url=base_url, api_key="any")
    agent = pydantic_ai.Agent(OpenAIChatModel("gpt-4o", provider=provider), tools=[calculator])
    limits = pydantic_ai.UsageLimits(request_limit=MAX_TURNS)
    try:
        result = await agent.run(row["prompt"][0]["content"], usage_limits=limits)
    except (pydantic_ai.UsageLimitExceeded, pydantic_ai.UnexpectedModelBehavior):
        return 0.0
    return reward(result.output, row)
