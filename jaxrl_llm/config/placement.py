"""The mesh, pools of devices, and the pool of each role.

Roles on the same pool run one after the other, roles on different pools at the same time.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from jaxrl_llm.config.validation import ConfigGroup, Name, Problems, Range

Axis = Annotated[int, Range("-1 or [1, 1000000]", "-1: the rest")]
PoolAxis = Annotated[int, Range("-1 or [0, 1000000]", "-1: the rest, 0: as config.mesh")]

# "critic" means both critics of Safe-RLHF, "reward" all reward and cost models, and teachers.
ROLES = ("policy", "critic", "reference", "reward", "rollout")

# The roles of each pool. All pools have the same number of devices; a pool without any role of the
# run gets none.
CHOICES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "colocate": (ROLES,),
    "split": (("policy", "reference", "rollout"), ("critic", "reward")),
    "hybrid": (("policy", "rollout"), ("critic", "reference", "reward")),
    "standalone": tuple((role,) for role in ROLES),
}


# Keys that a run may change between two steps (`trainer.layouts`, `jaxrl_llm control`).
LAYOUT_KEYS = (
    *(f"mesh.{axis}" for axis in ("data", "fsdp", "expert", "sequence", "tensor")),
    "mesh.rollout",
    "placement.choice",
)


class ProcessesConfig(ConfigGroup):
    """Multi-process initialization; command-line flags, not settings of a job."""

    start: Literal["auto", "one", "addresses", "slurm", "jobset", "tpu", "openmpi"] = "auto"
    coordinator: Name = ""  # HOST:PORT of process 0
    # -1: as the launcher says.
    num_processes: Annotated[int, Range("[-1, 2147483647]")] = -1
    process_id: Annotated[int, Range("[-1, 2147483647]")] = -1


class MeshConfig(ConfigGroup):
    """Sizes of the mesh axes; one axis may be -1: the remaining devices."""

    stage: Axis = 1  # pipeline stages of layers
    data: Axis = 1
    fsdp: Axis = -1
    expert: Axis = 1  # experts; other weights are split as by fsdp
    sequence: Axis = 1
    tensor: Axis = 1
    # Interleaving: passes of a microbatch over all stages. More: a smaller bubble, more traffic.
    stage_rounds: Annotated[int, Range("[1, 1024]")] = 1
    # Attention of rows split by length (context parallelism): all-to-all over heads, or ring.
    sequence_attention: Literal["all_to_all", "ring"] = "all_to_all"
    # Sharding of rollout weights: by the tensor axis, as in training, by all model axes, or none.
    rollout: Literal["tensor", "train", "all_tensor", "replicas"] = "tensor"
    on_host: tuple[
        Name, ...
    ] = ()  # offloaded to host memory between uses: "optimizer", "reference"

    def rules(self) -> Problems:
        axes = "stage", "data", "fsdp", "expert", "sequence", "tensor"
        sizes = {name: getattr(self, name) for name in axes}
        if sum(size == -1 for size in sizes.values()) > 1:
            yield "fsdp", f"at most one axis may be -1 (the rest), got {sizes}"
        if self.rollout == "train" and self.stage != 1:
            message = "'train': weights that are split over stages do not sample"
            yield "rollout", f"{message}; use another, or mesh.stage=1"
        if unknown := set(self.on_host) - {"optimizer", "reference"}:
            yield "on_host", f"unknown {sorted(unknown)}; known: 'optimizer', 'reference'"


class PoolConfig(ConfigGroup):
    """A pool of devices and its mesh; an axis of 0 has the size of `config.mesh`."""

    devices: Axis = -1  # total over all hosts
    stage: PoolAxis = 0
    data: PoolAxis = 0
    fsdp: PoolAxis = 0
    expert: PoolAxis = 0
    sequence: PoolAxis = 0
    tensor: PoolAxis = 0


class PlacementConfig(ConfigGroup):
    """The devices of each role; "auto": the fastest placement according to the planner."""

    choice: Literal["colocate", "split", "hybrid", "standalone", "by_hand", "auto"] = "colocate"
    # Only for "by_hand": pools by name, and the pool of each role.
    pools: Mapping[str, PoolConfig] = dataclasses.field(default_factory=dict)
    # Whether a pool takes equally many devices of each host, or whole hosts, in the order of pools.
    hosts: Literal["shared", "own"] = "shared"
    roles: Mapping[str, Name] = dataclasses.field(default_factory=dict)
    # Steps of an async run after which devices move between the rollout pool and the other pool, to
    # the one that the other waits for.
    balance_every: Annotated[int, Range("[0, 2147483647]", "0: they stay")] = 0

    def rules(self) -> Problems:
        alone = [role for role, pool in self.roles.items() if pool == self.roles.get("rollout")]
        if self.balance_every and (len(self.pools) != 2 or alone != ["rollout"]):
            yield "balance_every", "needs two pools by hand, one of them of rollout alone"
        if self.balance_every and self.hosts == "own":
            yield "balance_every", "devices of pools on hosts of their own stay; use hosts='shared'"
        if self.choice != "by_hand":
            if self.pools or self.roles:
                yield "choice", f"{self.choice!r} names no pools; set it to 'by_hand'"
            return
        for role, pool in self.roles.items():
            if role not in ROLES:
                yield f"roles.{role}", f"unknown role; known: {', '.join(ROLES)}"
            if pool not in self.pools:
                message = f"no pool is called {pool!r}; config.placement.pools:"
                yield f"roles.{role}", f"{message} {', '.join(self.pools) or 'none'}"
        for role in ROLES:
            if role not in self.roles:
                yield f"roles.{role}", "no pool; 'by_hand' says where every role lives"
        for pool in self.pools:
            if pool not in self.roles.values():
                yield f"pools.{pool}", "no role lives there, its devices would be idle"
            only = {role for role, home in self.roles.items() if home == pool}
            if only == {"rollout"} and self.pools[pool].stage not in (0, 1):
                yield f"pools.{pool}.stage", "an engine has no stages; use data, and stage=1"
        if sum(pool.devices == -1 for pool in self.pools.values()) > 1:
            yield "pools", "at most one pool may have devices=-1 (the rest)"

    def pools_and_roles(
        self, used: Collection[str]
    ) -> tuple[dict[str, PoolConfig], dict[str, str]]:
        """Pools by name and the pool of each role, for a run with the roles in `used`.

        The pools of a predefined choice have `devices` -1, an equal share.
        """
        if self.choice == "by_hand":
            return dict(self.pools), dict(self.roles)
        groups = [group for group in CHOICES[self.choice] if any(role in used for role in group)]
        pools = {"+".join(group): PoolConfig() for group in groups}
        roles = {role: "+".join(group) for group in groups for role in group}
        # Other code expects a pool for every role, also for roles that the run does not have.
        return pools, {role: roles.get(role, roles["policy"]) for role in ROLES}
