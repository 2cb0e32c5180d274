import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixfsdp_jax.layout.costs import costs
from matrixfsdp_jax.layout.picture import plot
from matrixfsdp_jax.layout.planner import make_plan
from matrixfsdp_jax.layout.report import render, to_dict
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, MatrixView

MATRIX = LeafRoute("matrix", "a 2-D kernel", MatrixView())
NORM = LeafRoute("rest", "rank 1 (norm or bias)")


def gpt(num_layers=12, d=16):
    routed = [(Leaf("embed/embedding", (64, d), "float32"), LeafRoute("rest", "an embedding"))]
    for i in range(num_layers):
        block = f"model/decoder/blocks/{i}"
        for name, shape in (("attn/q", (d, d)), ("attn/k", (d, d)), ("mlp/up", (d, 4 * d))):
            routed.append((Leaf(f"{block}/{name}/kernel", shape, "float32"), MATRIX))
        routed.append((Leaf(f"{block}/norm/scale", (d,), "float32"), NORM))
    qkv = MatrixView((1,), (2,), (0,), splits=(32, 8, 8))
    routed.append((Leaf("scan/qkv", (3, d, 48), "float32"), LeafRoute("matrix", "fused", qkv)))
    routed.append((Leaf("lora/base", (7, 5), "bfloat16"), LeafRoute("frozen", "LoRA's base")))
    return routed


def leaf_rows(text: str) -> dict[str, tuple[int, str]]:
    """Pattern -> (number of leaves, route and why), with folded cells joined again."""
    lines = text[text.index("\nLeaves\n") :].splitlines()
    header = next(line for line in lines if line.lstrip().startswith("leaf"))
    cuts = [header.index(name) for name in ("leaf", "#", "shape", "route")]
    rows: list[list[str]] = []
    for line in lines[lines.index(header) + 2 :]:
        cells = [line[a:b].strip() for a, b in zip(cuts, [*cuts[1:], None], strict=True)]
        if cells[1]:
            rows.append(cells)
        elif any(cells):
            rows[-1][0] += cells[0]
            rows[-1][3] += " " + cells[3]
    return {pattern: (int(count), why.strip()) for pattern, count, _, why in rows}


def expand(pattern: str) -> list[str]:
    """The paths that a pattern with ``{0..2,5}`` stands for."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = []
    for k, part in enumerate(parts):
        if k % 2 == 0:
            choices.append([part])
            continue
        numbers: list[str] = []
        for run in part.split(","):
            first, _, last = run.partition("..")
            numbers += [str(x) for x in range(int(first), int(last or first) + 1)]
        choices.append(numbers)
    return ["".join(each) for each in itertools.product(*choices)]


@pytest.mark.parametrize("num_devices", [1, 8, 64])
@pytest.mark.parametrize("every_leaf", [False, True])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_too_long_and_nothing_is_cut(num_devices, every_leaf, width):
    plan = make_plan(gpt(), num_devices)
    text = render(plan, width=width, every_leaf=every_leaf)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for pattern, (_, why) in leaf_rows(text).items():
        (reason,) = {p.route.reason for p in plan.leaves if p.leaf.path in expand(pattern)}
        assert why.endswith(f": {reason}")


@pytest.mark.parametrize(("dims", "amount"), [((4, 4), "1920 FLOP"), ((64, 256), "23.6 MFLOP")])
def test_amounts_of_work_have_a_unit(dims, amount):
    """Five Newton-Schulz steps of 4 m^2 n + 2 m^3."""
    text = render(make_plan([(Leaf("w", dims, "float32"), MATRIX)], 1))
    assert f"update per device: {amount} (5 Newton-Schulz steps)" in text


@pytest.mark.parametrize("every_leaf", [False, True])
def test_every_leaf_is_in_the_table_once(every_leaf):
    plan = make_plan(gpt(), 8)
    rows = leaf_rows(render(plan, every_leaf=every_leaf))
    shown = [path for pattern in rows for path in expand(pattern)]
    assert sorted(shown) == sorted(p.leaf.path for p in plan.leaves)
    assert all(count == len(expand(pattern)) for pattern, (count, _) in rows.items())
    assert len(rows) == (len(plan.leaves) if every_leaf else 7)


@settings(deadline=None)
@given(
    st.sets(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=30),
    st.integers(0, 4),
)
def test_folded_paths_stand_for_exactly_their_leaves(numbers, odd_one):
    routed = [
        (
            Leaf(f"b{i}/e/{j}/w{k}", (4, 4), "bfloat16" if k == odd_one else "float32"),
            LeafRoute("rest", "why"),
        )
        for i, j, k in sorted(numbers)
    ]
    rows = leaf_rows(render(make_plan(routed, 3)))
    shown = [path for pattern in rows for path in expand(pattern)]
    assert sorted(shown) == sorted(leaf.path for leaf, _ in routed)


def test_leaves_that_differ_in_reason_are_not_folded():
    routed = [
        (Leaf("w/0", (4,), "float32"), LeafRoute("rest", "rank 1")),
        (Leaf("w/1", (4,), "float32"), LeafRoute("rest", "by your rule")),
    ]
    rows = leaf_rows(render(make_plan(routed, 3)))
    assert rows == {
        "w/0": (1, "rest, replicated: rank 1"),
        "w/1": (1, "rest, replicated: by your rule"),
    }


def test_paths_with_markup_are_printed_as_they_are():
    routed = [(Leaf("[bold]x[/bold]:smile:", (4,), "float32"), NORM)]
    assert "[bold]x[/bold]:smile:" in render(make_plan(routed, 1))


def test_headline_figures():
    plan = make_plan(gpt(), 8, gather_dtype="bfloat16", reduce_dtype="float32")
    text = " ".join(render(plan).split())
    cost = costs(plan)
    assert "muon on 8 devices: 45 matrices in 4 classes, 51 leaves" in text
    assert "gather in bfloat16, reduce in float32" in text
    assert f"stacks hold {cost.padding_factor:.2f} x" in text
    assert f"{cost.flops.padded_balance:.2f} x the mean" in text
    assert f"memory per device: {cost.memory.padded / 1024:.1f} KiB" in text
    assert f"all-gather {cost.received('all-gather') / 1024:.1f} KiB" in text
    assert "in each leaf's own dtype" in render(make_plan(gpt(), 8))


def test_one_device_and_no_matrix():
    text = render(make_plan(gpt(), 1))
    assert "muon on 1 device:" in text
    assert "received per device and step: nothing" in text
    text = render(make_plan([(Leaf("b", (4,), "float32"), NORM)], 8))
    assert "0 matrices in 0 classes" in text
    assert "padding" not in text


def test_every_leaf_shows_its_slots():
    plan = make_plan(gpt(), 8)
    rows = leaf_rows(render(plan, every_leaf=True, width=200))
    leaf = next(each for each in to_dict(plan)["leaves"] if each["path"] == "scan/qkv")
    slots = " ".join(f"{m['device']}/{m['wave']}" for m in leaf["matrices"])
    assert rows["scan/qkv"] == (1, f"matrix 16x32, 8x16 at {slots}: fused")


def test_dict_goes_through_json_and_is_complete():
    plan = make_plan(gpt(), 8, gather_dtype="bfloat16")
    data = to_dict(plan)
    assert json.loads(json.dumps(data)) == data
    assert [leaf["path"] for leaf in data["leaves"]] == [p.leaf.path for p in plan.leaves]
    assert all(leaf["reason"] and leaf["route"] for leaf in data["leaves"])
    stacked = {
        (m["name"], cls["key"], m["device"], m["wave"])
        for cls in data["classes"]
        for m in cls["matrices"]
    }
    listed = [
        (m["name"], m["class"], m["device"], m["wave"])
        for leaf in data["leaves"]
        for m in leaf["matrices"]
    ]
    assert len(listed) == len(stacked) == 45
    assert set(listed) == stacked
    qkv = next(leaf for leaf in data["leaves"] if leaf["path"] == "scan/qkv")
    assert [m["name"] for m in qkv["matrices"]] == [
        f"scan/qkv[{i}]:{k}" for i in range(3) for k in range(3)
    ]
    cost = costs(plan)
    assert [device["flops"] for device in data["devices"]] == list(cost.flops.real)
    assert data["costs"]["every_device"]["memory"] == cost.memory.padded
    assert sum(c["total_bytes"] for c in data["costs"]["collectives"]) == sum(
        cost.received(kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )


def drawn(plan, tmp_path, monkeypatch):
    """The figure that ``plot`` writes, and its file."""
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    figures = []
    save = matplotlib_figure.Figure.savefig

    def keep(figure, *args, **kwargs):
        figures.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(matplotlib_figure.Figure, "savefig", keep)
    path = tmp_path / "layout.png"
    plot(plan, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return figures[0]


@pytest.mark.parametrize("num_devices", [1, 8, 64])
def test_picture_has_a_cell_for_every_slot(num_devices, tmp_path, monkeypatch):
    plan = make_plan(gpt(), num_devices)
    figure = drawn(plan, tmp_path, monkeypatch)
    assert len(figure.axes) == len(plan.classes)
    for axes, cls in zip(figure.axes, plan.classes, strict=True):
        hatched = sum(len(c.get_paths()) for c in axes.collections if c.get_hatch())
        cells = sum(len(c.get_paths()) for c in axes.collections)
        assert cells == cls.num_devices * cls.num_waves
        assert hatched == cls.num_pads
        assert axes.get_title(loc="left").startswith(cls.key)


@pytest.mark.parametrize(("num_devices", "label"), [(8, "attn/q 3"), (64, "3")])
def test_labels_shrink_to_numbers_and_stay_in_their_cells(
    num_devices, label, tmp_path, monkeypatch
):
    routed = [each for each in gpt() if each[0].path.startswith("model")]
    figure = drawn(make_plan(routed, num_devices), tmp_path, monkeypatch)
    assert label in {text.get_text() for text in figure.axes[0].texts}
    for axes in figure.axes:
        for text in axes.texts:
            box = text.get_window_extent().transformed(axes.transData.inverted())
            assert 0 < box.width < 1
            assert 0 < abs(box.height) < 1


def test_picture_of_no_matrix(tmp_path, monkeypatch):
    plan = make_plan([(Leaf("b", (4,), "float32"), NORM)], 8)
    assert drawn(plan, tmp_path, monkeypatch).axes == []


def test_picture_of_very_many_waves_has_a_bounded_size_and_no_label(tmp_path, monkeypatch):
    view = MatrixView((1,), (2,), (0,))
    routed = [
        (Leaf("experts", (1500, 4, 8), "float32"), LeafRoute("matrix", "experts", view)),
        (Leaf("one", (4, 4), "float32"), MATRIX),
    ]
    figure = drawn(make_plan(routed, 1), tmp_path, monkeypatch)
    assert figure.get_figheight() < 65
    assert not figure.axes[1].texts
