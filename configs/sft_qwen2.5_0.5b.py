"""Supervised fine-tuning of Qwen2.5-0.5B-Instruct on your own rows: one GPU of 80 GB.

Rows hold `messages`, or `prompt` and `completion` (docs/data.md); `eval_files` are held out.

    python launch/train.py --config=configs/sft_qwen2.5_0.5b.py --workdir=runs/sft \
        --config.model.path=models/Qwen2.5-0.5B-Instruct \
        --config.data.train_files="('train.jsonl',)" --config.data.eval_files="('held_out.jsonl',)"
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("sft")
    config.model.path = "models/Qwen2.5-0.5B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"

    config.data.task = "files"
    config.data.train_files = ("data/train.jsonl",)
    config.data.eval_files = ("data/held_out.jsonl",)

    config.trainer.num_steps = 1000
    config.trainer.batch_size = 128
    config.trainer.max_sequence_tokens = 4096
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.optimizer.learning_rate = 1e-5
    config.trainer.optimizer.warmup_steps = 30
    config.trainer.optimizer.schedule = "cosine"
    config.evaluation.every = 100
    config.evaluation.num_prompts = 256
    config.checkpoint.every = 100
    return config
