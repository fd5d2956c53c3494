"""PPO with four models of the size of Qwen3-30B-A3B: TPU v5p:2x4x4.

31B parameters, 128 experts a layer, 8 for a token.
Policy and reference start from Qwen3-30B-A3B, critic and reward model from a one-label
classifier of the same size. Rows are prompts in verl's schema, without ground truth.

    python launch/train.py --config=configs/ppo_qwen3_30b_a3b.py --workdir=runs/ppo \
        --config.model.path=models/Qwen3-30B-A3B \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v5p:2x4x4:
32 x v5p (expert 32): 37.7 of 95.7 GiB a device, fits, 58.1 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen3-30B-A3B"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 1
    config.mesh.expert = 32
    config.mesh.tensor = 1
    config.critic.path = "models/Qwen3-30B-A3B-reward"
    config.critic.optimizer.learning_rate = 1e-5

    config.data.task = "files"
    config.data.train_files = ("data/train.parquet",)
    config.data.eval_files = ("data/eval.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 1024
    config.rollout.num_slots = 256
    config.rewards.models.preference = {"path": "models/Qwen3-30B-A3B-reward"}

    config.algorithm.recipe = "ppo"
    config.algorithm.kl_coef = 0.01
    config.algorithm.gae_lambda = 0.95
    config.algorithm.critic_warmup_steps = 5
    config.trainer.prompts_per_step = 1024
    config.trainer.num_steps = 500
    config.trainer.minibatch_size = 256
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 20
    config.evaluation.every = 50
    config.checkpoint.every = 50
    return config
