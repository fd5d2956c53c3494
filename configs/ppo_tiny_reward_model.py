"""PPO with a reward model that is trained first, on sums of digits: minutes on two CPU cores.

The run needs no files: a random policy of 0.4M parameters, a supervised warm start on examples half
of which have an error, a reward model trained on pairs of a correct and a wrong solution, then PPO
with the score of that model as the only reward. Only the evaluation checks the answers
(`val-core/arithmetic/mean@4`), so `metrics.jsonl` shows how good the reward model is. The sums have
four digits, not three as in the other tiny runs. So there are many different pairs, and the reward
model must learn to add. The wrong solutions have wrong additions or misread digits. A strong KL
penalty keeps the policy close to responses that the reward model can judge.
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
    config.data.arithmetic_terms = 4
    config.data.arithmetic_train_prompts = 4000
    config.data.arithmetic_errors = 0.5
    config.data.max_prompt_tokens = 32
    config.data.chat_template = False
    config.rollout.max_response_tokens = 40
    config.rewards.models.preference = {}
    config.evaluation.functions.answer = {"function": "arithmetic"}

    config.warm_start.num_steps = 400
    config.warm_start.batch_size = 64
    config.warm_start.optimizer.learning_rate = 1e-3
    config.preference.num_steps = 800
    config.preference.batch_size = 64
    config.preference.optimizer.learning_rate = 1e-3
    config.preference.optimizer.schedule = "cosine"

    config.algorithm.recipe = "ppo"
    config.algorithm.kl_coef = 0.5
    config.critic.optimizer.learning_rate = 1e-3
    config.trainer.num_steps = 60
    config.trainer.prompts_per_step = 256
    config.trainer.max_tokens_per_microbatch = 16_384
    config.trainer.minibatch_size = 128
    config.trainer.optimizer.learning_rate = 3e-4
    config.trainer.optimizer.warmup_steps = 10
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 10
    config.evaluation.samples_per_prompt = 4
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 20
    return config
