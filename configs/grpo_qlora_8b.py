"""GRPO of Qwen3-8B on GSM8K, adapters over 4 bits: one GPU of 24 GB, days.

    python launch/train.py --config=configs/grpo_qlora_8b.py --workdir=runs/gsm8k_8b \
        --config.data.train_files="('gsm8k/train.jsonl',)" \
        --config.data.eval_files="('gsm8k/test.jsonl',)"

Frozen kernels are stored in NF4 (QLoRA, arXiv:2305.14314), embedding and head in bfloat16. Plan by
`launch/plan.py --device=rtx4090`:
1 x rtx4090 (one device): 17.6 of 20.1 GiB a device, fits, 2.6 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "Qwen/Qwen3-8B"
    config.model.param_dtype = "bfloat16"
    config.model.compute_dtype = "bfloat16"
    config.model.quantization = "nf4"
    config.model.remat = "full"
    config.lora.rank = 32
    config.lora.alpha = 32.0

    config.data.task = "gsm8k"
    config.data.train_files = ("data/gsm8k/train.jsonl",)
    config.data.eval_files = ("data/gsm8k/test.jsonl",)
    config.data.max_prompt_tokens = 512
    config.rollout.max_response_tokens = 1536
    config.rewards.functions.answer = {"function": "gsm8k"}

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_coef = 0.001
    config.trainer.num_steps = 500
    config.trainer.prompts_per_step = 8
    config.trainer.minibatch_size = 64
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-5
    config.trainer.optimizer.warmup_steps = 10
    config.evaluation.every = 100
    config.checkpoint.every = 50
    return config
