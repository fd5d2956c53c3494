"""GRPO of an 8B model that searches a corpus before it answers: TPU v6e:4x4.

Policy and reference start from Llama-3.1-8B-Instruct, which may call the tool `search` (BM25) in up
to five turns. Rows are questions in verl's schema that ask for `<answer>...</answer>`, with the
right answers as ground truth. The corpus is a file of JSON lines with `text` and, if wanted,
`title`; each host reads it once.

    pip install -e '.[search]'
    python launch/train.py --config=configs/agent_search_8b.py --workdir=runs/agent_search_8b \
        --config.model.path=models/Llama-3.1-8B-Instruct --config.agent.corpus=corpus.jsonl \
        --config.data.train_files="('train.parquet',)" --config.data.eval_files="('eval.parquet',)"

Weights are in float32, compute is in bfloat16. Plan by `launch/plan.py`, v6e:4x4:
16 x v6e (fsdp 8 x tensor 2): 23.3 of 31.2 GiB a device, fits, 8.0 GiB free.
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Llama-3.1-8B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 8
    config.mesh.tensor = 2

    config.data.task = "files"
    config.data.train_files = ("data/train.parquet",)
    config.data.eval_files = ("data/eval.parquet",)
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 4096  # of all turns, what was found included
    config.rollout.num_slots = 256
    config.rewards.functions.answer = {"function": "exact_match"}

    config.agent.tools = ("search",)
    config.agent.corpus = "data/corpus.jsonl"
    config.agent.max_turns = 5
    config.agent.max_turn_tokens = 512
    config.agent.max_calls = 2
    config.agent.max_result_characters = 3000
    config.agent.cut_results = "right"  # the best passages come first

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "loss"
    config.algorithm.kl_coef = 0.001
    config.trainer.prompts_per_step = 64
    config.trainer.num_steps = 300
    config.trainer.minibatch_size = 256
    config.trainer.max_tokens_per_microbatch = 6144
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 20
    config.evaluation.every = 50
    config.checkpoint.every = 50
    return config
