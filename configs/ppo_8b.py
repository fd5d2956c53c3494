"""PPO with four models of 8B parameters: 8 devices of 80 GB or more, FSDP over all of them.

Policy, reference, critic and reward model are Llama-3.1-8B (Qwen3-8B works the same way): the
reference begins as the policy, the critic as the reward model, which is a one-label classifier
in a Hugging Face folder. Rows are prompts in verl's schema; no ground truth is needed.

    python launch/train.py --config=configs/ppo_8b.py --workdir=runs/ppo_8b \
        --config.model.path=models/Llama-3.1-8B-Instruct \
        --config.critic.path=models/Llama-3.1-8B-reward \
        --config.rewards.models.preference.path=models/Llama-3.1-8B-reward \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are kept in float32, computed with in bfloat16. Memory for each device, in
GB: 4 for a policy or critic in float32, 8 for its moments and 4 for its gradient while it learns;
4 each for reference and reward model; 16 for the rollout copy in bfloat16 (2 with
`--config.mesh.rollout=train`), and the rest for activations and the cache.
"""

from jaxrl_llm.config_bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Llama-3.1-8B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.critic.path = "models/Llama-3.1-8B-reward"
    config.critic.optimizer.learning_rate = 1e-5
    config.mesh.fsdp = 8

    config.data.task = "files"
    config.data.train_files = ("data/train.parquet",)
    config.data.eval_files = ("data/eval.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 1024
    config.rewards.models.preference = {"path": "models/Llama-3.1-8B-reward"}

    config.algorithm.recipe = "ppo"
    config.algorithm.kl_coef = 0.01
    config.algorithm.gae_lambda = 0.95
    config.algorithm.critic_warmup_steps = 5
    config.trainer.num_steps = 500
    config.trainer.prompts_per_step = 1024
    config.trainer.minibatch_size = 256
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 20
    config.evaluation.every = 50
    config.checkpoint.every = 50
    return config
