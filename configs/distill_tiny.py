"""On-policy distillation on sums of digits, without a reward: a random model of 0.4M parameters.

The teacher is a model folder, for example the export of a run of `configs/sft_tiny.py`
(docs/algorithms.md): `--config.distillation.teachers.sums.path=FOLDER`. The student begins with a
short warm start. Then it answers, and the teacher says how likely its tokens are. Held-out accuracy
is measured with answers sampled at temperature 1. It takes minutes on two CPU cores.
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

    config.warm_start.num_steps = 200
    config.warm_start.batch_size = 64
    config.warm_start.optimizer.learning_rate = 1e-3

    config.distillation.teachers.sums = {"path": "teacher"}
    config.distillation.loss = "forward_kl"
    config.distillation.top_k = 8

    config.algorithm.recipe = "grpo"
    config.algorithm.kl_in = "none"
    config.algorithm.samples_per_prompt = 4
    config.trainer.num_steps = 200
    config.trainer.prompts_per_step = 48
    config.trainer.minibatch_size = 64
    config.trainer.max_tokens_per_microbatch = 16_384
    config.trainer.optimizer.learning_rate = 1e-3
    config.trainer.optimizer.warmup_steps = 10
    config.trainer.optimizer.schedule = "cosine"
    config.trainer.optimizer.min_lr_ratio = 0.1
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.functions.answer = {"function": "arithmetic"}
    config.evaluation.every = 50
    config.evaluation.samples_per_prompt = 4
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 50
    return config
