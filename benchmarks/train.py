"""Compares update and scoring on CPU with a plain PyTorch loop, TRL and Tunix.

`python benchmarks/train.py --peers=FOLDER` (its README says how to install the peers)

32 sequences of 64 prompt and 64 response tokens, float32. The update has the forward pass of the
reference, the forward and backward pass of the policy with the clipped ratio and 0.04 times the KL
to the reference, gradient clipping and AdamW. Scoring is one forward pass that computes log-probs
and entropies. For TRL and Tunix the figure is a whole iteration minus its rollout.
"""

import argparse
import pathlib
import statistics
import sys

import side_by_side

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUMBERS = ("tok_per_s", "median_s", "score_tok_per_s", "matmul_gflops", "first_s", "peak_rss_mb")
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 64
TOKENS = SEQUENCES * (PROMPT_TOKENS + NEW_TOKENS)


def measure(arguments) -> None:
    """Times our update and scoring in this process and prints the report."""
    import jax

    now = side_by_side.clock(arguments.clock)

    def timed(function, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = now()
            jax.block_until_ready(function())
            seconds.append(now() - start)
        return seconds

    model = side_by_side.model_folder(arguments.models[0])
    work = Work(*_of_folder(model, arguments.microbatch_tokens))
    first, *updates = timed(work.update, 1 + arguments.warmup + arguments.steps)
    updates = updates[arguments.warmup :]
    scores = timed(work.score, 1 + arguments.steps)[1:]
    side_by_side.emit(
        {
            "what": "train",
            "model": model.name,
            "tok_per_s": TOKENS / statistics.median(updates),
            "median_s": statistics.median(updates),
            "min_s": min(updates),
            "max_s": max(updates),
            "n": len(updates),
            "first_s": first,
            "score_tok_per_s": TOKENS / statistics.median(scores),
            "matmul_gflops": _matmul_gflops(timed),
            "clock": arguments.clock,
            "peak_rss_mb": side_by_side.peak_memory_mb(),
        }
    )


def _matmul_gflops(timed) -> float:
    """Returns the speed of the matmul [4096, 512] x [512, 1280], the largest in M2's layers."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((4096, 512)), jnp.ones((512, 1280))
    product = jax.jit(jnp.matmul)
    seconds = timed(lambda: [product(a, b).block_until_ready() for _ in range(20)], 4)
    return 20 * 2 * 4096 * 512 * 1280 / min(seconds) / 1e9


def _of_folder(model: pathlib.Path, microbatch_tokens: int):
    """Returns the config of this benchmark with the model of a folder, and the run's models."""
    from jaxrl_llm.config.bridge import default_config_dict, from_config_dict
    from jaxrl_llm.learner import job_models

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
    settings.trainer.max_tokens_per_microbatch = microbatch_tokens
    settings.trainer.optimizer.learning_rate = 1e-6
    with side_by_side.own_tokenizer(model) as folder:
        settings.model.tokenizer = folder
        config = from_config_dict(settings)
        return config, job_models.make_models(config)


class Work:
    """The sequences of one step, each as long as may be, and the programs that train on them."""

    def __init__(self, config, models):
        import numpy as np

        from jaxrl_llm.learner import predict, update, weights
        from jaxrl_llm.types import Rollouts

        policy = weights.initial_policy(config, models)
        frozen = weights.load_frozen(config, models, policy, {})
        self._config, self._models = config, models
        self._state = weights.initial_state(config, models, policy)
        self._predict = predict.predictor(config, models, frozen)
        self._learn = update.make_updater(config, models, frozen.base_params, self._state)
        self._of_policy, _ = predict.scoring_programs(config, models)

        random = np.random.default_rng(0)
        shape = (config.sequences_per_step, config.max_sequence_tokens)
        prompts, group = config.trainer.prompts_per_step, config.algorithm.samples_per_prompt
        mask = np.broadcast_to(np.arange(shape[1]) >= config.data.max_prompt_tokens, shape).copy()
        self._advantages = np.where(mask, random.standard_normal((shape[0], 1)), 0.0)
        self._rollouts = Rollouts(
            tokens=random.integers(2, models.policy.shape.vocab_size, shape, np.int32),
            response_mask=mask,
            rollout_log_probs=np.where(mask, -6.0, 0.0).astype(np.float32),
            versions=np.zeros(shape, np.int32),
            lengths=np.full(shape[0], shape[1], np.int32),
            group_ids=np.repeat(np.arange(prompts, dtype=np.int32), group),
            stopped=np.zeros(shape[0], bool),
            prompts=(),
            responses=("",) * shape[0],
        )

    def score(self):
        """Returns the predictions of the policy for the sequences."""
        import jax

        packed, _ = self._minibatch()
        with jax.set_mesh(self._models.mesh):
            return self._of_policy(
                {},
                self._state.policy.params,
                self._rollouts.tokens,
                self._rollouts.lengths,
                packed,
                entropy="value",
            )

    def _minibatch(self):
        """Returns all sequences in packed rows, and the random key of their update."""
        import jax

        from jaxrl_llm.learner import batches

        order = batches.update_order(self._config, len(self._rollouts.lengths), jax.random.key(0))
        (found,) = batches.minibatches(self._models.packer, self._rollouts, order)
        return found

    def update(self):
        """Scores with the reference, takes one update and returns its metrics."""
        import jax.numpy as jnp

        from jaxrl_llm.learner import batches
        from jaxrl_llm.metrics.timers import Clock
        from jaxrl_llm.types import Estimates

        predictions, _ = self._predict(self._state, self._rollouts, Clock())
        mask = jnp.asarray(self._rollouts.response_mask)
        zeros = jnp.zeros(mask.shape)
        estimates = Estimates(
            shaped_rewards=zeros,
            advantages=jnp.asarray(self._advantages, jnp.float32),
            returns=zeros,
            cost_returns=zeros,
            loss_mask=mask,
            correction_weights=mask.astype(jnp.float32),
        )
        batch = self._learn.replicate_batch(
            batches.assemble(self._rollouts, predictions, estimates)
        )
        self._state, metrics = self._learn.update(self._state, batch, *self._minibatch())
        return metrics


def compare(arguments) -> None:
    """Runs all systems in turns and prints the table of each model."""
    one = ["--threads", "1"] if arguments.clock == "cpu" else []
    torch, tunix = (side_by_side.PYTHONS[name] for name in ("torch", "tunix"))
    repeat = ["--reps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    steps = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    scripts = {
        "torch": (torch, "train_torch.py", ["--mode", "grpo-noold", *repeat, *one]),
        "trl": (torch, "grpo_trl.py", [*steps, *one]),
        "tunix": (tunix, "grpo_tunix.py", steps),
    }
    if not arguments.peers:
        scripts = {}
    for model in arguments.models:
        ours = [sys.executable, __file__, "--measure", "--models", model, *steps]
        programs: dict[str, side_by_side.Command] = {
            "jaxrl_llm": [
                *ours,
                *("--clock", arguments.clock),
                *("--microbatch-tokens", str(arguments.microbatch_tokens)),
            ]
        }
        for name, (python, script, more) in scripts.items():
            path = pathlib.Path(arguments.peers) / script
            programs[name] = [python, path, "--model", model, *more]
        wanted = arguments.systems or list(programs)
        programs = {name: command for name, command in programs.items() if name in wanted}
        reports = side_by_side.alternate(programs, arguments.rounds, arguments.clock)
        for row in (row for rows in reports.values() for row in rows):
            if "iter_s" in row:  # a whole iteration minus the rollout
                row["median_s"] = float(row["iter_s"]) - float(row["generate_s"])  # type: ignore[arg-type]
                row["tok_per_s"] = TOKENS / row["median_s"]
        title = f"Update, {model}, {arguments.clock} seconds"
        side_by_side.print_table(title, reports, NUMBERS, "tok_per_s")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    side_by_side.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, help="timed updates per run")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="run only ours, in this process")
    arguments = parser.parse_args()
    measure(arguments) if arguments.measure else compare(arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
