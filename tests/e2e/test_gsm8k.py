"""Real questions and a Hugging Face folder, all the way to a folder that transformers loads."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import tiny
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl_llm import saved_policy
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import checkpoint, safetensors_file
from jaxrl_llm.models.transformer import Network

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN_QUESTIONS = [
    {
        "question": f"Ann has {a} apples and gets {b} bags of {c} more. How many has she now?",
        "answer": f"The bags hold {b}*{c}=<<{b}*{c}={b * c}>>{b * c}.\n#### {a + b * c:,}",
    }
    for a in range(1, 9)
    for b, c in ((2, 3), (40, 50), (7, 1))
]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The real files, from `JAXRL_GSM8K` or beside the repository; else a few in their format."""
    beside = runs.ROOT.parent / "shared" / "data" / "gsm8k"
    folder = pathlib.Path(os.environ.get("JAXRL_GSM8K", beside))
    if not folder.is_dir():
        folder = tmp_path_factory.mktemp("gsm8k")
        text = "".join(json.dumps(row) + "\n" for row in OWN_QUESTIONS)
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(text)
    return {split: folder / f"{split}.jsonl" for split in ("train", "test")}


def rows_of(path: pathlib.Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory, gsm8k) -> pathlib.Path:
    """A random Qwen2 with a byte-level tokenizer trained on some of the questions."""
    folder = tmp_path_factory.mktemp("model")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [row["question"] + row["answer"] for row in rows_of(gsm8k["train"])[:200]]
    backend.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    network = Network(Architecture("qwen2", 512, 64, 2, 4, 2, 16, 128, qkv_bias=True))
    params = network.init(jax.random.key(0))
    checkpoint.save(folder, network, params, tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    return folder


@pytest.fixture(
    scope="module",
    params=[("grpo", 4), pytest.param(("ppo", 1), marks=pytest.mark.nightly)],
    ids=["grpo", "ppo"],
)
def trained(request, tmp_path_factory, cache, gsm8k, model) -> pathlib.Path:
    """The folder of a run of three steps."""
    recipe, samples = request.param
    workdir = tmp_path_factory.mktemp(recipe) / "run"
    settings = {
        "model.path": model,
        "model.compute_dtype": "float32",
        "data.train_files": (str(gsm8k["train"]),),
        "data.eval_files": (str(gsm8k["test"]),),
        "data.max_prompt_tokens": 192,
        "rollout.max_response_tokens": 32,
        "algorithm.recipe": recipe,
        "algorithm.samples_per_prompt": samples,
        "trainer.num_steps": 3,
        "trainer.prompts_per_step": 16 // samples,
        "trainer.minibatch_size": 8,
        "trainer.optimizer.learning_rate": 1e-3,
        "evaluation.num_prompts": 8,
        "metrics.tensorboard": False,
    }
    arguments = [
        f"--config={runs.ROOT}/configs/grpo_qwen2.5_0.5b_gsm8k.py",
        *(f"--config.{name}={value}" for name, value in settings.items()),
    ]
    runs.launch("train", [*arguments, f"--workdir={workdir}"], cache)
    return workdir


@pytest.fixture(scope="module")
def exported(trained, cache) -> pathlib.Path:
    out = trained.parent / "export"
    runs.launch("export", [f"--workdir={trained}", f"--out={out}"], cache)
    return out


@pytest.mark.slow
def test_three_steps_on_gsm8k(trained, exported, gsm8k, model):
    found = runs.metrics(trained)
    assert list(found) == [0, 1, 2, 3]
    assert "val-core/openai/gsm8k/mean@1" in found[0].keys() & found[3].keys()
    # Prompts are real questions in the template, with their own answers.
    answers = {row["question"]: row["answer"] for row in rows_of(gsm8k["train"])}
    dump = (trained / "rollouts" / "1.jsonl").read_text().splitlines()
    assert len(dump) == 16
    for row in map(json.loads, dump):
        question = row["input"].removeprefix("<|im_start|>user\n").partition(" Let's think")[0]
        assert row["input"].endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert answers[question].rpartition("#### ")[2].replace(",", "") == row["gts"]

    before, after = (safetensors_file.open_folder(folder) for folder in (model, exported))
    assert before.keys() == after.keys()
    moved = [float(np.abs(after[k].view() - before[k].view()).max()) for k in before]
    assert max(moved) > 1e-4  # three steps of 1e-3 did something


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_computes_the_same(trained, exported, gsm8k, torch):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": rows_of(gsm8k["train"])[0]["question"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = np.array([tokenizer(text, add_special_tokens=False)["input_ids"]])

    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(tokens)).logits[0].numpy()
    policy = saved_policy.policy_from_run(trained)
    params, step = policy.read_params()
    assert step == 3
    # Tokens without a text, which RL never samples, have logits in transformers.
    network = dataclasses.replace(policy.models.policy, suppressed_tokens=())
    positions = np.arange(tokens.shape[1])[None]

    @jax.jit
    def forward(params, tokens):
        hidden = tiny.hidden_states(network)(params, tokens, positions, jnp.ones_like(tokens))
        return network.logits(params, hidden)

    with jax.set_mesh(policy.models.mesh):
        logits = np.asarray(forward(params, tokens))[0]
    # float32 in another order of summation: relative to the largest logit.
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
