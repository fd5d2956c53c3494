"""DPO of Qwen2.5-0.5B-Instruct on your own rows: one GPU of 80 GB.

Rows hold `prompt`, `chosen` and `rejected` (docs/data.md); `eval_files` are held out.

    python launch/train.py --config=configs/dpo_qwen2.5_0.5b.py --workdir=runs/dpo \
        --config.model.path=models/Qwen2.5-0.5B-Instruct \
        --config.data.train_files="('pairs.jsonl',)" --config.data.eval_files="('held_out.jsonl',)"
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("dpo")
    config.model.path = "models/Qwen2.5-0.5B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"

    config.data.task = "files"
    config.data.train_files = ("data/pairs.jsonl",)
    config.data.eval_files = ("data/held_out.jsonl",)

    config.dpo.beta = 0.1
    config.trainer.num_steps = 1000
    config.trainer.batch_size = 64
    config.trainer.max_sequence_tokens = 4096
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.optimizer.learning_rate = 5e-7
    config.trainer.optimizer.warmup_steps = 30
    config.trainer.optimizer.schedule = "linear"
    config.evaluation.every = 100
    config.evaluation.num_prompts = 256
    config.checkpoint.every = 100
    return config
