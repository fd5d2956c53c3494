"""Evaluates a policy on tasks of lm-evaluation-harness, through a server on a local port."""

import json
import numbers
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxrl_llm import program, saved_policy
from jaxrl_llm.commands.options import EvaluateOptions
from jaxrl_llm.errors import raise_flag_problems
from jaxrl_llm.metrics.writer import to_jsonable
from jaxrl_llm.saved_policy import SavedPolicy
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.storage import files

try:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from jaxrl_llm.serving import server
    from jaxrl_llm.serving.app import make_app
    from jaxrl_llm.serving.metrics import Metrics
except ModuleNotFoundError as error:
    sys.exit(f"{error}; --tasks needs more than the package: pip install 'jaxrl_llm[eval]'")

MAX_WAITING = 4096  # samples that may queue; lm-eval sends as many requests as there are slots
BODY_BYTES = 2**26  # a prompt of a task may be long
REQUEST_S = 3600.0


def main(options: EvaluateOptions) -> None:
    """Runs the tasks; prints their metrics, and writes all of lm-eval's results to a file."""
    program.enable_compilation_cache(options.workdir, options.model)
    # Reading the thousands of tasks that come with lm-eval takes a while.
    are_files = all(pathlib.Path(task).is_file() for task in options.tasks)
    manager = TaskManager(include_path=options.task_folder or None, include_defaults=not are_files)
    _check_tasks(manager, options.tasks)
    if options.workdir:
        source = saved_policy.policy_from_run(options.workdir)
    else:
        source = saved_policy.policy_from_model(saved_policy.sampling_config(options.model))
    results, step = _evaluate(source, manager, options)
    data = {
        f"{task}/{name}": float(value)
        for task, metrics in results["results"].items()
        for name, value in metrics.items()
        if isinstance(value, numbers.Real)
    }
    record = {"step": step, "data": to_jsonable(data)}
    if options.workdir:
        labels = "+".join(re.sub(r"[^\w-]+", "_", pathlib.Path(t).stem) for t in options.tasks)
        path = files.run_path(options.workdir) / "evaluations" / f"{step}-{labels[:100]}.json"
        text = json.dumps({**record, "lm_eval": to_jsonable(results)}, indent=2, allow_nan=False)
        files.replace_text(path, text + "\n")
    print(json.dumps(record, allow_nan=False))


def _check_tasks(manager: TaskManager, tasks: tuple[str, ...]) -> None:
    known = set(manager.all_tasks)
    for task in tasks:
        is_pattern = any(character in task for character in "*?[")
        if not (task in known or is_pattern or pathlib.Path(task).is_file()):
            problem = f"{task!r} is neither a task of lm-eval nor a YAML file"
            raise_flag_problems([("tasks", f"{problem}; --task_folder names a folder of yours")])


def _evaluate(
    source: SavedPolicy, manager: TaskManager, options: EvaluateOptions
) -> tuple[Mapping[str, Any], int]:
    """The results of lm-eval, and the step of the weights."""
    served = server.served_model(source)
    engine = server.make_engine(source, served)
    weights = source.weights()
    driver = Driver(engine, weights.params, max_waiting=MAX_WAITING)
    app = make_app(served, driver, Metrics(driver), REQUEST_S, BODY_BYTES, store_bytes=0)
    sampling: dict[str, Any] = {}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature}
    with tempfile.TemporaryDirectory() as folder, server.local_server(app, driver) as url:
        served.tokenizer.save_pretrained(folder)
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": served.name,
                "base_url": f"{url}/v1/completions",
                "tokenizer": folder,
                "tokenizer_backend": "huggingface",
                "tokenized_requests": True,
                "num_concurrent": engine.num_slots,
                "max_length": served.max_tokens,
                "max_retries": 1,
                "timeout": int(REQUEST_S),
                "seed": options.seed,
            },
            tasks=list(options.tasks),
            task_manager=manager,
            num_fewshot=None if options.num_fewshot < 0 else options.num_fewshot,
            limit=options.num_prompts or None,
            gen_kwargs=sampling or None,
            apply_chat_template=options.chat,
            log_samples=False,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    return results, weights.version
