"""PPO against a reward model trained first, on sums of digits: minutes on two CPU cores.

The run carries everything with it: a random policy of 0.4M parameters, a supervised warm start
that stops too early, a reward model trained on pairs of a right and a wrong worked sum, then PPO
on that model's score alone. The reward model never sees the check of the answer; the evaluation
does (`val-core/arithmetic/mean@1`), so that `metrics.jsonl` shows what the score is worth.
"""

from jaxrl_llm.config_bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.family = "qwen2"
    config.model.hidden_size = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_size = 32
    config.model.mlp_size = 384

    config.data.task = "arithmetic"
    config.data.arithmetic_terms = 3
    config.data.max_prompt_tokens = 32
    config.data.chat_template = False
    config.rollout.max_response_tokens = 32
    config.rewards.models.preference = {}
    config.evaluation.functions.answer = {"function": "arithmetic"}

    config.warm_start.num_steps = 150
    config.warm_start.batch_size = 64
    config.warm_start.optimizer.learning_rate = 1e-3
    config.preference.num_steps = 300
    config.preference.batch_size = 64
    config.preference.optimizer.learning_rate = 1e-3

    config.algorithm.recipe = "ppo"
    config.algorithm.samples_per_prompt = 8
    config.trainer.num_steps = 60
    config.trainer.prompts_per_step = 32
    config.trainer.minibatch_size = 128
    config.trainer.optimizer.learning_rate = 3e-4
    config.trainer.optimizer.weight_decay = 0.0
    config.critic.optimizer.learning_rate = 3e-4
    config.evaluation.every = 10
    config.checkpoint.every = 20
    return config
