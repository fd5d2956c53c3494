"""TRL's GRPO on CPU: seconds of an iteration and peak memory; `iteration.py --rows` runs it.

Needs an environment with torch and trl, without jaxrl_llm. Every answer has `--new_tokens` tokens.
Prints one JSON object.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time

import side_by_side

os.environ["HF_HUB_OFFLINE"] = "1"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--rows", required=True, help="file of GSM8K")
    for name in ("prompts", "samples", "prompt_tokens", "new_tokens", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    return parser.parse_args()


def chat(question: str) -> list[dict[str, str]]:
    """Returns the prompt of both systems."""
    return [{"role": "user", "content": question}]


def digits(completions, **_) -> list[float]:
    """Returns the share of digits, as `resident.py` does for our run."""
    texts = [messages[-1]["content"] for messages in completions]
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts]


def main() -> None:
    arguments = parse()
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    lines = pathlib.Path(arguments.rows).read_text().strip().split("\n")
    prompts = [chat(json.loads(line)["question"]) for line in lines[:500]]
    length = lambda prompt: len(tokenizer.apply_chat_template(prompt)["input_ids"])  # noqa: E731
    prompts = [prompt for prompt in prompts if length(prompt) <= arguments.prompt_tokens]
    starts: list[float] = []
    done: list[float] = []

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            starts.append(time.perf_counter())

        def on_step_end(self, args, state, control, **_):
            done.append(time.perf_counter())

    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=arguments.prompts * arguments.samples,
        num_generations=arguments.samples,
        max_completion_length=arguments.new_tokens,
        generation_kwargs={"min_new_tokens": arguments.new_tokens},
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=arguments.beta,
        learning_rate=1e-6,
        max_steps=arguments.warmup + arguments.steps,
        gradient_checkpointing=arguments.checkpointing,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=digits,
        processing_class=tokenizer,
        callbacks=[Steps()],
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
    )
    trainer.train()
    lengths = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    assert all(value == arguments.new_tokens for value in lengths), lengths
    # From the start of a step to the start of the next; the last ends where training ends.
    seconds = [b - a for a, b in zip(starts, [*starts[1:], done[-1]], strict=True)]
    timed = sorted(seconds[arguments.warmup :])
    side_by_side.emit(
        {
            "what": "grpo",
            "peer": f"trl {trl.__version__}, torch {torch.__version__}",
            "iter_s": timed[len(timed) // 2],
            "iter_min": timed[0],
            "iter_max": timed[-1],
            "first_step_s": seconds[0],
            "peak_rss_mb": side_by_side.peak_memory_mb(),
        }
    )


if __name__ == "__main__":
    main()
