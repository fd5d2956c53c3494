"""Losses and gradients of TRL's GRPOTrainer on random arrays, for `make_trl.py`.

The trainer's own `_compute_loss` runs with log-probs and entropies that are given, in the place of
those of a model.
"""

import collections
import contextlib
import types

import numpy as np
import torch
from trl import GRPOConfig, GRPOTrainer

ROWS, WIDTH = 12, 10
# What differs from `DEFAULTS` of the trainer; a run beyond the first microbatch is not needed.
LOSSES = {
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "vespo_corrected": {"loss_type": "vespo", "importance_sampling": True},
    "vespo_other": {"loss_type": "vespo", "k_pos": 1.5, "lambda_pos": 1.0, "k_neg": 2.0},
    "off_policy_mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    "off_policy_mask_gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "off_policy_mask_threshold": 0.02,
    },
    "high_entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
    "unbiased_kl": {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    "plain_kl": {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False},
    "grpo": {"loss_type": "grpo"},
}


def arrays(seed):
    """The inputs of a step; advantages are the same on all tokens of a response."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, WIDTH + 1, ROWS)
    mask = np.arange(WIDTH) < lengths[:, None]
    old = -draw.exponential(1.0, mask.shape)

    def near(scale):
        return np.minimum(old + scale * draw.normal(size=mask.shape), 0.0).astype(np.float32)

    return {
        "mask": mask,
        "advantages": draw.normal(size=ROWS).astype(np.float32),
        "old_log_probs": old.astype(np.float32),
        "log_probs": near(0.2),
        "ref_log_probs": near(0.3),
        "rollout_log_probs": near(0.1),
        "entropies": draw.exponential(1.0, mask.shape).astype(np.float32),
    }


def loss_and_gradient(inputs, changes):
    changes = dict(changes)
    corrects = changes.pop("importance_sampling", False)
    gamma = {key: changes.pop(key) for key in ("k_pos", "lambda_pos", "k_neg") if key in changes}
    defaults = GRPOConfig(output_dir="unused", use_cpu=True, report_to="none", bf16=False)
    tensors = {name: torch.tensor(array) for name, array in inputs.items()}
    log_probs = tensors["log_probs"].requires_grad_()
    mask = tensors["mask"].int()
    ratio = torch.exp(tensors["old_log_probs"] - tensors["rollout_log_probs"])
    ratio = torch.where(mask.bool(), ratio.clamp(max=1.1), 1.0)
    accelerator = types.SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )
    trainer = types.SimpleNamespace(
        accelerator=accelerator,
        args=types.SimpleNamespace(
            delta=None,
            use_bias_correction_kl=changes.pop("use_bias_correction_kl", True),
            steps_per_generation=1,
            **{
                f"vespo_{name}": gamma.get(name, getattr(defaults, f"vespo_{name}"))
                for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
            },
        ),
        aux_loss_enabled=False,
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        importance_sampling_level="token",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
        current_gradient_accumulation_steps=1,
        max_completion_length=WIDTH,
        _entropy_bonus_enabled=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, tensors["entropies"], None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        model=types.SimpleNamespace(training=True),
    )
    trainer.get_high_entropy_mask = types.MethodType(
        _unwrapped(GRPOTrainer.get_high_entropy_mask), trainer
    )
    for name, value in changes.items():
        setattr(trainer, name, value)
    batch = {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.long),
        "prompt_mask": torch.ones((ROWS, 1), dtype=torch.long),
        "completion_ids": torch.zeros((ROWS, WIDTH), dtype=torch.long),
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old_log_probs"],
        "ref_per_token_logps": tensors["ref_log_probs"],
        "num_items_in_batch": mask.sum(),
    }
    if trainer.off_policy_mask_threshold is not None or corrects:
        batch["sampling_per_token_logps"] = tensors["rollout_log_probs"]
    if corrects:
        batch["importance_sampling_ratio"] = ratio
    with contextlib.suppress(AttributeError):
        trainer.loss_type = changes["loss_type"]
    loss = _unwrapped(GRPOTrainer._compute_loss)(trainer, None, batch)
    loss.backward()
    return loss.detach().numpy(), log_probs.grad.numpy()


def _unwrapped(function):
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def compute(seed):
    found = {}
    for number in range(3):
        inputs = arrays(1000 * seed + number)
        found |= {f"{number}/in/{name}": array for name, array in inputs.items()}
        for name, changes in LOSSES.items():
            loss, gradient = loss_and_gradient(inputs, changes)
            found |= {f"{number}/{name}/loss": loss, f"{number}/{name}/gradient": gradient}
        keep = GRPOTrainer.get_off_policy_mask(
            torch.tensor(inputs["advantages"])[:, None],
            torch.tensor(inputs["log_probs"]),
            torch.tensor(inputs["rollout_log_probs"]),
            torch.tensor(inputs["mask"]).int(),
            0.05,
        )
        found[f"{number}/off_policy_mask/kept"] = keep.numpy()[:, 0] > 0
    return found
