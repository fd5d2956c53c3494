"""What a job learned is what transformers and peft read of its export."""

import jax
import numpy as np
import pytest
import runs
import serving_model
import tiny
import transformers
from commands import call

import jaxrl_llm
from jaxrl_llm import saved_policy

pytestmark = [pytest.mark.parity, pytest.mark.slow]
TOKENS = np.random.default_rng(0).integers(5, 90, (1, 12)).astype(np.int32)


def ours(workdir):
    """Returns logits of the last token, or the score of the sequence, by what a run learned."""
    found = saved_policy.load_run(workdir)
    params, positions = (
        found.full_params(found.read_params()[0]),
        np.arange(TOKENS.shape[1], dtype=np.int32),
    )
    with jax.set_mesh(found.models.mesh):
        hidden = tiny.hidden_states(found.network)(
            params, TOKENS, positions[None], np.ones_like(TOKENS)
        )
        if found.network.head == "lm":
            return np.asarray(found.network.logits(params, hidden))[0, -1]
        return np.asarray(hidden[0, -1] @ params["score"].T)


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model"])
def test_transformers_and_peft_compute_the_same(
    job, adapters, tmp_path, capsys, monkeypatch, torch, one_device
):
    import peft

    serving_model.make_folder(tmp_path / "base")
    config = jaxrl_llm.default_config(job)
    config.model.path = str(tmp_path / "base")
    config.lora.rank = 4 if adapters else 0
    config.data.chat_template = False
    config.trainer.num_steps, config.trainer.batch_size = 3, 8
    config.trainer.max_sequence_tokens = 128
    config.trainer.optimizer.learning_rate = 3e-2
    config.evaluation.before, config.data.arithmetic_eval_prompts = False, 8
    config.metrics.tensorboard = config.metrics.console = False
    jaxrl_llm.train(config, tmp_path / "run")
    scalar = job == "reward_model"
    kind = transformers.AutoModelForCausalLM
    if scalar:
        kind = transformers.AutoModelForSequenceClassification
    wanted = ours(tmp_path / "run")

    def theirs(model):
        with torch.no_grad():
            found = model.eval()(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()
        return found[0] if scalar else found[0, -1]

    def export(name, *more):
        out = tmp_path / name
        code, _, said = call(
            capsys, "export", f"--workdir={tmp_path / 'run'}", f"--out={out}", *more
        )
        assert code == 0, said
        return out

    merged = kind.from_pretrained(export("merged"), dtype=torch.float32)
    assert not scalar or merged.config.num_labels == 1
    np.testing.assert_allclose(theirs(merged), wanted, atol=3e-5 * np.abs(wanted).max())
    if adapters:
        labels = {"num_labels": 1} if scalar else {}
        base = kind.from_pretrained(tmp_path / "base", dtype=torch.float32, **labels)
        before = theirs(base)
        assert np.abs(before - wanted).max() > 1e-2 * np.abs(wanted).max()
        loaded = peft.PeftModel.from_pretrained(base, export("adapters", "--adapters"))
        np.testing.assert_allclose(theirs(loaded), wanted, atol=3e-5 * np.abs(wanted).max())
        # Another run begins with them, and finds what this one ended with.
        config.lora.path, config.trainer.num_steps = str(tmp_path / "adapters"), 1
        config.evaluation.before = True
        jaxrl_llm.train(config, tmp_path / "next")
        ended, begun = (runs.metrics(tmp_path / name) for name in ("run", "next"))
        held_out = [name for name in ended[3] if name.startswith("val/")]
        assert held_out
        assert [begun[0][name] for name in held_out] == [ended[3][name] for name in held_out]
