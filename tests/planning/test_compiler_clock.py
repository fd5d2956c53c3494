"""The compiler's clock: a schedule by hand, and programs compiled for absent TPUs."""

import json

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.planning.accelerators import device_by_name
from jaxrl_llm.planning.compiler_clock import Place, TpuRates, program_time, tpu_rates

# Ten operations, 2 bytes of memory, 1 byte over links, half a byte to the host in a cycle.
RATES = TpuRates(1000.0, operations=10.0, memory_bytes=2.0, link_bytes=1.0, host_bytes=0.5)
FRAMES = """HloModule jit_f, is_scheduled=true

FileNames
1 "/site/jaxrl_llm/models/layers.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=2 end_column=23}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

"""
LOOP = """%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %y = f32[8] fusion(%x), kind=kLoop, calls=%g, metadata={op_name="jit(f)/tanh" stack_frame_id=1}, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %t = (s32[], f32[8]) tuple(%next, %y)
}

%cond (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %bound = s32[] constant(7)
  ROOT %lt = pred[] compare(%i.1, %bound), direction=LT
}

"""


def program(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{FRAMES}{before}ENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def work(cycles, name="w"):
    return f'%{name} = f32[8] fusion(%a), backend_config={{"estimated_cycles":"{cycles}"}}'


def kinds_of(*lines, before=""):
    time = program_time(program(*lines, before=before), RATES)
    assert sum(time.by_kind.values()) == pytest.approx(sum(time.by_place.values()))
    assert time.seconds == time.cycles / 1000
    return {kind: cycles for kind, cycles in time.by_kind.items() if cycles}


def test_loops_count_by_their_trips():
    loop = "%w = (s32[], f32[8]) while(%t), condition=%cond, body=%body"
    time = program_time(program(work(5), loop, before=LOOP), RATES)
    assert time.by_kind["compute"] == 5 + 4 * 100  # 0, 2, 4, 6
    place = Place("/site/jaxrl_llm/models/layers.py:17", "jit(f)/tanh")
    assert time.costliest(1) == [(place, pytest.approx(400 / 405))]
    known = loop + ', backend_config={"known_trip_count":{"n":"3"}}'
    assert kinds_of(known, before=LOOP) == {"compute": 300}
    # Until a number that the program is given; another such loop inside would count once.
    until = LOOP.replace(
        "%bound = s32[] constant(7)", "%bound = s32[] get-tuple-element(%p.1), index=2"
    )
    assert program_time(program(loop, before=until), RATES, open_trips=6).cycles == 600
    outer = (
        until.replace("%body", "%outer")
        .replace("%cond", "%test")
        .replace("%y = f32[8] fusion", "%y = (s32[], f32[8]) while")
        .replace("kind=kLoop, calls=%g", "condition=%cond, body=%body")
    )
    nested = program_time(
        program(loop.replace("%cond", "%test").replace("%body", "%outer"), before=until + outer),
        RATES,
        6,
    )
    assert (nested.cycles, nested.unknown_loops) == (600, 1)


COPY = "%c-start = (f32[100]{0:T(8)S(1)}, f32[100]{0:T(8)}, u32[]) copy-start(%a)"
GATHER = "replica_groups=mesh['x'=4,'y'=2] {'x'}, dimensions={0}"
GATHER_START = f"%g = (f32[25]{{0}}, f32[100]{{0}}) all-gather-start(%a), {GATHER}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # 400 bytes at 2 a cycle: 200 cycles, of which the work between hides what it takes.
        ([COPY, "%d = f32[100] copy-done(%c-start)"], {"copy": 200}),
        ([COPY, work(150), "%d = f32[100] copy-done(%c-start)"], {"compute": 150, "copy": 50}),
        ([COPY, work(300), "%d = f32[100] copy-done(%c-start)"], {"compute": 300}),
        # To the host: S(5), half a byte a cycle.
        ([COPY.replace("S(1)", "S(5)"), "%d = f32[100] copy-done(%c-start)"], {"copy": 800}),
        # Three quarters of 400 bytes come from the other three of four devices.
        ([f"%g = f32[100]{{0}} all-gather(%a), {GATHER}"], {"collective": 300}),
        ([GATHER_START, work(100), "%d = f32[100] all-gather-done(%g)"],
         {"compute": 100, "collective": 200}),
        (["%r = f32[100]{0} all-reduce(%a), replica_groups=[2,4]<=[8]"], {"collective": 600}),
        (["%r = f32[25]{0} reduce-scatter(%a), replica_groups={{0,1,2,3}}"], {"collective": 300}),
        (["%r = bf16[100]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}"],
         {"collective": 200}),
        # Two copies share the memory's bandwidth: the second ends at 400.
        ([COPY, COPY.replace("%c", "%e"), "%d = f32[100] copy-done(%e-start)"], {"copy": 400}),
        # A kernel by its estimate: 5,000 operations take longer than 100 bytes.
        (['%k = f32[8] custom-call(%a), custom_call_target="tpu_custom_call", backend_config='
          '{"custom_call_config":{"cost_estimate":{"flops":"5000","bytes_accessed":"100"}}}'],
         {"kernel": 500}),
        # Started in an earlier trip of a loop: nothing is known of it.
        (["%d = f32[100] copy-done(%elsewhere)"], {}),
    ],
)  # fmt: skip
def test_what_the_compiler_leaves_out_is_timed_by_bytes(lines, expected):
    assert kinds_of(*lines) == expected


def test_the_costliest_branch_counts_and_kernels_without_an_estimate_are_named():
    branches = "".join(
        f"%{name} (q: f32[8]) -> f32[8] {{\n  {work(cycles)}\n}}\n\n"
        for name, cycles in (("small", 10), ("large", 70))
    )
    choice = "%c = f32[8] conditional(%i, %a, %a), branch_computations={%small, %large}"
    assert kinds_of(choice, before=branches) == {"compute": 70}
    kernel = '%k = f32[8] custom-call(%a), custom_call_target="tpu_custom_call"'
    assert program_time(program(kernel), RATES).unknown_kernels == 1
    with pytest.raises(ValueError, match="not that of a scheduled program"):
        program_time("HloModule jit_f", RATES)
    assert tpu_rates(device_by_name("h100")) is None


def compiled_text(devices, function, *shapes):
    mesh = Mesh(np.array(devices[:1]), ("x",))
    inputs = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
        for s in shapes
    ]
    return jax.jit(function).lower(*inputs).compile().as_text()


@pytest.mark.slow
# Share of the data sheet's peak that the compiler expects of a product of 4096 x 4096 matrices.
@pytest.mark.parametrize(
    ("topology", "lowest"), [("v5e:2x2", 0.95), ("v5p:2x2x1", 0.95), ("v6e:2x2", 0.85)]
)
def test_a_matmul_runs_at_the_published_peak_and_a_copy_below_it(tpu_devices, topology, lowest):
    size = 4096
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    devices, device = tpu_devices(topology), device_by_name(topology.split(":")[0])
    rates = tpu_rates(device)
    time = program_time(compiled_text(devices, lambda a, b: a @ b, matrix, matrix), rates)
    # The product alone: an operand may be brought into the core's memory before it.
    product_s = time.by_kind["compute"] / rates.cycles_per_s
    assert lowest < 2 * size**3 / device.flops / product_s <= 1.001
    large = jax.ShapeDtypeStruct((8 * size, size), jnp.float32)
    time = program_time(compiled_text(devices, lambda a: a + 1.0, large), rates)
    moved = 2 * 4 * 8 * size * size
    assert 0.5 < moved / device.memory_bandwidth / time.seconds <= 1.001


@pytest.mark.slow
def test_a_plan_tells_the_compilers_times(tpu_devices, capsys):
    tpu_devices("v5e:2x4")
    flags = ["--config=configs/grpo_tiny.py", "--topology=v5e:2x4", "--compile"]
    flags += ["--config.model.compute_dtype=bfloat16"]
    code, out, log = commands.call(capsys, "plan", *flags)
    assert code == 0, log
    table = out[out.index("one call") :].splitlines()
    heads = ["one", "call", "seconds", "limit", "compute", "kernel", "collective", "copy"]
    assert table[0].split() == heads
    rows = {line.split()[0]: line.split()[1:] for line in table[1:] if line}
    assert {"prefill", "decode", "score", "train"} <= rows.keys()
    assert 0 < float(rows["train"][0]) < 1 and "%" in rows["train"][1]
    code, out, _ = commands.call(capsys, "plan", *flags, "--json")
    times = json.loads(out)["compiled_times"]
    train = times["train"]
    rates = tpu_rates(device_by_name("v5e"))
    assert sum(train["cycles"].values()) / rates.cycles_per_s == pytest.approx(train["seconds"])
    assert train["limit_seconds"] < train["seconds"]
    assert any(source.startswith("/") for source, *_ in train["places"])
