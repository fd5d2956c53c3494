"""Makes the numbers of `tests/trainer/test_trl_preferences.py` and `test_trl_functions.py`.

    python tests/goldens/make_trl.py FOLDER SEED

needs the extras `[goldens,parity]`; its numbers were made with transformers 5.23.0. The folder gets

- `policy/`: a tiny random Llama with the tokenizer of `trl_seed0`;
- `expected.json`: for each of `RUNS` ten optimizer steps of TRL's own trainer on that policy (CPU,
  float32): its settings, the rows as it tokenized them, the metrics of each step, and the L2 norms
  of each weight's change;
- `functions.npz`: losses and gradients of TRL's GRPOTrainer on random arrays, by
  `make_trl_functions.py`.
"""

import json
import pathlib
import random
import shutil
import sys
import tempfile
import warnings

import datasets
import make_trl_functions
import numpy as np
import torch
import transformers
import trl
from trl.experimental import cpo, orpo

KEPT = pathlib.Path(__file__).parent / "trl_seed0" / "policy"
NUM_ROWS, BATCH = 80, 8
SETTINGS = {
    "per_device_train_batch_size": BATCH,
    "max_steps": NUM_ROWS // BATCH,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "max_length": 1024,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
}
# Name of a run: its trainer and what differs from TRL's defaults.
RUNS = {
    **{
        f"dpo_{loss}": ("dpo", {"loss_type": [loss], "beta": 0.1})
        for loss in (
            *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot"),
            *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft"),
        )
    },
    "dpo_sigmoid_norm": ("dpo", {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
    "dpo_exo_pair": ("dpo", {"loss_type": ["exo_pair"], "beta": 0.1, "label_smoothing": 1e-3}),
    "dpo_robust": ("dpo", {"loss_type": ["robust"], "beta": 0.1, "label_smoothing": 0.1}),
    "dpo_aot_smoothed": ("dpo", {"loss_type": ["aot"], "beta": 0.1, "label_smoothing": 0.1}),
    "dpo_discopop_tau": ("dpo", {"loss_type": ["discopop"], "beta": 0.1, "discopop_tau": 0.5}),
    "kto": ("kto", {"beta": 0.1}),
    "kto_weighted": ("kto", {"beta": 0.1, "desirable_weight": 1.33, "undesirable_weight": 0.7}),
    "kto_apo_zero_unpaired": ("kto", {"loss_type": "apo_zero_unpaired", "beta": 0.1}),
    "cpo": ("cpo", {"beta": 0.1}),
    "cpo_smoothed": ("cpo", {"beta": 0.1, "cpo_alpha": 0.5, "label_smoothing": 0.1}),
    "simpo": ("cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
    "cpo_simpo": ("cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}),
    "alphapo": ("cpo", {"loss_type": "alphapo", "beta": 2.0, "simpo_gamma": 0.5, "alpha": 0.25}),
    "orpo": ("orpo", {"beta": 0.1}),
    "sft_dft": ("sft", {"loss_type": "dft"}),
    "sft_nll": ("sft", {"loss_type": "nll"}),
}


def make_policy(folder, seed):
    """Weights large enough that answers differ in likelihood."""
    torch.manual_seed(seed)
    shutil.copytree(KEPT, folder)
    config = transformers.LlamaConfig.from_pretrained(KEPT, initializer_range=0.08)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def make_rows(seed):
    draw = random.Random(seed)
    words = sorted(json.loads((KEPT / "tokenizer.json").read_text())["model"]["vocab"])
    words = [word for word in words if not word.startswith("<")]

    def text(shortest, longest):
        return " ".join(draw.choice(words) for _ in range(draw.randint(shortest, longest)))

    rows = []
    for _ in range(NUM_ROWS):
        chosen, rejected = f" {text(4, 28)}", f" {text(4, 28)}"
        row = {"prompt": text(3, 24), "chosen": chosen, "rejected": rejected}
        rows.append({**row, "label": draw.random() < 0.6})
    return rows


def dataset(kind, rows):
    columns = {"kto": ("prompt", "chosen", "label"), "sft": ("prompt", "chosen")}
    kept = columns.get(kind, ("prompt", "chosen", "rejected"))
    rows = [{name: row[name] for name in kept} for row in rows]
    if kind in columns:
        rows = [{**row, "completion": row.pop("chosen")} for row in rows]
    return datasets.Dataset.from_list(rows)


def answers(kind, inputs):
    """The tokens and the loss mask of each row that a trainer was given, by side."""

    def side(tokens, attention, mask):
        return [
            {"tokens": t[a.bool()].tolist(), "mask": m[a.bool()].int().tolist()}
            for t, a, m in zip(tokens, attention, mask, strict=True)
        ]

    if kind in ("cpo", "orpo"):
        return {
            name: side(
                inputs[f"{name}_input_ids"],
                inputs[f"{name}_attention_mask"],
                inputs[f"{name}_labels"] != -100,
            )
            for name in ("chosen", "rejected")
        }
    tokens, attention = inputs["input_ids"], inputs["attention_mask"]
    if kind == "sft":
        return {"answer": side(tokens, attention, inputs["labels"] != -100)}
    found = side(tokens, attention, inputs["completion_mask"])
    if kind == "kto":
        labels = [bool(label) for label in inputs["label"]]
        return {"answer": found, "label": labels}
    half = len(found) // 2
    return {"chosen": found[:half], "rejected": found[half:]}


def run(kind, changes, policy, rows):
    trainer_class, config_class = TRAINERS[kind]
    seen = []

    class Recorded(trainer_class):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(answers(kind, inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = dict(SETTINGS)
    if kind == "sft":
        settings["completion_only_loss"] = True
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(output_dir=folder, **{**settings, **changes})
        more = {"ref_model": reference} if kind in ("dpo", "kto") else {}
        trainer = Recorded(
            model=model,
            args=config,
            train_dataset=dataset(kind, rows),
            processing_class=tokenizer,
            **more,
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    names = set.intersection(*(set(entry) for entry in logs)) - {"epoch", "step"}
    changed = {
        name: float((weight.detach().double() - before[name].double()).norm())
        for name, weight in model.named_parameters()
    }
    return {
        "kind": kind,
        "settings": {**settings, **changes},
        "rows": {side: [row for batch in seen for row in batch[side]] for side in seen[0]},
        "steps": {name: [float(entry[name]) for entry in logs] for name in sorted(names)},
        "update_norms": changed,
    }


def main():
    folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "policy").is_dir():
        make_policy(folder / "policy", seed)
    rows = make_rows(seed)
    runs = {}
    for name, (kind, changes) in RUNS.items():
        runs[name] = run(kind, changes, folder / "policy", rows)
        print(name, runs[name]["steps"]["loss"], flush=True)
    versions = {module.__name__: module.__version__ for module in (trl, torch, transformers)}
    content = {"seed": seed, "versions": versions, "runs": runs}
    (folder / "expected.json").write_text(json.dumps(content))
    np.savez(folder / "functions.npz", **make_trl_functions.compute(seed))


if __name__ == "__main__":
    main()
