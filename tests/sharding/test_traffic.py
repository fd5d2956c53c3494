"""Bytes on the wire, by hand."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import make_mesh

from jaxrl_llm.sharding import traffic

LINES = {
    "all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}": ("f32[6]{0}", 12),
    "all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}": ("bf16[8]{0}", 12),
    "all-gather(%x), replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}": ("bf16[8]", 8),
    "all-gather(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a'}": (
        "bf16[8]",
        12,
    ),
    "all-reduce(%x), replica_groups={}, to_apply=%add": ("f32[8]", 56),
    "reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}": ("f32[2]", 24),
    "all-to-all(%x), replica_groups=[2,4]<=[8], dimensions={0}": ("s8[16]", 12),
    "collective-permute(%x), source_target_pairs={{0,1},{1,0}}": ("f32[4,2]{1,0}", 32),
    # What began and was waited for counts once; the start names what goes in, too.
    "all-gather-start(%x), replica_groups=[2,4]<=[8]": ("(bf16[2]{0}, bf16[8]{0})", 12),
    "all-gather-done(%y)": ("bf16[8]{0}", 0),
    "fusion(%all-gather.3), kind=kLoop": ("bf16[8]{0}", 0),
}


@pytest.mark.parametrize("line", LINES)
def test_bytes_received(line):
    result, wanted = LINES[line]
    hlo = f"HloModule m, num_partitions=8\n  %a.1 = {result} {line}\n"
    assert sum(c.received_bytes for c in traffic.collectives(hlo)) == wanted


def test_what_a_device_misses():
    mesh = make_mesh(fsdp=2, tensor=2)

    def missing(source, target):
        place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
        return traffic.missing_elements((4, 6), place(*source), place(*target))

    assert missing([("tensor", "fsdp")], ["tensor"]) == 12 - 6
    assert missing([("tensor", "fsdp")], []) == 24 - 6
    assert missing(["tensor"], [("tensor", "fsdp")]) == 0
    # Columns instead of rows: a quarter of what is wanted is there already.
    assert missing([None, "tensor"], ["tensor"]) == 6
    # The wrong order of axes: two devices of four hold nothing of what they want.
    assert missing([("tensor", "fsdp")], [("fsdp", "tensor")]) == 3


def test_a_real_program_is_counted():
    mesh = make_mesh(fsdp=8)
    x = jax.ShapeDtypeStruct(
        (16, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    out = NamedSharding(mesh, PartitionSpec())
    text = jax.jit(lambda x: x + 1, out_shardings=out).lower(x).compile().as_text()
    (found,) = traffic.collectives(text)
    assert (found.kind, found.dtypes, found.received_bytes) == ("all-gather", ("f32",), 14 * 4 * 4)
