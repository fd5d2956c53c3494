"""DPO on sums of digits: a model of 0.4M parameters that errs, minutes on two CPU cores.

The policy, which is also the reference, comes from fine-tuning on examples half of which have an
error. Pairs of a right and a wrong solution then remove the errors; held-out sums are answered at
temperature 1 and checked (`val-core/arithmetic/mean@4`).

    python launch/train.py --config=configs/sft_tiny.py --workdir=runs/sft_errors \
        --config.data.arithmetic_errors=0.5
    python launch/export.py --workdir=runs/sft_errors --out=models/sft_errors
    python launch/train.py --config=configs/dpo_tiny.py --workdir=runs/dpo_tiny
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("dpo")
    config.model.path = "models/sft_errors"
    config.model.remat = "none"

    config.data.task = "arithmetic"
    config.data.arithmetic_terms = 3
    config.data.max_prompt_tokens = 32
    config.data.chat_template = False
    config.rollout.max_response_tokens = 32

    config.dpo.beta = 0.5
    config.trainer.num_steps = 60
    config.trainer.batch_size = 64
    config.trainer.max_sequence_tokens = 64
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.optimizer.learning_rate = 3e-5
    config.trainer.optimizer.warmup_steps = 10
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.functions.answer = {"function": "arithmetic"}
    config.evaluation.every = 20
    config.evaluation.samples_per_prompt = 4
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 20
    return config
