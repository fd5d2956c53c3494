"""Many steps in a row: memory, file handles and compiled programs stay as they are."""

import gc
import logging
import os

import jax
import pytest
import recipe_settings
from absl import logging as absl_logging

from jaxrl_llm.trainer import rl
from jaxrl_llm.trainer.interruption import InterruptionHandler

BEFORE_A_SAVE = 90  # of 100 steps: the checkpoint before is written, the next one not begun
SETTLED = 100 + BEFORE_A_SAVE
CHANGES = {
    "model": {"hidden_size": 16, "num_heads": 1, "num_kv_heads": 1, "mlp_size": 16},
    "rollout": {"max_response_tokens": 4},
    "algorithm": {"samples_per_prompt": 2},
    "warm_start": {"num_steps": 0},
    "trainer": {"prompts_per_step": 1},
    "checkpoint": {"every": 100},
    "metrics": {"rollouts_every": 100, "tensorboard": True},
}


def host_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "num_steps",
    [pytest.param(500, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)],
)
def test_memory_and_handles_do_not_grow(num_steps, tmp_path, one_device, monkeypatch):
    seen: dict[int, dict[str, int]] = {}
    compiled = 0

    def count(event: str, *_, **__) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration"

    resume_point = InterruptionHandler.set_resume_point

    def looked(self, step, save):
        if step % 100 == BEFORE_A_SAVE:
            gc.collect()
            seen[step] = {
                "host": host_bytes(),
                "device": sum(array.nbytes for array in jax.live_arrays()),
                "handles": len(os.listdir("/proc/self/fd")),
                "compiled": compiled,
            }
        resume_point(self, step, save)

    monkeypatch.setattr(InterruptionHandler, "set_resume_point", looked)
    monkeypatch.setattr(absl_logging, "_warn_preinit_stderr", 0)
    logging.disable(logging.WARNING)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        changes = recipe_settings.merged(CHANGES, {"trainer": {"num_steps": num_steps}})
        rl.train(recipe_settings.config("grpo", changes), tmp_path / "run")
    finally:
        logging.disable(logging.NOTSET)
        jax.monitoring.unregister_event_duration_listener(count)
    first, last = seen[SETTLED], seen[max(seen)]
    looks = [seen[step] for step in sorted(seen) if step >= SETTLED]
    print(looks)
    assert max(seen) == num_steps - 100 + BEFORE_A_SAVE and first["compiled"] > 0
    assert last["compiled"] == first["compiled"]
    # A slow disk may still write a checkpoint; what is never closed is open at all later looks.
    handles = [look["handles"] for look in looks]
    assert min(handles[len(handles) // 2 :]) <= max(handles[: len(handles) // 2])
    assert last["device"] <= 1.02 * first["device"]
    assert last["host"] <= 1.02 * first["host"]
