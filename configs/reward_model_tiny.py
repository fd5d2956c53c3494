"""A reward model on sums of digits: a random model of 0.4M parameters, two CPU cores.

The run needs no files and takes minutes. Of each pair one solution is right; the other has a wrong
addition or a misread digit. `val/reward_model/accuracy` is the share of held-out pairs in which
the right one scores higher.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("reward_model")
    config.model.family = "qwen2"
    config.model.hidden_size = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_size = 32
    config.model.mlp_size = 384
    config.model.remat = "none"

    config.data.task = "arithmetic"
    config.data.arithmetic_terms = 4
    config.data.arithmetic_train_prompts = 4000
    config.data.max_prompt_tokens = 32
    config.data.chat_template = False

    config.trainer.num_steps = 800
    config.trainer.batch_size = 64
    config.trainer.max_sequence_tokens = 96
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.optimizer.learning_rate = 1e-3
    config.trainer.optimizer.schedule = "cosine"
    config.evaluation.every = 200
    config.checkpoint.every = 200
    return config
