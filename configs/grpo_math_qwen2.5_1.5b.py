"""GRPO on competition mathematics with Qwen2.5-1.5B-Instruct: one GPU of 80 GB, a day.

Rows have the columns of MATH (`data.preset="math"`): files, or names on the hub. Answers are
compared as mathematics (math-verify), so that `1/2` and `0.5` are one answer. Groups in which all
answers are right, or all wrong, are dropped and other prompts sampled.

    pip install -e '.[math]'
    python launch/train.py --config=configs/grpo_math_qwen2.5_1.5b.py --workdir=runs/math \
        --config.model.path=models/Qwen2.5-1.5B-Instruct \
        --config.data.train_files="('math_train.jsonl',)" \
        --config.data.eval_files="('math_test.jsonl',)"
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen2.5-1.5B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"

    config.data.task = "files"
    config.data.preset = "math"
    config.data.train_files = ("data/math_train.jsonl",)
    config.data.eval_files = ("data/math_test.jsonl",)
    config.data.max_prompt_tokens = 512
    config.rollout.max_response_tokens = 2048
    config.rewards.functions.answer = {"function": "math"}

    config.algorithm.recipe = "dapo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.overlong_buffer_tokens = 512
    config.trainer.num_steps = 300
    config.trainer.prompts_per_step = 64
    config.trainer.minibatch_size = 256
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 10
    config.evaluation.every = 20
    config.evaluation.num_prompts = 512
    config.checkpoint.every = 20
    return config
