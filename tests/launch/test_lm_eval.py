"""Tasks of lm-evaluation-harness on a model: as with its own backend of transformers."""

import json
import pathlib
import random
import subprocess
import sys

import commands
import pytest
import serving_model
import tiny

from jaxrl_llm.models.hf import checkpoint

ROOT = pathlib.Path(__file__).parents[2]


def test_without_the_extra_it_is_named(capsys, tmp_path, monkeypatch):
    serving_model.make_folder(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "jaxrl_llm.commands.lm_eval_tasks", raising=False)
    code, out, log = commands.call(
        capsys, "evaluate", f"--model={tmp_path / 'model'}", "--tasks=arc_easy"
    )
    said = f"{code} {out} {log}"
    assert code != 0 and "pip install 'jaxrl_llm[eval]'" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--config=configs/grpo_tiny.py"], "leave it out"),
        (["--samples_per_prompt=4"], "a task says itself how often it samples"),
    ],
)
def test_flags_that_a_task_decides_are_refused(capsys, flags, said):
    assert said in commands.refused(capsys, "evaluate", "--model=m", "--tasks=arc_easy", *flags)


def test_flags_of_tasks_alone_are_refused(capsys):
    flags = ["--model=m", "--config=configs/grpo_tiny.py", "--num_fewshot=3"]
    assert "num_fewshot" in commands.refused(capsys, "evaluate", *flags)


ROWS = 200
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """
task: continued
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
"""
# Prints what a backend answers to each row.
SAMPLES = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
backend, arguments, tasks = json.loads(sys.argv[1])
results = lm_eval.simple_evaluate(
    model=backend, model_args=arguments, tasks=tasks, batch_size=1, bootstrap_iters=0,
    task_manager=TaskManager(include_defaults=False),
)
samples = {task: [[s["doc_id"], s["resps"]] for s in found] for task, found in
           results["samples"].items()}
print("RESULT" + json.dumps(samples))
"""


def answers(backend, arguments, tasks):
    """What lm-eval gets from a backend, by task and row."""
    said = subprocess.run(
        [sys.executable, "-c", SAMPLES, json.dumps([backend, arguments, tasks])],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-4000:]
    samples = json.loads(said.stdout.rpartition("RESULT")[2])
    return {task: dict(sorted(rows)) for task, rows in samples.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with log-probs far apart, and 200 rows as two tasks."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    tokenizer = serving_model.byte_tokenizer()
    net = tiny.with_sizes(vocab_size=len(tokenizer), num_layers=2, max_positions=256)
    checkpoint.save(folder / "model", net, tiny.params(net, scale=5.0), tokenizer)
    words = " ".join(serving_model.CORPUS).split()
    rows = [
        {
            "question": " ".join(draw.choices(words, k=draw.randint(1, 12))),
            "choices": [
                " " + " ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(2)
            ],
            "answer": draw.randrange(2),
        }
        for _ in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = []
    for name, text in (("choices", CHOICES), ("continued", GENERATE)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.jsonl")))
        tasks.append(str(folder / f"{name}.yaml"))
    return folder / "model", tasks


@pytest.mark.nightly
def test_answers_equal_those_of_transformers(model):
    pytest.importorskip("lm_eval")
    pytest.importorskip("torch")
    folder, tasks = model
    expected = answers(
        "hf", {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}, tasks
    )
    with serving_model.serving(folder, "--max_tokens=256", "--name=m") as (_, url):
        args = {"model": "m", "base_url": f"{url}/v1/completions", "tokenizer": str(folder)}
        args |= {"tokenizer_backend": "huggingface", "num_concurrent": 8, "max_length": 256}
        served = answers("local-completions", args, tasks)
    for row, ours in served["choices"].items():
        for (log_prob, is_greedy), (reference, reference_greedy) in zip(
            flat(ours), flat(expected["choices"][row]), strict=True
        ):
            assert log_prob == pytest.approx(reference, abs=1e-4), row
            assert is_greedy == reference_greedy, row
    equal = [rows == expected["continued"][row] for row, rows in served["continued"].items()]
    # Two continuations of nearly equal probability may change places.
    assert len(equal) == ROWS and sum(equal) >= ROWS - 1


def flat(responses):
    """The (log-prob, is greedy) of each choice of a row."""
    return [response[0] for response in responses]


@pytest.mark.nightly
def test_the_command_writes_what_it_prints(capsys, model):
    pytest.importorskip("lm_eval")
    folder, tasks = model
    flags = [f"--tasks={task}" for task in tasks]
    code, out, log = commands.call(
        capsys, "evaluate", f"--model={folder}", *flags, "--num_prompts=20"
    )
    assert code == 0, log
    record = json.loads(out.splitlines()[-1])
    assert {"choices/acc,none", "continued/exact_match,none"} <= set(record["data"])
    assert 0 <= record["data"]["choices/acc,none"] <= 1
    message = commands.refused(capsys, "evaluate", f"--model={folder}", "--tasks=choises")
    assert "'choises' is neither a task of lm-eval nor a YAML file" in message
