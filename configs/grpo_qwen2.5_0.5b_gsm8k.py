"""GRPO on GSM8K with Qwen2.5-0.5B-Instruct: one GPU of 80 GB, hours.

Set the folder of the model and the original files of the data set:

    python launch/train.py --config=configs/grpo_qwen2.5_0.5b_gsm8k.py --workdir=runs/gsm8k \
        --config.model.path=models/Qwen2.5-0.5B-Instruct \
        --config.data.train_files="('gsm8k/train.jsonl',)" \
        --config.data.eval_files="('gsm8k/test.jsonl',)"

Sizes are those of verl's quickstart for this model (256 prompts per step in minibatches of 64, 512
tokens each for prompt and answer, 15 epochs), with 5 samples per prompt and the KL in the loss.
`val-core/openai/gsm8k/mean@1` in `metrics.jsonl` is the held-out accuracy of greedy answers.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen2.5-0.5B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"

    config.data.task = "gsm8k"
    config.data.train_files = ("data/gsm8k/train.jsonl",)
    config.data.eval_files = ("data/gsm8k/test.jsonl",)
    config.data.max_prompt_tokens = 512
    config.rollout.max_response_tokens = 512
    config.rewards.functions.answer = {"function": "gsm8k"}

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 5
    config.algorithm.kl_coef = 0.001
    config.trainer.num_steps = 435  # 29 steps per epoch
    config.trainer.prompts_per_step = 256
    config.trainer.minibatch_size = 320  # the samples of 64 prompts
    config.trainer.optimizer.learning_rate = 1e-6
    config.evaluation.every = 29
    config.checkpoint.every = 29
    return config
