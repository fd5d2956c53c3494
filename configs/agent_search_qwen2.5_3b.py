"""An agent that searches before it answers, Qwen2.5-3B-Instruct: a machine with eight 80 GB GPUs.

The tool is BM25 search in a file of passages (extra `search`); docs/examples.md says how rows and
passages look. The policy may search three times, then it answers.

    python launch/train.py --config=configs/agent_search_qwen2.5_3b.py --workdir=runs/search \
        --config.model.path=models/Qwen2.5-3B-Instruct \
        --config.agent.corpus=passages.jsonl \
        --config.data.train_files="('questions_train.jsonl',)" \
        --config.data.eval_files="('questions_test.jsonl',)"
"""

from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.path = "models/Qwen2.5-3B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"

    config.data.task = "files"
    config.data.train_files = ("data/questions_train.jsonl",)
    config.data.eval_files = ("data/questions_test.jsonl",)
    config.data.max_prompt_tokens = 768
    config.rollout.max_response_tokens = 3072  # all turns and what the searches found
    config.agent.tools = ("search",)
    config.agent.corpus = "data/passages.jsonl"
    config.agent.max_turns = 4
    config.agent.max_calls = 1
    config.agent.max_result_characters = 2000
    config.rewards.functions.answer = {"function": "search_reward.py:last_line_holds_answer"}

    config.algorithm.recipe = "grpo"
    config.algorithm.kl_in = "none"
    config.algorithm.samples_per_prompt = 8
    config.trainer.num_steps = 300
    config.trainer.prompts_per_step = 64
    config.trainer.minibatch_size = 256
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.optimizer.learning_rate = 1e-6
    config.trainer.optimizer.warmup_steps = 10
    config.evaluation.every = 20
    config.evaluation.num_prompts = 256
    config.checkpoint.every = 20
    return config
