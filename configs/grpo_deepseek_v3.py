"""GRPO of DeepSeek-V3 with verifiable answers: TPU v5p:8x8x8.

671B parameters, latent attention, 256 experts a layer, 8 for a token.
Policy and reference start from DeepSeek-V3; the `math` reward scores the answers.
Rows are prompts with ground truth in verl's schema.

    pip install -e '.[math]'
    python launch/train.py --config=configs/grpo_deepseek_v3.py --workdir=runs/grpo \
        --config.model.path=models/DeepSeek-V3 \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v5p:8x8x8:
512 x v5p (fsdp 8 x expert 64): 78.5 of 95.7 GiB a device, fits, 17.2 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/DeepSeek-V3"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 8
    config.mesh.expert = 64
    config.mesh.tensor = 1

    config.data.task = "files"
    config.data.train_files = ("data/train.parquet",)
    config.data.eval_files = ("data/eval.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 2048
    config.rollout.num_slots = 1024
    config.rewards.functions.math = {"function": "math"}

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "loss"
    config.algorithm.kl_coef = 0.001
    config.trainer.prompts_per_step = 256
    config.trainer.num_steps = 500
    config.trainer.minibatch_size = 512
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 20
    config.evaluation.every = 50
    config.checkpoint.every = 50
    return config
