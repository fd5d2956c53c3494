"""What a compiled program sends between devices, and the least that a change of sharding needs."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
from jax.sharding import NamedSharding

_COLLECTIVE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter"
    r"|collective-permute|ragged-all-to-all)(?P<start>-start)?\((?P<rest>.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d+\w*)\[([\d,]*)\]")
# `[2,4]<=[8]`: two groups of four; `{{0,1},{2,3}}`; `mesh['a'=4,'b'=2] {'b'}`: along those axes.
_GROUPS = re.compile(
    r"replica_groups=(?:\[\d+,(?P<size>\d+)\]|\{\{(?P<list>[\d,]*)\}"
    r"|\w*\[(?P<axes>[^\]]*)\][^{\n]*\{(?P<along>[^}]*)\})"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange of a compiled program."""

    kind: str  # XLA's name, e.g. "all-gather"
    dtypes: tuple[str, ...]  # of what is sent
    received_bytes: int  # by each device; an all-reduce is a reduce-scatter and an all-gather


def collectives(hlo: str) -> Iterator[Collective]:
    """Yields the collectives in the text of a compiled program, each as often as it is written.

    >>> line = "%a = bf16[8,4]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}"
    >>> [(c.kind, c.received_bytes) for c in collectives(line)]
    [('all-gather', 48)]
    """
    partitions = re.search(r"num_partitions=(\d+)", hlo)
    everybody = int(partitions[1]) if partitions else 1
    for found in _COLLECTIVE.finditer(hlo):
        arrays = [
            (dtype, math.prod(int(n) for n in dims.split(",") if n) * _bits(dtype) // 8)
            for dtype, dims in _ARRAY.findall(found["result"])
        ]
        kind, group = found["kind"], _group_size(found["rest"], everybody)
        total = sum(size for _, size in arrays)
        if found["start"]:  # its text has the inputs beside the outputs
            total = total * group // (group + 1) if kind == "all-gather" else total // 2
        received = {
            "all-gather": total * (group - 1) // group,
            "all-to-all": total * (group - 1) // group,
            "ragged-all-to-all": total,
            "all-reduce": 2 * total * (group - 1) // group,
            "reduce-scatter": total * (group - 1),
            "collective-permute": total,
        }
        yield Collective(kind, tuple(sorted({dtype for dtype, _ in arrays})), received[kind])


def _bits(dtype: str) -> int:
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 8


def _group_size(attributes: str, everybody: int) -> int:
    found = _GROUPS.search(attributes)
    if not found:
        return everybody
    if found["size"]:
        return int(found["size"])
    if found["list"] is not None:
        return len(found["list"].split(","))
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found["axes"]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found["along"]))


def missing_elements(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> float:
    """Returns the elements that a device must receive for a change of sharding, on average.

    These are its part in the target without what it holds of it in the source.
    """
    held: Mapping = source.devices_indices_map(shape)
    wanted: Mapping = target.devices_indices_map(shape)

    def volume(*slices: tuple[slice, ...]) -> int:
        """Returns the elements that all of them have in common."""
        dims = zip(shape, *slices, strict=True)
        spans = [[range(size)[part] for part in parts] for size, *parts in dims]
        return math.prod(
            max(0, min(s.stop for s in of_dim) - max(s.start for s in of_dim)) for of_dim in spans
        )

    return float(np.mean([volume(part) - volume(part, held[d]) for d, part in wanted.items()]))
