"""PPO with four models of the size of DeepSeek-V3: TPU v5p:8x8x16.

671B parameters, latent attention, 256 experts a layer, 8 for a token.
Policy and reference start from DeepSeek-V3, critic and reward model from a one-label
classifier of the same size. Rows are prompts in verl's schema, without ground truth.

    python launch/train.py --config=configs/ppo_deepseek_v3.py --workdir=runs/ppo \
        --config.model.path=models/DeepSeek-V3 \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v5p:8x8x16:
1024 x v5p (fsdp 16 x expert 64): 77.7 of 95.7 GiB a device, fits, 18.1 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/DeepSeek-V3"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 16
    config.mesh.expert = 64
    config.mesh.tensor = 1
    config.critic.path = "models/DeepSeek-V3-reward"
    config.critic.optimizer.learning_rate = 1e-5

    config.data.task = "files"
    config.data.train_files = ("data/train.parquet",)
    config.data.eval_files = ("data/eval.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 1024
    config.rollout.num_slots = 1024
    config.rewards.models.preference = {"path": "models/DeepSeek-V3-reward"}

    config.algorithm.recipe = "ppo"
    config.algorithm.kl_coef = 0.01
    config.algorithm.gae_lambda = 0.95
    config.algorithm.critic_warmup_steps = 5
    config.trainer.prompts_per_step = 1024
    config.trainer.num_steps = 500
    config.trainer.minibatch_size = 1024
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 20
    config.evaluation.every = 50
    config.checkpoint.every = 50
    return config
