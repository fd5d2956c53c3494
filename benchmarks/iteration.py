"""Compares an RL iteration on CPU with TRL and Tunix: seconds, phases, first step, peak memory.

`python benchmarks/iteration.py --peers=FOLDER` (its README says how to install the peers)

8 prompts x 4 samples, 64 prompt tokens, 64 sampled tokens (no stop token), one epoch, a reference
model with beta 0.04 in the loss, a trivial reward, AdamW, float32. `--algorithm=ppo` adds a critic
and has no peer. An iteration is the time from the start of one step to the start of the next,
including metrics. Every run is a separate process. Ours calls `jaxrl_llm.trainer.rl.train` as a
user does.

`python benchmarks/iteration.py --models FOLDER --rows=gsm8k/train.jsonl` is for a pretrained model:
questions of GSM8K as chats, 4 prompts x 4 samples, up to 256 prompt tokens, 96 sampled tokens, beta
0.001, our default settings, beside TRL without and with its gradient checkpointing
(`trl_iteration.py`).
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
from typing import NamedTuple

import side_by_side
from trl_iteration import chat

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUMBERS = (
    "iter_s",
    "generate_s",
    "update_s",
    "time_to_first_step_done_s",
    "first_step_s",
    "peak_rss_mb",
)


class Workload(NamedTuple):
    """One iteration."""

    prompts: int = 8
    samples: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 64
    beta: float = 0.04


PRETRAINED = Workload(prompts=4, prompt_tokens=256, new_tokens=96, beta=0.001)


def measure(arguments) -> None:
    """Runs our loop in this process and prints its report."""
    from jaxrl_llm import program
    from jaxrl_llm.config.bridge import default_config_dict, from_config_dict
    from jaxrl_llm.learner import job_models
    from jaxrl_llm.metrics.timers import Clock
    from jaxrl_llm.trainer import rl, run

    program.set_xla_flags()  # as every command, before a device is used
    imported = side_by_side.since_process_start()
    now = side_by_side.clock(arguments.clock)
    starts: list[float] = []
    done_s: list[float] = []

    class StepClock(Clock):
        """A clock that records the start of every step."""

        def __init__(self):
            super().__init__(now)
            starts.append(now())
            done_s.append(side_by_side.since_process_start())

    model = side_by_side.model_folder(arguments.models[0])
    work = PRETRAINED if arguments.rows else Workload()
    with (
        tempfile.TemporaryDirectory() as folder,
        side_by_side.own_tokenizer(model) as tokenizer,
    ):
        workdir = pathlib.Path(folder) / "run"
        settings = default_config_dict()
        prompts = _prompts(arguments, model, pathlib.Path(folder))
        _describe(settings, arguments, work, model, prompts)
        settings.model.tokenizer = tokenizer
        if arguments.cache:
            program.enable_compilation_cache(pathlib.Path(arguments.cache) / "run")
        run.Clock = StepClock
        # No token ends a sample, so that every program does the same work.
        build = job_models.build_models
        job_models.build_models = lambda *arguments: build(
            *arguments[:4], ()
        )  # the last are end tokens
        rl.train(from_config_dict(settings), workdir)
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines][arguments.warmup : -1]
    assert all(step["response_length/mean"] == work.new_tokens for step in steps)
    seconds = [b - a for a, b in itertools.pairwise(starts)]
    phase = lambda *names: statistics.median(  # noqa: E731
        sum(s.get(f"timing_s/{name}", 0.0) for name in names) for s in steps
    )
    side_by_side.emit(
        {
            "what": arguments.algorithm,
            "model": model.name,
            "iter_s": statistics.median(seconds[arguments.warmup :]),
            "iter_min": min(seconds[arguments.warmup :]),
            "iter_max": max(seconds[arguments.warmup :]),
            "n": len(seconds) - arguments.warmup,
            "generate_s": phase("gen", "reward"),
            "predict_s": phase("old_log_prob", "ref", "values"),
            "estimate_s": phase("adv"),
            "update_s": phase("update"),
            "reshard_s": phase("reshard"),
            "import_s": imported,
            "setup_done_s": done_s[0],
            "first_step_s": seconds[0],
            "time_to_first_step_done_s": done_s[1],
            "mean_len": statistics.mean(s["response_length/mean"] for s in steps),
            "clock": arguments.clock,
            "peak_rss_mb": side_by_side.peak_memory_mb(),
        }
    )


def _prompts(arguments, model: pathlib.Path, folder: pathlib.Path) -> str:
    """Writes the workload's prompts as a file that a run reads."""
    if arguments.rows:
        lines = pathlib.Path(arguments.rows).read_text().strip().split("\n")
        prompts = [chat(json.loads(line)["question"]) for line in lines]
    else:
        prompts = json.loads((model / "workload.json").read_text())["prompts"]
    path = folder / "prompts.jsonl"
    rows = [{"data_source": "workload", "prompt": prompt} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _describe(settings, arguments, work: Workload, model: pathlib.Path, prompts: str) -> None:
    settings.model.path = str(model)
    settings.data.task = "files"
    settings.data.train_files = settings.data.eval_files = (prompts,)
    settings.data.chat_template = bool(arguments.rows)
    settings.data.shuffle = False
    settings.data.max_prompt_tokens = work.prompt_tokens
    settings.rollout.max_response_tokens = work.new_tokens
    if arguments.rows:  # a reward in which samples differ; otherwise nothing would be learned
        digits = f"{ROOT / 'benchmarks' / 'resident.py'}:digits"
        settings.rewards.functions.digits = {"function": digits}
    else:
        settings.rewards.functions.length = {"function": "length"}
    settings.rewards.num_workers = 1
    settings.algorithm.recipe = arguments.algorithm
    settings.algorithm.samples_per_prompt = work.samples
    settings.algorithm.kl_in = "loss"
    settings.algorithm.kl_coef = work.beta
    settings.trainer.prompts_per_step = work.prompts
    if not arguments.rows:  # otherwise the plan chooses, as it does for users
        settings.trainer.max_tokens_per_microbatch = arguments.microbatch_tokens
    settings.trainer.shared_prompts = arguments.shared_prompts
    # One step more than is timed, because the last step saves the run.
    settings.trainer.num_steps = arguments.warmup + arguments.steps + 1
    settings.trainer.optimizer.learning_rate = 1e-6
    settings.evaluation.before = settings.evaluation.after = False
    settings.metrics.console = settings.metrics.tensorboard = False
    settings.metrics.rollouts_every = 0


def compare(arguments) -> None:
    """Runs all systems in turns and prints the table of each model."""
    one = ["--threads", "1"] if arguments.clock == "cpu" else []
    scripts = {
        "trl": (side_by_side.PYTHONS["torch"], "grpo_trl.py", one),
        "tunix": (side_by_side.PYTHONS["tunix"], "grpo_tunix.py", []),
    }
    if not arguments.peers or arguments.algorithm != "grpo":
        scripts = {}
    if arguments.rows:
        trl = ROOT / "benchmarks" / "trl_iteration.py"
        python = side_by_side.PYTHONS["torch"]
        given = ["--rows", arguments.rows, *_flags(PRETRAINED)]
        scripts = {
            "trl": (python, trl, given),
            "trl, checkpointing": (python, trl, [*given, "--checkpointing"]),
        }
    for model in arguments.models:
        steps = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
        ours = [sys.executable, __file__, "--measure", "--models", model, *steps]
        ours += ["--algorithm", arguments.algorithm, "--clock", arguments.clock]
        ours += ["--microbatch-tokens", str(arguments.microbatch_tokens)]
        ours += ["--shared-prompts", arguments.shared_prompts]
        ours += ["--cache", arguments.cache] if arguments.cache else []
        ours += ["--rows", arguments.rows] if arguments.rows else []
        programs: dict[str, side_by_side.Command] = {"jaxrl_llm": ours}
        for name, (python, script, more) in scripts.items():
            path = pathlib.Path(arguments.peers) / script
            programs[name] = [python, path, "--model", model, *steps, *more]
        wanted = arguments.systems or list(programs)
        programs = {name: command for name, command in programs.items() if name in wanted}
        reports = side_by_side.alternate(programs, arguments.rounds, arguments.clock)
        title = f"{arguments.algorithm} iteration, {model}, {arguments.clock} seconds"
        side_by_side.print_table(title, reports, NUMBERS, "iter_s")


def _flags(work: Workload) -> list[str]:
    return [f"--{name}={value}" for name, value in work._asdict().items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    side_by_side.add_arguments(parser)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--steps", type=int, default=5, help="timed iterations per run")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--shared-prompts",
        choices=("auto", "off"),
        default="auto",
        help="ours: compute the prompt of a group once",
    )
    parser.add_argument("--cache", default="", help="folder of our compilation cache")
    parser.add_argument("--rows", default="", help="file of GSM8K; for a pretrained model")
    parser.add_argument("--measure", action="store_true", help="run only ours, in this process")
    arguments = parser.parse_args()
    measure(arguments) if arguments.measure else compare(arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
