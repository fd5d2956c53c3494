"""PPO with four models of 70B parameters: TPU v5p:4x4x4.

Policy and reference start from Llama-3.1-70B-Instruct, critic and reward model from a
one-label classifier of the same size. Rows are prompts in verl's schema, without ground truth.

    python launch/train.py --config=configs/ppo_70b.py --workdir=runs/ppo_70b \
        --config.model.path=models/Llama-3.1-70B-Instruct \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v5p:4x4x4:
64 x v5p (fsdp 16 x tensor 4): 68.0 of 95.7 GiB a device, fits, 27.7 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Llama-3.1-70B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 16
    config.mesh.tensor = 4
    config.critic.path = "models/Llama-3.1-70B-reward"
    config.critic.optimizer.learning_rate = 1e-5

    config.data.task = "files"
    config.data.train_files = ("data/train.parquet",)
    config.data.eval_files = ("data/eval.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 1024
    config.rollout.num_slots = 256
    config.rewards.models.preference = {"path": "models/Llama-3.1-70B-reward"}

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
