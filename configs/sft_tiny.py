"""Supervised fine-tuning on sums of digits: a random model of 0.4M parameters, two CPU cores.

The run needs no files and takes minutes. Worked examples are the rows; held-out sums are answered
at temperature 1 and checked (`val-core/arithmetic/mean@4`).
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("sft")
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
    config.data.max_prompt_tokens = 32
    config.data.chat_template = False
    config.rollout.max_response_tokens = 32

    config.trainer.num_steps = 600
    config.trainer.batch_size = 64
    config.trainer.max_sequence_tokens = 64
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-3
    config.trainer.optimizer.schedule = "cosine"
    config.evaluation.functions.answer = {"function": "arithmetic"}
    config.evaluation.every = 100
    config.evaluation.samples_per_prompt = 4
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 100
    return config
