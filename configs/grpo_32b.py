"""GRPO of a 32B model with verifiable answers: TPU v5p:2x2x4.

Policy and reference start from Qwen2.5-32B-Instruct; the `math` reward scores the
answers. Rows are prompts with ground truth in verl's schema.

    pip install -e '.[math]'
    python launch/train.py --config=configs/grpo_32b.py --workdir=runs/grpo_32b \
        --config.model.path=models/Qwen2.5-32B-Instruct \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v5p:2x2x4:
16 x v5p (fsdp 8 x tensor 2): 69.6 of 95.7 GiB a device, fits, 26.1 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen2.5-32B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 8
    config.mesh.tensor = 2

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
