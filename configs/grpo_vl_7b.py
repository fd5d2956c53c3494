"""GRPO of Qwen2.5-VL-7B on geometry with figures (geo3k): TPU v6e:4x4.

Rows are verl's: column `images`, marks `<image>` in the prompt, ground truth for the `math` reward,
which reads the answer in \\boxed{}. Prompts have 1024 tokens at most, those of their figure
included; longer ones are dropped. The tower is frozen; trainer.tower_learning_rate trains it.

    pip install -e '.[math]'
    python launch/train.py --config=configs/grpo_vl_7b.py --workdir=runs/grpo_vl_7b \\
        --config.model.path=models/Qwen2.5-VL-7B-Instruct \\
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('test.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v6e:4x4:
16 x v6e (fsdp 8 x tensor 2): 17.0 of 31.2 GiB a device, fits, 14.2 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen2.5-VL-7B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 8
    config.mesh.tensor = 2

    config.data.task = "files"
    config.data.train_files = ("data/geo3k/train.parquet",)
    config.data.eval_files = ("data/geo3k/test.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 2048
    config.rollout.num_slots = 256
    config.rewards.functions.math = {"function": "math"}

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 5
    config.algorithm.kl_in = "loss"
    config.algorithm.kl_coef = 0.01
    config.trainer.prompts_per_step = 256
    config.trainer.num_steps = 120
    config.trainer.minibatch_size = 320
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.learning_rate = 1e-6
    config.evaluation.every = 20
    config.checkpoint.every = 20
    return config
