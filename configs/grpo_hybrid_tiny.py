"""GRPO on sums of digits with a hybrid model: gated delta nets, attention in every fourth layer.

For two CPU cores. The run needs no files. It has a character tokenizer and a seeded task. A
supervised warm start uses worked examples, half of which have an error. Then RL removes these
errors. Held-out accuracy is measured with answers sampled at temperature 1.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.family = "qwen3_5_text"
    config.model.hidden_size = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_size = 32
    config.model.mlp_size = 384
    config.model.remat = "none"

    config.data.task = "arithmetic"
    config.data.arithmetic_terms = 3
    config.data.arithmetic_errors = 0.5
    config.data.max_prompt_tokens = 32
    config.data.chat_template = False
    config.rollout.max_response_tokens = 32
    config.rewards.functions.answer = {"function": "arithmetic"}

    config.warm_start.num_steps = 600
    config.warm_start.batch_size = 64
    config.warm_start.optimizer.learning_rate = 1e-3

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_coef = 0.001
    config.trainer.num_steps = 100
    config.trainer.prompts_per_step = 32
    config.trainer.max_tokens_per_microbatch = 16_384
    config.trainer.minibatch_size = 128
    config.trainer.optimizer.learning_rate = 3e-4
    config.trainer.optimizer.warmup_steps = 10
    config.trainer.optimizer.schedule = "cosine"
    config.trainer.optimizer.min_lr_ratio = 0.1
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 20
    config.evaluation.samples_per_prompt = 4
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 20
    return config
