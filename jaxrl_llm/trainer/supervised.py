"""The stages before RL: warm start of the policy, training of a reward model.

Each stage writes its product to the run's folder; a resumed run reads it there.
"""

import functools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from jaxrl_llm import checkpoint
from jaxrl_llm.algorithms import supervised_losses
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.config import SupervisedConfig
from jaxrl_llm.data import packing, supervised
from jaxrl_llm.data.datasets import Stream
from jaxrl_llm.learner import optimizer, update
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.learner.batches import Layout, Microbatch
from jaxrl_llm.learner.roles import Roles
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import mesh as mesh_lib


def warm_start(roles: Roles, params: Params, workdir: pathlib.Path) -> Params:
    """Returns the policy after supervised training on worked examples (or as it was).

    The loss is the cross-entropy of the answer's tokens, a mean over all of a batch.
    """
    config = roles.config
    if not config.warm_start.num_steps:
        return params
    examples = supervised.worked_examples(config.data, roles.tokenizer, "train", config.seed)
    rows = [[(prompt, answer)] for prompt, answer in examples]
    network = roles.policy

    def loss(params, microbatch: Microbatch, tokens, lengths, mask):
        log_probs, _, _ = update.token_statistics(
            network,
            params,
            tokens,
            microbatch,
            temperature=1.0,
            chunk=config.model.vocab_chunk,
            entropy="none",
        )
        log_probs = microbatch.unpacked(log_probs, lengths, tokens.shape[1])
        return supervised_losses.token_cross_entropy(
            log_probs, microbatch.take(mask), minibatch_denominators(mask)
        )

    return _stage(roles, params, config.warm_start, rows, loss, workdir / "warm_start", roles.mesh)


def reward_models(roles: Roles, params: Params, workdir: pathlib.Path) -> dict[str, Params]:
    """Returns the parameters of every reward model without a folder, trained on preference pairs.

    Body from the policy, score from zero; the loss is Bradley and Terry's.
    """
    config = roles.config
    models = {**config.rewards.models, **config.rewards.cost_models}
    names = [name for name, model in models.items() if not model.path]
    if not names:
        return {}
    pairs = supervised.preference_pairs(config.data, roles.tokenizer, "train", config.seed)
    rows = [[(prompt, chosen), (prompt, rejected)] for prompt, chosen, rejected in pairs]
    network = roles.value

    def loss(params, microbatch: Microbatch, tokens, lengths, mask):
        scores = update.sequence_scores(network, params, tokens, lengths, microbatch)
        by_sequence = microbatch.put(jnp.zeros(tokens.shape[0]), scores)
        num_pairs = tokens.shape[0] // 2
        return supervised_losses.bradley_terry(
            by_sequence[0::2], by_sequence[1::2], jnp.ones(num_pairs, bool), num_pairs
        )

    trained = _stage(
        roles,
        roles_lib.scalar_from_policy(roles, params, "reward"),
        config.preference,
        rows,
        loss,
        workdir / "reward_model",
        roles.meshes["reward"],
    )
    return {name: trained for name in names}


def _stage(
    roles: Roles,
    params: Params,
    config: SupervisedConfig,
    rows: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]],
    loss,
    folder: pathlib.Path,
    mesh: Mesh,
) -> Params:
    """Returns `params` after `num_steps` updates; or what an earlier run left in `folder`."""
    if folder.exists():
        return checkpoint.load_tree(folder, roles_lib.abstract(params))[0]

    transformation = optimizer.make(config.optimizer, config.num_steps)
    role = roles_lib.trainable(params, config.optimizer, config.num_steps, mesh)
    replicated = mesh_lib.replicated(mesh)
    compute_dtype = roles.config.model.compute_dtype

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda a: a.sharding, role), replicated),
    )
    def step(role, tokens, lengths, mask, plan):
        def of_microbatch(params, microbatch):
            return loss(params, microbatch, tokens, lengths, mask)

        return update.take_update(
            role, transformation, plan, of_microbatch, compute_dtype, folder.name
        )

    # What belongs together, as the two answers of a pair, must meet in one microbatch.
    budget = roles.config.trainer.max_tokens_per_microbatch if len(rows[0]) == 1 else 1 << 40
    layout = Layout(budget, *mesh_lib.row_shards(mesh))
    stream = Stream(rows, roles.config.seed)
    for i in range(config.num_steps):
        sequences = [pair for row in stream.take(config.batch_size) for pair in row]
        tokens, lengths, mask = _padded(sequences)
        plan = layout.plan(lengths, np.arange(len(lengths)), width=tokens.shape[1])
        with jax.set_mesh(mesh):
            role, metrics = step(role, tokens, lengths, mask, plan)
        if i % 50 == 0 or i + 1 == config.num_steps:
            logging.info(
                "%s: update %d of %d, loss %.4f",
                folder.name,
                i + 1,
                config.num_steps,
                float(metrics[f"{folder.name}/loss"]),
            )
    if skipped := config.num_steps - int(role.num_updates):
        logging.warning(
            "%s: %d of %d updates were skipped, their results were not finite;"
            " lower the learning rate, or raise the optimizer's eps",
            folder.name,
            skipped,
            config.num_steps,
        )
    checkpoint.save_tree(folder, role.params, {"num_steps": config.num_steps})
    return role.params


def _padded(sequences) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens [B, T], lengths [B] and the mask of the answers' tokens [B, T]."""
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in sequences], np.int32)
    shape = (len(sequences), packing.bucket(int(lengths.max()), smallest=32))
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, (prompt, answer) in enumerate(sequences):
        tokens[row, : lengths[row]] = [*prompt, *answer]
        mask[row, len(prompt) : lengths[row]] = True
    return tokens, lengths, mask
