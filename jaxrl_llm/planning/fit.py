"""Whether a run fits its devices, by how much, and what every pool of devices holds."""

import dataclasses
from collections.abc import Mapping

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import memory
from jaxrl_llm.planning.devices import Device
from jaxrl_llm.planning.setting import Parts, Setting
from jaxrl_llm.sharding import pools
from jaxrl_llm.sharding.mesh import mesh_sizes

Roles = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs on its devices."""

    pools: Mapping[Roles, Setting]  # by the roles of each pool; most runs have one
    device: Device
    # All bytes on a device while each program runs. With several pools, names end with the roles.
    programs: Mapping[str, Parts]

    @property
    def setting(self) -> Setting:
        """The run where its policy lives."""
        return next(setting for roles, setting in self.pools.items() if "policy" in roles)

    @property
    def num_devices(self) -> int:
        return sum(setting.num_devices for setting in self.pools.values())

    @property
    def peak(self) -> float:
        """Most bytes on a device during a step; on a CPU with those of the process itself."""
        return max(parts.total for parts in self.programs.values()) + self.device.process_bytes

    @property
    def room(self) -> float:
        """Bytes that are left at the busiest moment; negative: bytes that are missing."""
        return self.device.memory_bytes - self.peak

    @property
    def fits(self) -> bool:
        return self.room >= 0


def axes(mesh: Mapping[str, int]) -> str:
    """Returns the axes of a mesh that are larger than 1: "fsdp 8 x tensor 2"."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "one device"


def make(
    config: RLConfig, policy: Shape, scorers: tuple[Shape, ...], device: Device, num_devices: int
) -> Plan:
    """Returns the plan of a run whose `placement.choice` is not "auto"; else as `Setting`.

    Raises:
      ConfigError: If the mesh does not fill the devices, or they cannot be shared out to pools.
    """
    found = {
        roles: Setting(config, policy, scorers, mesh, device.backend, device.memory_bytes)
        for roles, mesh in _meshes(config, bool(scorers), num_devices).items()
    }
    programs = {
        name if len(found) == 1 else f"{name} ({'+'.join(roles)})": parts
        for roles, setting in found.items()
        for name, parts in memory.step(setting, roles).items()
    }
    return Plan(found, device, programs)


def _meshes(config: RLConfig, scored: bool, num_devices: int) -> dict[Roles, dict[str, int]]:
    """Returns the roles of each pool and its mesh."""
    if config.placement.choice == "colocate":
        return {ROLES: mesh_sizes(config.mesh, num_devices)}
    needed = needs.of(config.algorithm)
    has = {"critic": needed.critic, "reference": needed.reference, "reward": scored}
    used = [role for role in ROLES if has.get(role, True)]
    found, homes = pools.sizes(config.placement, config.mesh, used, num_devices, 1)
    return {
        tuple(role for role in used if homes[role] == name): mesh for name, mesh in found.items()
    }
