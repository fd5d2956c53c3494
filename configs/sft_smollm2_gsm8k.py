"""Supervised fine-tuning of SmolLM2-135M-Instruct on the worked answers of GSM8K: two CPU cores.

`configs/grpo_smollm2.py` says where the model is from. The data are the original files:

    python launch/train.py --config=configs/sft_smollm2_gsm8k.py --workdir=runs/sft_smollm2 \\
        --config.model.path=models/smollm2 --config.data.train_files="('gsm8k/train.jsonl',)" \\
        --config.data.eval_files="('gsm8k/test.jsonl',)"

`val/sft/loss` in `metrics.jsonl` is the held-out loss.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("sft")
    config.model.path = "models/smollm2"
    config.data.task = "gsm8k"
    config.data.train_files = ("data/gsm8k/train.jsonl",)
    config.data.eval_files = ("data/gsm8k/test.jsonl",)
    config.trainer.num_steps = 100
    config.trainer.batch_size = 16
    config.trainer.max_sequence_tokens = 1024
    config.trainer.optimizer.learning_rate = 1e-4
    config.trainer.optimizer.warmup_steps = 10
    config.trainer.optimizer.schedule = "cosine"
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 25
    config.evaluation.num_prompts = 128
    config.checkpoint.every = 50
    return config
