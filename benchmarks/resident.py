"""Resident memory of a GRPO run on this CPU after each step, compared with the plan.

    python benchmarks/resident.py --model=models/SmolLM2-135M-Instruct --rows=gsm8k/train.jsonl
    python benchmarks/resident.py ... --lora=16 --save_every=0

Prints a Markdown table: peak resident memory since process start, and the plan. Then it prints the
number of compiled programs.
"""

import argparse
import json
import pathlib
import tempfile

import jax

import jaxrl_llm
from jaxrl_llm.config.bridge import default_config_dict


def digits(data_source, solution_str, ground_truth, extra_info) -> float:
    """Returns the share of digits; the samples of a small model differ in it, so updates happen."""
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))


def config(args: argparse.Namespace):
    """Returns the run: four prompts with four samples, 256 + 96 tokens, float32, GSM8K."""
    made = default_config_dict()
    made.model.path = args.model
    made.data.task = "gsm8k"
    made.data.train_files = (args.rows,)
    made.data.max_prompt_tokens = 256
    made.rollout.max_response_tokens = 96
    made.rewards.functions.answer = {"function": f"{pathlib.Path(__file__).resolve()}:digits"}
    made.algorithm.recipe = "grpo"
    made.algorithm.kl_coef = 0.001
    made.algorithm.samples_per_prompt = 4
    made.trainer.num_steps = args.steps
    made.trainer.prompts_per_step = 4
    made.trainer.minibatch_size = 16
    made.trainer.optimizer.learning_rate = 1e-6
    made.lora.rank = args.lora
    made.evaluation.every = 0
    made.evaluation.before = made.evaluation.after = False
    made.checkpoint.every = args.save_every
    made.model.remat = args.remat
    made.trainer.max_tokens_per_microbatch = args.microbatch
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--rows", required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save_every", type=int, default=2)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: no LoRA")
    parser.add_argument("--remat", default="auto")
    parser.add_argument("--microbatch", type=int, default=0, help="tokens; 0: chosen by the plan")
    args = parser.parse_args()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(seconds) if "backend_compile" in name else None
    )
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        jaxrl_llm.train(config(args), workdir)
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    print("| step | planned GiB | peak resident GiB | ratio | resident GiB | seconds |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        data = row["data"]
        planned, peak = data["perf/planned_memory_gb"], data["perf/max_cpu_memory_used_gb"]
        line = planned, peak, peak / planned, data["perf/cpu_memory_used_gb"], data["timing_s/step"]
        print("|", row["step"], "|", " | ".join(f"{value:.2f}" for value in line), "|")
    print(f"{len(compiled)} programs compiled")


if __name__ == "__main__":
    main()
