"""OpenAI's Agents SDK over chat completions."""

import agents
import openai
from calculator_task import MAX_TURNS, calculator, reward

agents.set_tracing_disabled(True)


async def solve(row, base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        model = agents.OpenAIChatCompletionsModel("gpt-4o", client)
        agent = agents.Agent("solver", model=model, tools=[agents.function_tool(calculator)])
        question = row["prompt"][0]["content"]
        try:
            result = await agents.Runner.run(agent, question, max_turns=MAX_TURNS)
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):
            return 0.0
    return reward(result.final_output, row)
