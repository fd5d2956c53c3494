"""GRPO with a calculator: a random model of 0.4M parameters, minutes on two CPU cores.

The questions are products of two numbers of two digits, which so small a model cannot compute. The
warm start teaches it to copy numbers into a call and out of the answer, but most of its examples
guess, or call with a term too many. RL finds out what pays. The run needs no files.
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

    # What the template writes around the numbers of a call, a token each.
    config.model.words = ("calculator", "expression", '{"name": "', '", "parameters": {"')
    config.model.words += ('": "', '"}}')

    config.data.task = "products"
    config.data.arithmetic_train_prompts = 7000
    config.data.arithmetic_errors = 0.8
    config.data.max_prompt_tokens = 24
    config.rollout.max_response_tokens = 48
    config.agent.tools = ("calculator",)
    config.agent.max_turns = 3
    config.rewards.functions.answer = {"function": "arithmetic"}

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
