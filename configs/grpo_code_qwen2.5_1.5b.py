"""GRPO on small programs with Qwen2.5-Coder-1.5B-Instruct: one GPU of 80 GB, a day.

A program is right if it passes all tests of its row, in the sandbox (docs/reliability.md). The rows
are those of docs/examples.md.

    python launch/train.py --config=configs/grpo_code_qwen2.5_1.5b.py --workdir=runs/code \
        --config.model.path=models/Qwen2.5-Coder-1.5B-Instruct \
        --config.data.train_files="('code_train.jsonl',)" \
        --config.data.eval_files="('code_test.jsonl',)"
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen2.5-Coder-1.5B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"

    config.data.task = "files"
    config.data.train_files = ("data/code_train.jsonl",)
    config.data.eval_files = ("data/code_test.jsonl",)
    config.data.max_prompt_tokens = 768
    config.rollout.max_response_tokens = 1024
    config.rewards.functions.tests = {"function": "code"}
    config.rewards.num_workers = 8
    config.rewards.timeout_s = 60.0  # of all tests of a program

    config.algorithm.recipe = "dr_grpo"
    config.algorithm.samples_per_prompt = 8
    config.trainer.num_steps = 200
    config.trainer.prompts_per_step = 64
    config.trainer.minibatch_size = 256
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 10
    config.evaluation.every = 20
    config.evaluation.num_prompts = 256
    config.checkpoint.every = 20
    return config
