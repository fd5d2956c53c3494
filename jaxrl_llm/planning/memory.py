"""How many bytes each program of a run needs on a device: an estimate in closed form.

What a program is given is counted exactly (`setting`), what it makes and drops by the phases
it goes through (`working`).
"""

import dataclasses

from jaxrl_llm.planning import working
from jaxrl_llm.planning.setting import (
    COMPILERS,
    PARTS,
    Parts,
    Setting,
    counted,
    rollout_ends,
    rollout_weights,
    trained,
)
from jaxrl_llm.planning.sizes import ITEM_BYTES, counts
from jaxrl_llm.sharding import mesh as mesh_lib

__all__ = ["PARTS", "Parts", "Setting", "estimate", "peak", "resident", "step"]


def estimate(setting: Setting) -> dict[str, Parts]:
    """Returns what each program itself needs: its arguments, what it keeps and what it drops.

    Programs are named as in `learner/lowering.py`; what lies beside a program while it runs is
    not in it, see `resident`.
    """
    programs = {
        "prefill": working.prefill(setting),
        "decode": working.decode(setting),
        "score": working.score(setting, "lm"),
        "train": working.train(setting),
        "reshard": working.reshard(setting),
        "reshard_layer": working.reshard_layer(setting),
    }
    if setting.config.algorithm.needs_critic:
        programs["score_critic"] = working.score(setting, "scalar")
    return programs


def resident(setting: Setting) -> Parts:
    """Returns what lies on a device all through a step: every model, optimizer, rollout copy."""
    config = setting.config
    critics = config.algorithm.needs_critic + config.algorithm.safe
    parts = trained(setting, "lm")
    for _ in range(critics):
        parts += trained(setting, "scalar")
    # Below adapters the reference is the base: no copy of its own.
    copies = config.algorithm.needs_reference and not config.lora.rank
    frozen = [("lm", setting.policy)] * copies
    frozen += [("scalar", shape) for shape in setting.scorers]
    item = ITEM_BYTES[config.model.param_dtype]
    for head, shape in frozen:
        held = counts(shape, head, mesh_lib.TRAIN, setting.mesh)
        parts += Parts(weights=held.all * item)
    return parts + Parts(weights=rollout_weights(setting))


def role_bytes(setting: Setting) -> dict[str, float]:
    """Returns what each of four roles keeps on a device all through a step."""
    item = ITEM_BYTES[setting.config.model.param_dtype]
    judge = setting.scorers[0] if setting.scorers else setting.policy
    return {
        "policy": trained(setting, "lm").total + rollout_weights(setting),
        "critic": trained(setting, "scalar").total,
        "reference": float(counted(setting, "lm").all * item),
        "reward": float(counts(judge, "scalar", mesh_lib.TRAIN, setting.mesh).all * item),
    }


def role_work(setting: Setting) -> dict[str, float]:
    """Returns the most that the programs of each of four roles make and drop at one time."""
    given = _arguments(setting)
    own = {
        name: (parts + _negative(given[name])).total for name, parts in estimate(setting).items()
    }
    learning = own["train"]
    if setting.config.algorithm.needs_critic:
        waiting = COMPILERS[setting.backend].waiting
        learning -= waiting * 4.0 * counted(setting, "lm").all  # a pool trains one at a time
    scored = own["score"]
    return {
        "policy": max(learning, scored, own["decode"], own["prefill"]),
        "critic": learning,
        "reference": scored,
        "reward": scored,
    }


def step(setting: Setting) -> dict[str, Parts]:
    """Returns what is on a device while each program runs: the program and all that lies beside."""
    beside = resident(setting)
    arguments = _arguments(setting)
    return {
        name: beside + own + _negative(arguments[name]) for name, own in estimate(setting).items()
    }


def peak(setting: Setting) -> float:
    """Returns the most bytes that a device holds during a step."""
    return max(parts.total for parts in step(setting).values())


def _negative(parts: Parts) -> Parts:
    return Parts(**{k: -v for k, v in dataclasses.asdict(parts).items()})


def _arguments(setting: Setting) -> dict[str, Parts]:
    """Returns the arguments of each program that are part of `resident`."""
    rollout = Parts(weights=rollout_weights(setting))
    learners = trained(setting, "lm")
    for _ in range(setting.config.algorithm.needs_critic + setting.config.algorithm.safe):
        learners += trained(setting, "scalar")
    end, layer = rollout_ends(setting)
    policy = counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    return {
        "prefill": rollout,
        "decode": rollout,
        "score": Parts(weights=policy.all * item),
        "score_critic": Parts(weights=counted(setting, "scalar").all * item),
        "train": learners,
        "reshard": Parts(weights=end + (policy.embed + policy.rest) * item),
        "reshard_layer": Parts(weights=layer + policy.layers * item),
    }
