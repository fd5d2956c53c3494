"""GRPO of a black-box agent: a random model of 0.4M parameters, minutes on two CPU cores.

The task and the sizes are those of `agent_calculator_tiny`, but the agent is a function, `solve`,
that keeps the dialogue and calls the tool itself. It could use a client of OpenAI or Anthropic, or
a framework for agents, or be a command in another language: the run serves the policy to it, at an
address for each episode, and learns from what it sampled. The run needs no files.
"""

import json
import urllib.request

from jaxrl_llm.config.bridge import default_config_dict

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes the value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def solve(row, base_url):
    """Plays an episode: lets the policy call the calculator, then compares its answer."""
    from jaxrl_llm.agents.builtin_tools import calculator

    messages = list(row["prompt"])
    for _ in range(3):
        body = {"model": "policy", "messages": messages, "tools": [CALCULATOR]}
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            message = json.load(reply)["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            try:
                result = calculator(**json.loads(call["function"]["arguments"]))
            except Exception as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return float((messages[-1]["content"] or "").strip() == f"#{row['ground_truth']}")


def get_config():
    config = default_config_dict()
    config.model.family = "qwen2"
    config.model.hidden_size = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_size = 32
    config.model.mlp_size = 384
    config.model.remat = "none"

    # What the template writes around the numbers of a call, a token each.
    config.model.words = ("calculator", "expression", '{"name": "', '", "parameters": {"')
    config.model.words += ('": "', '"}}')

    config.data.task = "products"
    config.data.arithmetic_train_prompts = 7000
    config.data.arithmetic_errors = 0.8
    config.data.max_prompt_tokens = 24
    config.rollout.max_response_tokens = 48
    config.agent.harness = f"{__file__}:solve"

    # Copying begins after some 200 steps, of whatever size; that of numbers of three digits later.
    config.warm_start.num_steps = 3500
    config.warm_start.batch_size = 16
    config.warm_start.save_every = 1000
    config.warm_start.optimizer.learning_rate = 2e-3
    config.warm_start.optimizer.schedule = "cosine"

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "none"
    config.trainer.num_steps = 40
    config.trainer.prompts_per_step = 16
    config.trainer.minibatch_size = 64
    config.trainer.optimizer.learning_rate = 3e-4
    config.trainer.optimizer.warmup_steps = 5
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 10
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 20
    return config
