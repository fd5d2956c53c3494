"""GRPO of Qwen3-30B-A3B with verifiable answers: TPU v5p:2x2x4.

31B parameters, 128 experts a layer, 8 for a token.
Policy and reference start from Qwen3-30B-A3B; the `math` reward scores the answers.
Rows are prompts with ground truth in verl's schema.

    pip install -e '.[math]'
    python launch/train.py --config=configs/grpo_qwen3_30b_a3b.py --workdir=runs/grpo \
        --config.model.path=models/Qwen3-30B-A3B \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v5p:2x2x4:
16 x v5p (expert 16): 41.5 of 95.7 GiB a device, fits, 54.2 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen3-30B-A3B"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 1
    config.mesh.expert = 16
    config.mesh.tensor = 1

    config.data.task = "files"
    config.data.train_files = ("data/train.parquet",)
    config.data.eval_files = ("data/eval.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 2048
    config.rollout.num_slots = 256
    config.rewards.functions.math = {"function": "math"}

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "loss"
    config.algorithm.kl_coef = 0.001
    config.trainer.prompts_per_step = 128
    config.trainer.num_steps = 500
    config.trainer.minibatch_size = 256
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 20
    config.evaluation.every = 50
    config.checkpoint.every = 50
    return config
