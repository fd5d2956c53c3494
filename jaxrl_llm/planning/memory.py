"""How many bytes each program of a run needs on a device: an estimate in closed form.

What a program is given is counted exactly (`setting`), what it makes and drops by the phases
it goes through (`working`).
"""

import dataclasses
from collections.abc import Collection

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.planning import working
from jaxrl_llm.planning.setting import PARTS, Parts, Setting, counted, resting, rollout_ends
from jaxrl_llm.planning.sizes import ITEM_BYTES, num_params

__all__ = ["PARTS", "Parts", "Setting", "estimate", "peak", "resident", "step"]


def estimate(setting: Setting, roles: Collection[str] = ROLES) -> dict[str, Parts]:
    """Returns what each program itself needs: its arguments, what it keeps and what it drops.

    Programs are named as in `learner/lowering.py`, and `score_reward`; what lies beside a
    program while it runs is not in it, see `resident`.

    Args:
      setting: The run on a mesh.
      roles: Who lives there, of `placement.ROLES`; those that the run does not have are nothing.
    """
    algorithm = setting.config.algorithm
    learners = [role for role in ("policy", "critic") if role in roles and setting.has(role)]
    programs = {}
    if "rollout" in roles:
        programs["prefill"] = working.prefill(setting)
        programs["decode"] = working.decode(setting)
    if "policy" in roles or ("reference" in roles and needs.of(algorithm).reference):
        programs["score"] = working.score(setting, "lm")
    if "critic" in learners:
        programs["score_critic"] = working.score(setting, "scalar")
    if "reward" in roles and setting.scorers:
        programs["score_reward"] = working.score(_judge(setting), "scalar")
    if learners:
        programs["train"] = working.train(setting, learners)
    if "policy" in roles:
        programs["reshard"] = working.reshard(setting)
        programs["reshard_layer"] = working.reshard_layer(setting)
    return programs


def resident(setting: Setting, roles: Collection[str] = ROLES) -> Parts:
    """Returns what lies on a device all through a step: every model, optimizer, rollout copy."""
    return sum((resting(setting, role) for role in roles), Parts())


def step(setting: Setting, roles: Collection[str] = ROLES) -> dict[str, Parts]:
    """Returns what is on a device while each program runs: the program and all that lies beside."""
    beside = resident(setting, roles)
    return {
        name: beside + own + _negative(_resting_arguments(setting, name, roles))
        for name, own in estimate(setting, roles).items()
    }


def peak(setting: Setting, roles: Collection[str] = ROLES) -> float:
    """Returns the most bytes that a device holds during a step."""
    return max((parts.total for parts in step(setting, roles).values()), default=0.0)


def _judge(setting: Setting) -> Setting:
    """Returns the setting with the largest of its reward and cost models for a policy."""
    largest = max(setting.scorers, key=num_params)
    return dataclasses.replace(setting, policy=largest)


def _negative(parts: Parts) -> Parts:
    return Parts(**{k: -v for k, v in dataclasses.asdict(parts).items()})


def _resting_arguments(setting: Setting, program: str, roles: Collection[str]) -> Parts:
    """Returns the arguments of a program that `resident` has counted already."""
    item = ITEM_BYTES[setting.config.model.param_dtype]
    policy = counted(setting, "lm")
    end, layer = rollout_ends(setting)
    if program == "train":
        return sum((resting(setting, r) for r in ("policy", "critic") if r in roles), Parts())
    if program in ("prefill", "decode"):
        return resting(setting, "rollout")
    if program == "score_critic":
        return Parts(weights=counted(setting, "scalar").all * item)
    if program == "score_reward":
        return Parts(weights=counted(_judge(setting), "scalar").all * item)
    if program == "score":
        # What rests in the host's memory is brought back whole: a copy that `resident` has not.
        brought = "reference" in setting.config.mesh.on_host and setting.has("reference")
        return Parts() if brought else Parts(weights=policy.all * item)
    mine = "rollout" in roles
    if program == "reshard":
        return Parts(weights=end * mine + (policy.embed + policy.rest) * item)
    return Parts(weights=layer * mine + policy.layers * item)
