"""Tables of `docs/memory.md` that need no compiler: `python benchmarks/plan_tables.py`.

The planned effect of each memory saving for 3B to 70B models, and the fastest placement for each
cluster size in HybridFlow's cases (arXiv:2409.19256, Fig. 9 to 11).
"""

import time
from collections.abc import Iterator

from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import default_config_dict, from_config_dict
from jaxrl_llm.planning import memory_plan, pool_placement
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.planning.memory_plan import MemoryPlan
from jaxrl_llm.planning.pool_placement import Placement
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import ScoringModel

MODELS = (("Qwen2.5-3B", 8), ("Llama-3.1-8B", 8), ("Qwen2.5-32B", 16), ("Llama-3.1-70B", 64))
SAVINGS = (
    {"model.remat": "full"},
    {"trainer.max_tokens_per_microbatch": 4096},
    {"trainer.optimizer.moment_dtype": "bfloat16", "critic.optimizer.moment_dtype": "bfloat16"},
    {"model.param_dtype": "bfloat16"},
    {"mesh.rollout": "train"},
    {"mesh.on_host": ("reference",)},
    {"mesh.on_host": ("optimizer", "reference")},
    {"model.remat": "offload_full"},
    {"lora.rank": 32, "mesh.on_host": ()},
)
CASES = {
    "Llama-2-7b": (8, 16, 32, 64, 96, 128),
    "Llama-2-13b": (16, 32, 64, 96, 128),
    "Llama-2-34b": (32, 64, 96, 128),
    "Llama-2-70b": (64, 96, 128),
}
TOGETHER = (("policy", "critic", "reference", "reward"),)
SPLIT = (("policy", "reference"), ("critic", "reward"))
ALONE = tuple((role,) for role in TOGETHER[0])


def run(recipe: str) -> RLConfig:
    """Returns a run on sequences of 1024 + 1024 tokens without memory savings."""
    config = default_config_dict()
    config.algorithm.recipe = recipe
    if recipe == "grpo":
        config.algorithm.kl_in = "loss"
        config.trainer.prompts_per_step = 128
    else:
        config.algorithm.samples_per_prompt = 1
        config.trainer.prompts_per_step = 1024
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "none"
    config.trainer.max_tokens_per_microbatch = 16_384
    config.data.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 1024
    config.rollout.num_slots = 256
    config.trainer.minibatch_size = 128
    config.rewards.functions.length = {"function": "length"}
    return from_config_dict(config)


def plan(config: RLConfig, model: str, count: int, scored: bool) -> MemoryPlan:
    """Returns the plan on H200s; only its bytes are used."""
    shape = SHAPES[model]
    return memory_plan.make_plan(
        config, shape, (ScoringModel(shape, "scalar"),) * scored, DEVICES["h200"], count
    )


def savings(recipe: str) -> Iterator[str]:
    """Yields the rows of a table: settings, and GB per device with all savings so far."""
    config = run(recipe)
    yield "| settings | " + " | ".join(f"{name} on {count}" for name, count in MODELS) + " |"
    yield "|---" * (len(MODELS) + 1) + "|"
    for saving in ({}, *SAVINGS):
        config = memory_plan.with_changes(config, saving)
        peaks = [
            plan(config, name, count, recipe == "ppo").peak_bytes / 1e9 for name, count in MODELS
        ]
        title = ", ".join(f"`{key}={value}`" for key, value in saving.items())
        title = f"+ {title}" if saving else "float32 weights, nothing recomputed, 16k tokens"
        yield f"| {title} | " + " | ".join(f"{peak:.1f}" for peak in peaks) + " |"


def named(ranking: list[Placement], grouping) -> str:
    """Returns the seconds per step of one placement."""
    wanted = {frozenset(group) for group in grouping}
    found = next(p for p in ranking if {frozenset(group) for group in p.grouping} == wanted)
    return f"{found.step_s:.0f}" if found.fits else "-"


def placements() -> Iterator[str]:
    """Yields the rows of the table of HybridFlow's cases."""
    saved = {
        "model.remat": "full",
        "trainer.max_tokens_per_microbatch": 4096,
        "model.param_dtype": "bfloat16",
    }
    config = memory_plan.with_changes(run("ppo"), saved)
    yield "| model | GPUs | fastest | seconds | together | policy+reference / critic+reward |" + (
        " each alone | that fit |"
    )
    yield "|---" * 8 + "|"
    for model, counts in CASES.items():
        for count in counts:
            made = plan(config, model, count, scored=True)
            ranking = pool_placement.rank_placements(made.setting, DEVICES["a100"], count)
            best = ranking[0]
            name = best.name.replace(" | ", " / ") if best.fits else "none fits"
            cells = [model, count, name, f"{best.step_s:.0f}" if best.fits else "-"]
            cells += [named(ranking, grouping) for grouping in (TOGETHER, SPLIT, ALONE)]
            cells.append(sum(place.fits for place in ranking))
            yield "| " + " | ".join(map(str, cells)) + " |"


def ranked() -> Iterator[str]:
    """Yields the time that the ranking of all placements takes."""
    for model, count in (("Llama-3.1-8B", 16), ("Llama-3.1-70B", 128)):
        made = plan(run("ppo"), model, count, scored=True)
        start = time.perf_counter()
        pool_placement.rank_placements(made.setting, DEVICES["v5p"], count)
        yield f"15 placements of {model} on {count}: {time.perf_counter() - start:.2f} s"


def main():
    for rows in (savings("ppo"), savings("grpo"), placements(), ranked()):
        print("\n".join(rows), end="\n\n")


if __name__ == "__main__":
    main()
