import importlib
import linecache
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.audit import Audit, audit
from matrixfsdp_jax.hlo import KINDS, Collective, HloProgram

RING = [(i, (i + 1) % 8) for i in range(8)]
MESH_2X4 = (("data", 2), ("fsdp", 4))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def mesh_2x4():
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def array(mesh, spec, shape=(32, 64), dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def mapped(fn, mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def only(report):
    (collective,) = report.collectives
    return collective


# ---- kinds and bytes, on the real compiler ------------------------------------------------------

# A device holds (4, 64) float32, 1024 B, of the (32, 64) matrix.
REAL = {
    "all-gather": (lambda x: lax.all_gather(x, "fsdp", tiled=True), P(), 8192, 7168),
    "all-reduce": (lambda x: lax.psum(x, "fsdp"), P(), 1024, 1792),
    "all-to-all": (lambda x: lax.all_to_all(x, "fsdp", 1, 0, tiled=True), P("fsdp"), 1024, 896),
    "collective-permute": (lambda x: lax.ppermute(x, "fsdp", RING), P("fsdp"), 1024, 1024),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "fsdp", scatter_dimension=1, tiled=True),
        P(None, "fsdp"),
        1024,
        896,
    ),
}


@pytest.mark.parametrize("kind", REAL)
def test_kinds_and_bytes(mesh, kind):
    fn, out_spec, full, received = REAL[kind]
    report = audit(mapped(fn, mesh, P("fsdp"), out_spec), array(mesh, P("fsdp")))
    found = only(report)
    assert (found.kind, found.bytes, found.wire_bytes) == (kind, full, received)
    assert (found.group_size, found.axis, found.times) == (8, ("fsdp",), 1)
    assert sum(int(np.prod(dims)) for _, dims in found.shapes) == 4 * 64
    assert {dtype for dtype, _ in found.shapes} == {"float32"}
    assert report.matrices == report.collectives
    assert report.count(kind) == 1
    assert report.bytes(kind) == full
    assert report.wire_bytes(kind) == received
    assert all(report.count(other) == report.bytes(other) == 0 for other in KINDS if other != kind)


@pytest.mark.parametrize(("dtype", "size"), [("int8", 1), ("int32", 4), ("complex64", 8)])
def test_bytes_follow_the_dtype(mesh, dtype, size):
    gather = mapped(lambda x: lax.all_gather(x, "fsdp", tiled=True), mesh, P("fsdp"), P())
    found = only(audit(gather, array(mesh, P("fsdp"), dtype=dtype)))
    assert found.shapes == ((dtype, (4, 64)),)
    assert found.bytes == 32 * 64 * size


def test_combined_collective_lists_every_operand(mesh):
    def sums(x):
        return lax.psum((x, x.sum(), x[0]), "fsdp")

    found = only(audit(mapped(sums, mesh, P("fsdp"), P()), array(mesh, P("fsdp"))))
    assert sorted(found.shapes) == [("float32", ()), ("float32", (4, 64)), ("float32", (64,))]
    assert found.bytes == 4 * (256 + 1 + 64)
    assert not found.is_scalar


def test_optax_muon_on_fsdp_shards_pays_with_matrix_collectives(mesh):
    tx = optax.contrib.muon(1e-2)
    spec = P("fsdp", None)
    params = {"w": array(mesh, spec, (512, 1024))}
    state = jax.tree.map(
        lambda s: array(mesh, spec if s.ndim == 2 else P(), s.shape, s.dtype),
        jax.eval_shape(tx.init, params),
    )
    report = audit(tx.update, params, state, params)
    assert report.count("all-gather", scalar=False) == len(report.matrices) == 15
    assert report.count("all-reduce", scalar=True) == len(report.scalars) == 1
    with pytest.raises(AssertionError, match="15 all-gathers"):
        report.assert_no_matrix_collectives()


# ---- mesh axes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["all_gather", "psum", "psum_scatter", "ppermute"])
@pytest.mark.parametrize(("axis", "size"), [("data", 2), ("fsdp", 4), (("data", "fsdp"), 8)])
def test_axis_names(mesh_2x4, axis, size, op):
    ring = [(i, (i + 1) % size) for i in range(size)]
    fn = {
        "all_gather": lambda x: lax.all_gather(x, axis),
        "psum": lambda x: lax.psum(x, axis),
        "psum_scatter": lambda x: lax.psum_scatter(x, axis, tiled=True),
        "ppermute": lambda x: lax.ppermute(x, axis, ring),
    }[op]
    found = only(audit(mapped(fn, mesh_2x4, P(), P()), array(mesh_2x4, P())))
    assert found.group_size == size
    assert found.axis == tuple(name for name in ("data", "fsdp") if name in axis)


def test_axis_names_come_in_mesh_order(mesh_2x4):
    gather = mapped(lambda x: lax.all_gather(x, ("fsdp", "data")), mesh_2x4, P(), P())
    assert only(audit(gather, array(mesh_2x4, P()))).axis == ("data", "fsdp")


def test_permute_that_leaves_devices_out_still_has_its_axis(mesh_2x4):
    shift = mapped(lambda x: lax.ppermute(x, "fsdp", [(0, 1), (1, 2)]), mesh_2x4, P(), P())
    found = only(audit(shift, array(mesh_2x4, P())))
    assert (found.axis, found.group_size) == (("fsdp",), 3)


def test_axis_names_where_the_mesh_permutes_the_devices():
    devices = np.array(jax.devices())[[3, 1, 2, 0, 7, 6, 5, 4]].reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp"))
    total = mapped(lambda x: lax.psum(x, "fsdp"), mesh, P("data"), P("data"))
    assert only(audit(total, array(mesh, P("data")))).axis == ("fsdp",)


def test_given_mesh_names_the_axes(mesh, mesh_2x4):
    total = mapped(lambda x: lax.psum(x, "fsdp"), mesh, P("fsdp"), P())
    x = array(mesh, P("fsdp"))
    assert only(audit(total, x, mesh=mesh_2x4)).axis == ("data", "fsdp")
    small = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="4 devices but the program was compiled for 8"):
        audit(total, x, mesh=small)


def test_no_collective_over_an_axis_of_size_one():
    mesh = jax.make_mesh((1, 8), ("one", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    x = array(mesh, P("fsdp"))
    assert audit(mapped(lambda x: lax.psum(x, "one"), mesh, P("fsdp"), P("fsdp")), x).count() == 0
    total = mapped(lambda x: lax.psum(x, ("one", "fsdp")), mesh, P("fsdp"), P())
    assert only(audit(total, x)).axis == ("fsdp",)


# ---- loops --------------------------------------------------------------------------------------


def gather_and_scatter(x):
    whole = jnp.tanh(lax.all_gather(x, "fsdp", tiled=True))
    return lax.psum_scatter(whole, "fsdp", tiled=True)


@pytest.mark.parametrize(
    ("loop", "times"),
    [
        (lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=5)[0], 5),
        (lambda f, x: lax.fori_loop(2, 9, lambda _, c: f(c), x), 7),
        (
            lambda f, x: lax.fori_loop(
                0, 3, lambda _, c: lax.fori_loop(0, 5, lambda _, d: f(d), c), x
            ),
            15,
        ),
        (lambda f, x: lax.while_loop(lambda c: jnp.sum(c) < 1, f, x), None),
    ],
    ids=["scan", "fori", "nested", "unknown"],
)
def test_loops_multiply(mesh, loop, times):
    fn = mapped(lambda x: loop(gather_and_scatter, x), mesh, P("fsdp"), P("fsdp"))
    report = audit(fn, array(mesh, P("fsdp")))
    assert {c.kind: c.times for c in report.collectives} == {
        "all-gather": times,
        "reduce-scatter": times,
    }
    assert report.count() == 2
    assert report.bytes() == 2 * 8192 * (times or 1)
    assert report.wire_bytes() == 2 * 7168 * (times or 1)
    assert ("2 of them in loops of unknown length" in str(report)) == (times is None)
    assert f"1 x {times or '?'}" in str(report)


def test_both_branches_of_a_conditional_count(mesh):
    def fn(x, p):
        return lax.cond(
            p, lambda x: lax.psum(x, "fsdp"), lambda x: lax.ppermute(x, "fsdp", RING), x
        )

    report = audit(
        mapped(fn, mesh, (P("fsdp"), P()), P("fsdp")),
        array(mesh, P("fsdp")),
        array(mesh, P(), (), bool),
    )
    assert sorted(c.kind for c in report.collectives) == ["all-reduce", "collective-permute"]


# ---- scalars and matrices -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "scalar"),
    [
        (lambda x: lax.psum(x.sum(), "fsdp"), True),
        (lambda x: lax.psum((x.sum(), x.max()), "fsdp"), True),
        (lambda x: lax.psum(x.sum().reshape(1, 1), "fsdp"), True),
        (lambda x: lax.pmax(x.sum(), "fsdp"), True),
        (lambda x: lax.psum(x[0, :8], "fsdp"), False),
        (lambda x: lax.psum(x[0, :2], "fsdp"), False),
        (lambda x: lax.psum((x.sum(), x[0, :2]), "fsdp"), False),
        (lambda x: lax.all_gather(x.sum(), "fsdp"), False),
        (lambda x: lax.all_to_all(x[0, :8], "fsdp", 0, 0), False),
    ],
)
def test_scalar_rule(mesh, fn, scalar):
    report = audit(mapped(fn, mesh, P("fsdp"), P()), array(mesh, P("fsdp")))
    assert only(report).is_scalar == scalar
    assert report.count(scalar=scalar) == 1
    assert report.count(scalar=not scalar) == 0
    assert len(report.scalars) == scalar
    assert len(report.matrices) == (not scalar)


def test_planted_collective_is_found(mesh):
    def update(gradient, norm, planted):
        if planted:
            gradient = gather_and_scatter(gradient)
        return -0.1 * gradient / lax.psum(norm, "fsdp")

    args = array(mesh, P("fsdp")), array(mesh, P(), ())
    specs = (P("fsdp"), P()), P("fsdp")
    clean = audit(mapped(lambda g, n: update(g, n, False), mesh, *specs), *args)
    clean.assert_no_matrix_collectives()
    assert str(clean).startswith("0 matrix collectives, 1 scalar all-reduce; arguments ")

    dirty = audit(mapped(lambda g, n: update(g, n, True), mesh, *specs), *args)
    with pytest.raises(AssertionError) as error:
        dirty.assert_no_matrix_collectives()
    message = str(error.value)
    assert "expected no matrix collectives in the program" in message
    assert "all-gather" in message
    assert "reduce-scatter" in message
    assert "all-reduce" not in message


# ---- origins ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def training(mesh):
    """Gather under a named scope, and its transpose through grad."""

    def body(x):
        with jax.named_scope("mfsdp.gather/32x64:float32"):
            whole = lax.all_gather(x, "fsdp", tiled=True)
        return lax.pmean(jnp.sum(jnp.sin(whole) ** 2), "fsdp")

    loss = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P())
    return audit(jax.value_and_grad(loss), array(mesh, P("fsdp")))


def test_origin_is_the_named_scope_and_the_transpose_is_marked(training):
    gather, scatter = training.within("mfsdp.gather").collectives
    assert (gather.kind, scatter.kind) == ("all-gather", "reduce-scatter")
    assert gather.origin.endswith("/mfsdp.gather/32x64:float32/all_gather")
    assert gather.scope == "mfsdp.gather/32x64:float32"
    assert scatter.scope == "backward: mfsdp.gather/32x64:float32"
    assert list(training.by_origin()) == list(dict.fromkeys(c.scope for c in training.collectives))
    assert training.by_origin()[gather.scope].bytes() == 8192


def test_source_is_the_line_that_asked_for_it(training):
    file, line = training.within("mfsdp.gather").collectives[0].source.rsplit(":", 1)
    assert file == __file__
    assert "lax.all_gather" in linecache.getline(file, int(line))


def test_filters_by_text_or_pattern(training):
    assert training.count() == 3
    assert training.count(origin="transpose(jvp") == 1
    assert training.count(origin=re.compile(r"32x64:float\d+/")) == 2
    assert training.bytes(origin=re.compile("reduce_.catter")) == 8192
    assert training.bytes("all-gather", "transpose") == 0
    assert training.within("no such scope").collectives == ()
    training.assert_no_matrix_collectives("psum")
    with pytest.raises(AssertionError, match="with origin 'mfsdp"):
        training.assert_no_matrix_collectives("mfsdp.gather")
    with pytest.raises(ValueError, match="kind='allgather' is no collective"):
        training.count("allgather")
    with pytest.raises(ValueError, match="kind='all_reduce' is no collective"):
        training.bytes("all_reduce")


@pytest.mark.parametrize(
    ("origin", "scope"),
    [
        ("", "(no origin)"),
        ("jit(f)/shard_map", "shard_map"),
        ("params['w']", "params['w']"),
        ("jit(f)/jvp(outer)/shard_map/all_gather", "outer"),
        ("jit(f)/vmap(jit(norm))/reduce_sum", "reduce_sum"),
        ("jit(f)/transpose(jvp(outer))/while/body/closed_call/inner/psum", "backward: outer/inner"),
        ("jit(f)/transpose(jvp())/checkpoint/rematted_computation/g/all_gather", "recomputed: g"),
        ("jit(f)/(a/16x8:float32/psum:shard_map/psum:a/psum)", "a/16x8:float32 + psum + a"),
    ],
)
def test_scope_keeps_what_a_person_named(origin, scope):
    assert collective(origin=origin).scope == scope


# ---- what it accepts ----------------------------------------------------------------------------


def test_every_kind_of_program_gives_the_same_audit(mesh):
    fn = mapped(lambda x: lax.psum(x, "fsdp"), mesh, P("fsdp"), P())
    x = array(mesh, P("fsdp"))
    jitted = jax.jit(fn)
    step = type("Step", (), {"__call__": None, "lower": lambda self, *a: jitted.lower(*a)})()
    reports = [
        audit(fn, x),
        audit(jitted, x),
        audit(step, x),
        audit(jitted.trace(x)),
        audit(jitted.lower(x)),
        audit(jitted.lower(x).compile()),
    ]
    assert only(reports[0]).kind == "all-reduce"
    assert all(report == reports[0] for report in reports)


def test_keyword_arguments_reach_the_function():
    report = audit(lambda x, *, y: x @ y, jnp.ones((4, 8)), y=jnp.ones((8, 4)))
    assert report.argument_bytes == 2 * 4 * 8 * 4


def test_wrong_input_is_refused(mesh):
    x = array(mesh, P("fsdp"))
    lowered = jax.jit(lambda x: x + 1).lower(x)
    for wrong in ("HloModule f", b"HloModule f", None, 3):
        with pytest.raises(TypeError, match=f"cannot audit a {type(wrong).__name__}"):
            audit(wrong)
    with pytest.raises(TypeError, match="Compiled has its arguments already, but 1 more"):
        audit(lowered.compile(), x)
    with pytest.raises(TypeError, match="Lowered has its arguments already, but 1 more"):
        audit(lowered, y=x)


# ---- memory -------------------------------------------------------------------------------------


def test_memory_is_per_device_and_donation_aliases(mesh):
    x = array(mesh, P("fsdp"))
    plain = audit(jax.jit(lambda x: x + 1), x)
    assert (plain.argument_bytes, plain.output_bytes, plain.alias_bytes) == (1024, 1024, 0)
    assert audit(jax.jit(lambda x: x + 1, donate_argnums=0), x).alias_bytes == 1024
    temp = audit(lambda x: jnp.sin(x) @ jnp.cos(x).T @ x, jnp.ones((64, 64))).temp_bytes
    assert temp >= 64 * 64 * 4
    assert plain.generated_code_bytes >= 0


def test_flops_of_a_product():
    assert audit(lambda x: x @ x, jnp.ones((32, 32))).flops == pytest.approx(2 * 32**3, rel=0.1)


def test_a_backend_without_analysis_gives_none(monkeypatch):
    compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile()
    monkeypatch.setattr(type(compiled), "memory_analysis", lambda self: None)
    monkeypatch.setattr(type(compiled), "cost_analysis", lambda self: None)
    report = audit(compiled)
    assert report == Audit(())
    assert report.temp_bytes is None
    assert str(report) == "0 matrix collectives, 0 scalar collectives"
    partial = SimpleNamespace(argument_size_in_bytes=16)
    monkeypatch.setattr(type(compiled), "memory_analysis", lambda self: partial)
    assert str(audit(compiled)).endswith("; arguments 16 B")


# ---- the printed table --------------------------------------------------------------------------


def collective(kind="all-gather", shapes=(("float32", (4, 64)),), origin="", axis=None, times=1):
    return Collective(kind, tuple(shapes), 8192, 7168, 8, axis, origin, None, times)


def test_table_fits_80_columns_whatever_the_names():
    long = "/".join(["a_scope_with_a_name_that_goes_on_and_on_without_a_place_to_break"] * 3)
    shapes = [("bfloat16", (1024 * k, 1024, 1024)) for k in range(1, 9)]
    report = Audit(
        tuple(
            collective(kind, shapes, f"jit(f)/transpose(jvp({long}))", axis, times)
            for kind in KINDS
            for axis in (None, ("replica", "data", "fully_sharded_data_parallel", "model"))
            for times in (1, 12345, None)
        ),
        argument_bytes=10**12,
        temp_bytes=10**12,
    )
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_table_names_three_operands_of_a_combined_collective():
    shapes = [("bfloat16", (k, 2)) for k in (1, 1, 2, 3, 4, 5)]
    text = str(Audit((collective(shapes=shapes),)))
    assert "2 of 1x2:bf16, 2x2:bf16," in text
    assert "3x2:bf16, 2 more" in text


def test_equal_collectives_share_a_row():
    scope = "jit(f)/shard_map/mfsdp.gather/32x64:float32/all_gather"
    same = [collective(origin=scope, axis=("fsdp",), times=3)] * 2
    text = str(Audit((*same, collective("all-reduce", [("float32", ())], axis=("fsdp",)))))
    assert "2 matrix collectives (2 all-gathers), 1 scalar all-reduce" in text
    (row,) = (line for line in text.splitlines() if line.strip().startswith("all-gather"))
    expected = ["all-gather", "2", "x", "3", "4x64:f32", "48.0", "KiB", "fsdp"]
    assert row.split()[:8] == expected
    assert "jit(" not in text
    assert "shard_map" not in text


def test_notebooks_get_the_table_as_html(training):
    html = training._repr_html_()
    assert html.startswith("<pre>")
    assert "reduce-scatter" in html
    assert "2 matrix collectives" in html


# ---- texts of other backends and printers, hand-written -----------------------------------------


def parse(*lines, others="", meshes=(MESH_2X4,)):
    text = "HloModule m, is_scheduled=true, num_partitions=8\n\n" + others
    text += "ENTRY %main (p: f32[4,64]) -> f32[4,64] {\n"
    text += "  %p = f32[4,64]{1,0} parameter(0)\n"
    text += "".join(f"  {line}\n" for line in lines) + "}\n"
    return tuple(HloProgram(text).collectives(meshes))


@pytest.mark.parametrize(
    ("groups", "size", "axis"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, ("fsdp",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, ("data",)),
        ("{{0,4,1,5,2,6,3,7}}", 8, ("data", "fsdp")),
        ("{}", 8, ("data", "fsdp")),
        ("{{0,1},{2,3},{4,5},{6,7}}", 2, None),
        ("[2,4]<=[8]", 4, ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", 2, ("data",)),
        ("[1,8]<=[8]", 8, ("data", "fsdp")),
        ("mesh['x'=2,'y'=4] {'y'}", 4, ("fsdp",)),
        ("mesh['x'=2,'y'=4] {'y','x'}", 8, ("data", "fsdp")),
        ("mesh[x=2,y=4] {x}", 2, ("data",)),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", 4, ("fsdp",)),
        ("mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'y'}", 2, ("data",)),
        ("mesh['x'=8] {'x':(2)4}", 4, ("fsdp",)),
        ("mesh['x'=8] {'x':(1)2}", 2, ("data",)),
    ],
)
def test_every_printed_form_of_device_groups(groups, size, axis):
    (found,) = parse(f"ROOT %r = f32[4,64]{{1,0}} all-reduce(%p), replica_groups={groups}")
    assert (found.group_size, found.axis) == (size, axis)
    assert found.wire_bytes == 1024 * 2 * (size - 1) // size


def test_groups_of_one_device_are_no_collective():
    one = "{{0},{1},{2},{3},{4},{5},{6},{7}}"
    assert not parse(f"ROOT %r = f32[4,64]{{1,0}} all-reduce(%p), replica_groups={one}")
    assert not parse(
        "ROOT %r = f32[4,64] collective-permute(%p), source_target_pairs={{0,0},{1,1}}"
    )


def test_unknown_form_of_device_groups_is_an_error():
    with pytest.raises(ValueError, match="no device groups of a known form"):
        parse("ROOT %r = f32[4,64]{1,0} all-reduce(%p), replica_groups=torus(8)")


def test_no_mesh_gives_no_axis():
    (found,) = parse("ROOT %r = f32[4,64] all-reduce(%p), replica_groups=[1,8]<=[8]", meshes=())
    assert found.axis is None


@pytest.mark.parametrize(
    ("kind", "full", "lines"),
    [
        (
            "all-gather",
            8192,
            [
                "%s = (f32[4,64]{1,0}, f32[32,64]{1,0}) all-gather-start(f32[4,64]{1,0} %p), "
                "replica_groups=[1,8]<=[8], dimensions={0}",
                "ROOT %d = f32[32,64]{1,0} all-gather-done(%s)",
            ],
        ),
        (
            "all-reduce",
            1024,
            [
                "%s = f32[4,64]{1,0:T(8,128)S(1)} all-reduce-start(%p), replica_groups={}, "
                "to_apply=%add",
                "ROOT %d = f32[4,64]{1,0} all-reduce-done(%s)",
            ],
        ),
        (
            "collective-permute",
            1024,
            [
                "%s = (f32[4,64]{1,0}, f32[4,64]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
                "collective-permute-start(%p), source_target_pairs={{0,1},{1,2},{2,3}}",
                "ROOT %d = f32[4,64]{1,0} collective-permute-done(%s)",
            ],
        ),
        (
            "reduce-scatter",
            1024,
            [
                "%s = ((f32[4,64]{1,0}), f32[4,8]{1,0}) reduce-scatter-start(%p), "
                "replica_groups=[1,8]<=[8], dimensions={1}, to_apply=%add",
                "%u = ((f32[4,64]{1,0}), f32[4,8]{1,0}) reduce-scatter-update(%s)",
                "ROOT %d = f32[4,8]{1,0} reduce-scatter-done(%u)",
            ],
        ),
        (
            "all-to-all",
            2048,
            [
                "%s = ((f32[4,64]{1,0}, f32[4,64]{1,0}), (f32[4,64]{1,0}, f32[4,64]{1,0})) "
                "all-to-all-start(%p, /*index=1*/%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}",
                "ROOT %d = (f32[4,64]{1,0}, f32[4,64]{1,0}) all-to-all-done(%s)",
            ],
        ),
        (
            "collective-broadcast",
            1024,
            ["ROOT %b = f32[4,64]{1,0} collective-broadcast(%p), replica_groups={{0,1,2,3}}"],
        ),
        (
            "ragged-all-to-all",
            1024,
            [
                "%o = s32[8]{0} constant({0, 1, 2, 3, 4, 5, 6, 7})",
                "ROOT %r = f32[4,64]{1,0} ragged-all-to-all(%p, %p, %o, %o, %o, /*index=5*/%o), "
                "replica_groups={{0,1,2,3,4,5,6,7}}",
            ],
        ),
        (
            "collective-permute",
            1024,
            [
                "%t = token[] after-all()",
                "%s = (f32[4,64]{1,0}, u32[], token[]) send(%p, %t), channel_id=1, "
                'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"}',
                "%d = token[] send-done(%s), channel_id=1",
            ],
        ),
    ],
)
def test_asynchronous_pairs_count_once(kind, full, lines):
    (found,) = parse(*lines)
    assert (found.kind, found.bytes) == (kind, full)
    assert not found.is_scalar


def test_collectives_combined_by_the_gpu_compiler():
    (found,) = parse(
        "%q = bf16[2]{0} parameter(1)",
        "%s = ((f32[4,64]{1,0}, bf16[2]{0}), (f32[16,64]{1,0}, bf16[8]{0})) "
        "all-gather-start(%p, %q), replica_groups=[2,4]<=[8], dimensions={0}",
        "ROOT %d = (f32[16,64]{1,0}, bf16[8]{0}) all-gather-done(%s)",
    )
    assert found.shapes == (("float32", (4, 64)), ("bfloat16", (2,)))
    assert (found.bytes, found.wire_bytes) == (4 * (1024 + 4), 3 * (1024 + 4))


def test_small_dtypes_count_their_bits():
    (found,) = parse(
        "%a = f8e4m3fn[10]{0} parameter(1)",
        "%b = s4[5]{0} parameter(2)",
        "%c = pred[3]{0} parameter(3)",
        "ROOT %r = (f8e4m3fn[10]{0}, s4[5]{0}, pred[3]{0}) all-to-all(%a, %b, %c), "
        "replica_groups={}",
    )
    assert found.shapes == (("float8_e4m3fn", (10,)), ("int4", (5,)), ("bool", (3,)))
    assert found.bytes == 10 + 3 + 3


WRAPPED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (q: f32[4,64]) -> f32[4,8] {
  %q = f32[4,64]{1,0} parameter(0)
  ROOT %rs = f32[4,8]{1,0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={1}, to_apply=%add
}

"""  # noqa: E501


def test_collective_in_an_asynchronous_wrapper_counts_once():
    (found,) = parse(
        "%s = ((f32[4,64]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%p), calls=%wrapped, "
        'metadata={op_name="jit(f)/scope/reduce_scatter" source_file="model.py" source_line=7}',
        "ROOT %d = f32[4,8]{1,0} async-done(%s), calls=%wrapped",
        others=WRAPPED,
    )
    assert (found.kind, found.bytes, found.wire_bytes) == ("reduce-scatter", 1024, 896)
    assert (found.origin, found.source) == ("jit(f)/scope/reduce_scatter", "model.py:7")


def test_a_computation_counts_once_per_call():
    found = parse(
        "%c = f32[4,8]{1,0} call(%p), to_apply=%wrapped",
        "ROOT %d = f32[4,8]{1,0} call(%p), to_apply=%wrapped",
        others=WRAPPED,
    )
    assert [c.kind for c in found] == ["reduce-scatter"] * 2


def test_collective_behind_an_unknown_kind_of_call_is_not_missed():
    (found,) = parse("ROOT %c = f32[4,8]{1,0} new-call(%p), runs=%wrapped", others=WRAPPED)
    assert (found.kind, found.times) == ("reduce-scatter", None)


def test_text_without_a_program_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        HloProgram("HloModule m\n")


def test_tpu_fusion_of_all_reduce_and_slice_is_a_reduce_scatter():
    fusion = WRAPPED.replace("%wrapped (", "%all-reduce-scatter.2 (").replace(
        "ROOT %rs = f32[4,8]{1,0} reduce-scatter(%q)", "%ar = f32[4,64]{1,0} all-reduce(%q)"
    )
    (found,) = parse(
        "ROOT %f = f32[4,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2, "
        'metadata={op_name="jit(f)/transpose(jvp(layer))/dot_general"}',
        others=fusion,
    )
    assert (found.kind, found.bytes, found.wire_bytes) == ("reduce-scatter", 1024, 896)
    assert found.scope == "backward: layer/dot_general"


def tpu_chain(name, chain):
    """One part of an asynchronous all-gather, as TPU programs repeat it in several fusions."""
    return f"""
%{name} (q: f32[4,64]) -> f32[32,64] {{
  %q = f32[4,64]{{1,0:T(8,128)}} parameter(0)
  ROOT %g = f32[32,64]{{1,0:T(8,128)S(1)}} all-gather(%q), replica_groups=mesh['fsdp'=8] {{'fsdp'}}, dimensions={{0}}, frontend_attributes={{chain_id="{chain}"}}, metadata={{op_name="gather/{chain}"}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
}}

"""  # noqa: E501


def test_tpu_parts_of_one_asynchronous_collective_count_once():
    parts = [("start.0", 0), ("start.1", 1), ("step.0", 0), ("step.1", 1), ("done.0", 0)]
    found = parse(
        *(f"%{n}f = f32[32,64]{{1,0}} fusion(%p), kind=kCustom, calls=%{n}" for n, _ in parts),
        others="".join(tpu_chain(*part) for part in parts),
    )
    assert [(c.origin, c.bytes) for c in found] == [("gather/0", 8192), ("gather/1", 8192)]


def test_tpu_chain_in_a_computation_that_is_called_twice_counts_twice():
    part = tpu_chain("start.0", 0)
    caller = """
%layer (q: f32[4,64]) -> f32[32,64] {
  %q = f32[4,64]{1,0} parameter(0)
  ROOT %f = f32[32,64]{1,0} fusion(%q), kind=kCustom, calls=%start.0
}

"""
    found = parse(
        "%a = f32[32,64]{1,0} call(%p), to_apply=%layer",
        "ROOT %b = f32[32,64]{1,0} call(%p), to_apply=%layer",
        others=part + caller,
    )
    assert len(found) == 2


def loop(first=0, step=1, stop="constant(12)", note="", step_op="add", direction="LT"):
    computations = f"""
%body (c: (s32[], f32[4,64])) -> (s32[], f32[4,64]) {{
  %c = (s32[]{{:T(128)}}, f32[4,64]{{1,0:T(8,128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %copy = s32[]{{:T(128)S(6)}} copy(%i)
  %k = s32[] constant({step})
  %next = s32[] {step_op}(%copy, %k)
  %x = f32[4,64]{{1,0}} get-tuple-element(%c), index=1
  %r = f32[4,64]{{1,0}} all-reduce(%x), replica_groups={{}}
  ROOT %t = (s32[], f32[4,64]{{1,0}}) tuple(%next, %r)
}}

%condition (c: (s32[], f32[4,64])) -> pred[] {{
  %c = (s32[], f32[4,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] {stop}
  ROOT %lt = pred[] compare(%i, %n), direction={direction}
}}

"""
    (found,) = parse(
        f"%zero = s32[] constant({first})",
        "%first = s32[] copy(%zero)",
        "%carry = (s32[], f32[4,64]{1,0}) tuple(%first, %p)",
        "ROOT %w = (s32[], f32[4,64]{1,0}) while(%carry), condition=%condition, "
        f"body=%body{note}",
        others=computations,
    )
    return found.times


def test_trip_count_from_the_loop_condition():
    assert loop() == 12
    assert loop(first=2) == 10
    assert loop(step=5) == 3
    assert loop(first=20) == 0
    assert loop(note=', backend_config={"known_trip_count":{"n":"9"}}') == 9


def test_trip_count_that_cannot_be_read_is_unknown():
    assert loop(stop="get-tuple-element(%c), index=0") is None
    assert loop(step_op="multiply") is None
    assert loop(step=-1) is None
    assert loop(direction="NE") is None


def test_module_is_reachable_beside_the_function_of_its_name():
    assert importlib.import_module("matrixfsdp_jax.audit").audit is audit
