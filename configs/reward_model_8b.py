"""A reward model from Llama-3.1-8B-Instruct on your own rows: TPU v6e:2x4.

Rows hold `prompt`, `chosen` and `rejected` (docs/data.md); `eval_files` are held out.

    python launch/train.py --config=configs/reward_model_8b.py --workdir=runs/rm \
        --config.model.path=models/Llama-3.1-8B-Instruct \
        --config.data.train_files="('pairs.jsonl',)" --config.data.eval_files="('held_out.jsonl',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v6e:2x4:
8 x v6e (fsdp 8): 17.8 of 31.2 GiB a device, fits, 13.4 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("reward_model")
    config.model.path = "models/Llama-3.1-8B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 8

    config.data.task = "files"
    config.data.train_files = ("data/pairs.jsonl",)
    config.data.eval_files = ("data/held_out.jsonl",)

    config.trainer.num_steps = 1000
    config.trainer.batch_size = 64
    config.trainer.max_sequence_tokens = 4096
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-5
    config.trainer.optimizer.warmup_steps = 30
    config.trainer.optimizer.schedule = "cosine"
    config.evaluation.every = 100
    config.evaluation.num_prompts = 256
    config.checkpoint.every = 100
    return config
