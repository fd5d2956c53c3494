"""Supervised fine-tuning of Qwen3-8B on your own rows, adapters over 4 bits: one GPU of 16 GB.

Rows hold `messages`, or `prompt` and `completion` (docs/data.md); `eval_files` are held out.

    python launch/train.py --config=configs/sft_qlora_8b.py --workdir=runs/sft \
        --config.data.train_files="('train.jsonl',)" --config.data.eval_files="('held_out.jsonl',)"

Frozen kernels are stored in NF4 (QLoRA, arXiv:2305.14314), embedding and head in bfloat16. Plan by
`launch/plan.py --device=rtx4080`:
1 x rtx4080 (one device): 9.1 of 13.4 GiB a device, fits, 4.3 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("sft")
    config.model.path = "Qwen/Qwen3-8B"
    config.model.param_dtype = "bfloat16"
    config.model.compute_dtype = "bfloat16"
    config.model.quantization = "nf4"
    config.model.remat = "full"
    config.lora.rank = 32
    config.lora.alpha = 32.0

    config.data.task = "files"
    config.data.train_files = ("data/train.jsonl",)
    config.data.eval_files = ("data/held_out.jsonl",)

    config.trainer.num_steps = 1000
    config.trainer.batch_size = 16
    config.trainer.max_sequence_tokens = 4096
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 2e-4
    config.trainer.optimizer.warmup_steps = 30
    config.trainer.optimizer.schedule = "cosine"
    config.evaluation.every = 100
    config.evaluation.num_prompts = 256
    config.checkpoint.every = 100
    return config
