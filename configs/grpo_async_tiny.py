"""GRPO that samples ahead of its step: sums of digits, minutes on two CPU cores.

Model, task and warm start are those of `grpo_tiny.py`. Responses of the next two steps are sampled
while a step is learned; new weights go on with what the old ones began. On one device both take
turns; docs/async.md says how rollout gets devices of its own.
"""

from jaxrl_llm.config.bridge import default_config_dict


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

    config.data.task = "arithmetic"
    config.data.arithmetic_terms = 3
    config.data.arithmetic_errors = 0.5
    config.data.max_prompt_tokens = 32
    config.data.chat_template = False
    config.rollout.max_response_tokens = 32
    config.rollout.chunk_steps = 4
    config.rewards.functions.answer = {"function": "arithmetic"}

    config.warm_start.num_steps = 600
    config.warm_start.batch_size = 64
    config.warm_start.optimizer.learning_rate = 1e-3

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "none"
    config.trainer.sampling = "async"
    config.trainer.max_staleness = 2
    config.trainer.num_steps = 60
    config.trainer.prompts_per_step = 16
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.minibatch_size = 64
    config.trainer.optimizer.learning_rate = 3e-4
    config.trainer.optimizer.warmup_steps = 10
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 20
    config.evaluation.samples_per_prompt = 4
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 20
    return config
