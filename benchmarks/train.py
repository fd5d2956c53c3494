"""Throughput of the update and of scoring on CPU, beside a plain PyTorch loop and the peers.

`python benchmarks/train.py --peers=FOLDER` (set-up of the peers: README of that folder)

32 sequences of 64 prompt and 64 response tokens, float32. The update is the reference's pass,
the policy's forward and backward pass with the clipped ratio and 0.04 times the KL to the
reference, clipping of the gradient and AdamW; scoring is one pass of the policy that gives
log-probs and entropies. Of TRL and Tunix, the same part of a whole iteration is timed.
"""

import pathlib
import statistics

import side_by_side

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUMBERS = ("tok_per_s", "median_s", "score_tok_per_s", "first_s", "peak_rss_mb")
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 64


def measure(arguments) -> None:
    """Times our update and scoring in this process and prints the report."""
    import jax

    bench = Bench(side_by_side.model_folder(arguments.models[0]))
    now = side_by_side.clock(arguments.clock)

    def timed(function, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = now()
            jax.block_until_ready(function())
            seconds.append(now() - start)
        return seconds

    first, *updates = timed(bench.update, 1 + arguments.warmup + arguments.steps)
    updates = updates[arguments.warmup :]
    scores = timed(bench.score, 1 + arguments.steps)[1:]
    tokens = SEQUENCES * (PROMPT_TOKENS + NEW_TOKENS)
    side_by_side.emit(
        {
            "what": "train",
            "model": bench.model.name,
            "tok_per_s": tokens / statistics.median(updates),
            "median_s": statistics.median(updates),
            "min_s": min(updates),
            "max_s": max(updates),
            "n": len(updates),
            "first_s": first,
            "score_s": statistics.median(scores),
            "score_tok_per_s": tokens / statistics.median(scores),
            "clock": arguments.clock,
            "peak_rss_mb": side_by_side.peak_memory_mb(),
        }
    )


class Bench:
    """One step's sequences and the programs that learn from them."""

    def __init__(self, model: pathlib.Path):
        import jax
        import numpy as np

        from jaxrl_llm.config_bridge import default_config_dict, from_config_dict
        from jaxrl_llm.learner import experience, update
        from jaxrl_llm.learner import roles as roles_lib
        from jaxrl_llm.types import Estimates, Rollouts

        self.model = model
        settings = default_config_dict()
        settings.model.path = str(model)
        settings.rewards.functions.length = {"function": "length"}
        settings.algorithm.recipe = "grpo"
        settings.algorithm.samples_per_prompt = 4
        settings.algorithm.kl_in = "loss"
        settings.algorithm.kl_coef = 0.04
        settings.data.max_prompt_tokens = PROMPT_TOKENS
        settings.rollout.max_response_tokens = NEW_TOKENS
        settings.trainer.prompts_per_step = SEQUENCES // 4
        settings.trainer.optimizer.learning_rate = 1e-6
        with side_by_side.own_tokenizer(model) as folder:
            settings.model.tokenizer = folder
            roles = roles_lib.build(from_config_dict(settings))
        policy = roles_lib.initial_policy(roles)
        self._roles = roles_lib.with_frozen_models(roles, policy, {})
        self._state = roles_lib.initial_state(self._roles, policy)
        self._predict = experience.predictor(self._roles)
        self._learn = update.updater(self._roles, self._state)
        self._assemble = experience.assemble
        self._key = jax.random.key(0)
        self._minibatches = experience.minibatches

        random = np.random.default_rng(0)
        shape = (SEQUENCES, PROMPT_TOKENS + NEW_TOKENS)
        mask = np.broadcast_to(np.arange(shape[1]) >= PROMPT_TOKENS, shape).copy()
        self._rollouts = Rollouts(
            tokens=random.integers(2, roles.policy.shape.vocab_size, shape, np.int32),
            response_mask=mask,
            rollout_log_probs=np.where(mask, -np.log(roles.policy.shape.vocab_size), 0.0).astype(
                np.float32
            ),
            lengths=np.full(shape[0], shape[1], np.int32),
            group_ids=np.repeat(np.arange(SEQUENCES // 4, dtype=np.int32), 4),
            stopped=np.zeros(shape[0], bool),
            prompts=(),
            responses=("",) * shape[0],
        )
        advantages = np.where(mask, random.standard_normal((shape[0], 1)), 0).astype(np.float32)
        zeros = np.zeros(shape, np.float32)
        self._estimates = Estimates(
            shaped_rewards=zeros,
            advantages=jax.numpy.asarray(advantages),
            returns=jax.numpy.asarray(zeros),
            cost_returns=jax.numpy.asarray(zeros),
            loss_mask=jax.numpy.asarray(mask),
            correction_weights=jax.numpy.asarray(mask.astype(np.float32)),
        )

    def score(self):
        """Returns what the models say of the sequences, the reference left out."""
        import dataclasses

        alone = dataclasses.replace(self._roles, reference_params={})
        del alone
        return self._predict(self._state, self._rollouts)

    def update(self):
        """Asks the reference and takes one update; returns the parameters."""
        predictions = self._predict(self._state, self._rollouts)
        batch = self._assemble(self._rollouts, predictions, self._estimates)
        for plan, key in self._minibatches(self._roles, self._rollouts, self._key):
            self._state, metrics = self._learn(self._state, batch, plan, key)
        return metrics
