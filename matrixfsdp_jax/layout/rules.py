"""Which leaf is a matrix, and how it is read.

A `Rule` says what happens to the leaves that its pattern (or predicate) matches; the first rule
that matches wins, and `default_rules` puts safe defaults after the user's own rules. `route`
applies them to a tree and checks every decision. Only paths, shapes and dtypes are looked at.
"""

import fnmatch
import glob
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, cast, get_args

import jax
import jax.tree_util as jtu
import numpy as np

from matrixfsdp_jax.layout import leaves
from matrixfsdp_jax.layout.costs import METHODS, Method, method
from matrixfsdp_jax.layout.names import kind_by_name
from matrixfsdp_jax.layout.spec import (
    Leaf,
    LeafRoute,
    MatrixView,
    Route,
    Side,
    TensorView,
    View,
    is_inexact,
)

Match = str | Callable[[Leaf], bool]

_ROUTES = get_args(Route)
_SIDES = get_args(Side)


@dataclass(frozen=True)
class Rule:
    """What happens to the leaves that ``match`` names.

    Args:
      match: a glob over the whole ``"/"``-joined path, case-sensitive, in which ``*`` also
        crosses ``"/"``; or a predicate ``Leaf -> bool``.
      decide: the `LeafRoute` of such a leaf, or a function that computes it from the leaf.
      name: how reports and errors call the rule; the builders below give a call to paste.

    Examples:
      >>> Rule("base/*", LeafRoute("frozen", "LoRA")).matches(Leaf("base/0/w", (2, 2), "int8"))
      True
    """

    match: Match
    decide: LeafRoute | Callable[[Leaf], LeafRoute]
    name: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.match, str) or callable(self.match)):
            raise TypeError(
                f"a rule's match must be a path pattern such as 'blocks/*/kernel' or a predicate "
                f"Leaf -> bool, got {self.match!r}"
            )
        if not self.name:
            object.__setattr__(self, "name", _call("Rule", self.match))

    def matches(self, leaf: Leaf) -> bool:
        """Whether the rule speaks about this leaf."""
        if isinstance(self.match, str):
            return fnmatch.fnmatchcase(leaf.path, self.match)
        return bool(self.match(leaf))


@dataclass(frozen=True)
class Rules:
    """The user's rules, then the defaults: a function ``Leaf -> LeafRoute`` (see `default_rules`).

    Raises:
      TypeError: if ``rules`` holds anything but `Rule`.
      ValueError: when called, if neither a rule nor a default reads the leaf, or a decision is
        wrong.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"rules must be Rule objects such as stacked('blocks/*/kernel'), got {rule!r}"
                )

    def __call__(self, leaf: Leaf, record: Method = METHODS["muon"]) -> LeafRoute:
        """The route of one leaf under a method, checked."""
        for rule in self.rules:
            if rule.matches(leaf):
                decision = rule.decide(leaf) if callable(rule.decide) else rule.decide
                return _checked(leaf, decision, f"rule {rule.name}", record)
        return _default_route(leaf, record)


class NoRuleError(ValueError):
    """Leaves that neither a rule nor a default reads; the message offers rules to choose from."""

    def __init__(self, undecided: Sequence[Leaf], record: Method):
        self.leaves = tuple(undecided)
        first, *others = self.leaves
        lines = [f"{_text(first)} has rank {len(first.shape)} and no rule says how to read it."]
        lines.append("Give one of these as rules=[...] (from matrixfsdp_jax.layout.rules):")
        lines += [
            f"  {rule.name}  # {_reading_text(rule, first)}" for rule in _readings(first, record)
        ]
        lines.append(f"  {_call('rest', glob.escape(first.path))}  # not a matrix")
        if others:
            lines.append("Without a rule, too (one pattern may cover several):")
            lines += [f"  {_text(leaf)}" for leaf in others]
        super().__init__("\n".join(lines))


def default_rules(*extra: Rule) -> Rules:
    """Rules that try ``extra`` first and then safe defaults.

    The defaults, in this order: a leaf that has no gradient (integers, keys), is empty, or has
    rank 0 or 1 goes to rest; so do biases, scales, norms, embeddings and output heads of any rank,
    told by whole words of their path, and depthwise convolutions. What is left of rank 2 is a
    matrix ``[in, out]``. Of a higher rank it is a tensor as it is where the method takes tensors of
    that order (Shampoo and SOAP: 3 and 4; give stacked layers a rule), and otherwise an error that
    lists the possible rules.

    Examples:
      >>> rules = default_rules(stacked("blocks/*/kernel"))
      >>> rules(Leaf("blocks/mlp/kernel", (12, 64, 256), "float32")).view.batch_dims
      (0,)
      >>> rules(Leaf("Embed_0/embedding", (32, 8), "float32")).reason
      'named like an embedding'
    """
    return Rules(extra)


def matrix(
    match: Match,
    *,
    rows: Sequence[int] | None = None,
    cols: Sequence[int] | None = None,
    batch: Sequence[int] = (),
    out: Side = "cols",
    split: Sequence[int] = (),
    split_side: Side = "cols",
) -> Rule:
    """Read the leaf as ``[batch, rows, cols]`` by the dims given (see `MatrixView`).

    Args:
      match: path pattern or predicate, as in `Rule`.
      rows: dims that make up the rows, in order; negative ones count from the end. May be left
        out, like ``cols``, where two dims remain beside ``batch``: the first is the rows.
      cols: dims that make up the columns.
      batch: dims that count matrices (scanned layers, experts).
      out: the side of the layer's outputs, ``"rows"`` for a torch weight ``[out, in]``.
      split: sizes of the blocks that every matrix is cut into.
      split_side: the side that is cut.
    """
    row_dims = None if rows is None else _ints("rows", rows)
    col_dims = None if cols is None else _ints("cols", cols)
    batch_dims, splits = _ints("batch", batch), _ints("split", split)
    options = {"batch": batch_dims, "out": out, "split": splits, "split_side": split_side}
    name = _call("matrix", match, rows=row_dims, cols=col_dims, **options)

    def decide(leaf: Leaf) -> LeafRoute:
        dims = _matrix_dims(leaf, name, row_dims, col_dims, batch_dims)
        view = MatrixView(*dims, out_side=out, splits=splits, split_side=split_side)
        return LeafRoute("matrix", f"rule {name}", view)

    return Rule(match, decide, name)


def fused(
    match: Match,
    sizes: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    cols: Sequence[int] | None = None,
    batch: Sequence[int] = (),
    out: Side = "cols",
    split_side: Side = "cols",
) -> Rule:
    """A matrix that holds several side by side (fused QKV), cut into blocks of ``sizes``.

    The sizes may differ and must add up to the cut side; the other arguments are `matrix`'s.
    """
    return matrix(
        match, rows=rows, cols=cols, batch=batch, out=out, split=sizes, split_side=split_side
    )


def stacked(match: Match) -> Rule:
    """The last two dims are the matrix, all dims before them count matrices.

    For scanned layers ``[L, m, n]``, experts ``[E, m, n]``, and both ``[L, E, m, n]``.
    """
    name = _call("stacked", match)

    def decide(leaf: Leaf) -> LeafRoute:
        rank = len(leaf.shape)
        _need(rank >= 3, leaf, name, "leaves of rank 3 or more, [..., rows, cols]")
        view = MatrixView((rank - 2,), (rank - 1,), tuple(range(rank - 2)))
        return LeafRoute("matrix", f"rule {name}: a stack of matrices", view)

    return Rule(match, decide, name)


def conv(match: Match) -> Rule:
    """A convolution kernel ``[*spatial, in, out]`` (HWIO) read as ``(spatial * in, out)``.

    A depthwise kernel (one input channel per filter, ``shape[-2] == 1``) goes to rest.
    """
    name = _call("conv", match)

    def decide(leaf: Leaf) -> LeafRoute:
        rank = len(leaf.shape)
        _need(rank >= 3, leaf, name, "leaves of rank 3 or more, [*spatial, in, out]")
        if leaf.shape[-2] == 1:
            return LeafRoute("rest", f"rule {name}: depthwise, one input channel per filter")
        view = MatrixView(tuple(range(rank - 1)), (rank - 1,))
        return LeafRoute("matrix", f"rule {name}: convolution (spatial * in, out)", view)

    return Rule(match, decide, name)


def attention_in(match: Match, *, batch: int = 0) -> Rule:
    """A query, key or value projection ``[d, heads, head_dim]`` read as ``(d, heads*head_dim)``.

    ``batch`` is the number of leading dims that count layers.
    """
    return _attention("attention_in", match, batch, num_row_dims=1)


def attention_out(match: Match, *, batch: int = 0) -> Rule:
    """An output projection ``[heads, head_dim, d]`` read as ``(heads*head_dim, d)``.

    ``batch`` is the number of leading dims that count layers.
    """
    return _attention("attention_out", match, batch, num_row_dims=2)


def tensor(match: Match, batch_dims: Sequence[int] = ()) -> Rule:
    """The leaf as it is, of any order that the method takes (Shampoo and SOAP: 0 to 4).

    ``batch_dims`` are dims that count tensors (scanned layers, experts); negative ones count from
    the end. Nothing is flattened. Methods that take only matrices refuse it.
    """
    batch = _ints("batch_dims", batch_dims)
    name = _call("tensor", match, batch_dims=batch)

    def decide(leaf: Leaf) -> LeafRoute:
        rank = len(leaf.shape)
        own_batch = _from_start(batch, rank)
        dims = tuple(d for d in range(rank) if d not in own_batch)
        return LeafRoute("matrix", f"rule {name}", TensorView(batch_dims=own_batch, dims=dims))

    return Rule(match, decide, name)


def rest(match: Match) -> Rule:
    """Not a matrix: the elementwise optimizer updates the leaf."""
    name = _call("rest", match)
    return Rule(match, LeafRoute("rest", f"rule {name}"), name)


def frozen(match: Match) -> Rule:
    """Gathered for the model, never updated, without optimizer state (LoRA's base)."""
    name = _call("frozen", match)
    return Rule(match, LeafRoute("frozen", f"rule {name}"), name)


def route(
    tree: leaves.PyTree,
    rules: Rules | Sequence[Rule] | Callable[[Leaf], Any] | leaves.PyTree | None = None,
    *,
    optimizer: str | Method = "muon",
    allow_unused: bool = False,
) -> list[tuple[Leaf, LeafRoute]]:
    """Every leaf of ``tree`` with its route, in the tree's own leaf order.

    Args:
      tree: parameters, or their shapes (``jax.ShapeDtypeStruct``). ``None`` and
        ``optax.MaskedNode`` hold the place of an absent leaf.
      rules: one of
        - None: `default_rules`;
        - `Rules`, or rules to put before the defaults;
        - a function of a `Leaf` that returns ``"matrix"``, ``"rest"``, ``"frozen"``, a
          `MatrixView`, a `TensorView`, a `LeafRoute`, or ``"default"`` or None for the defaults;
        - a tree with the paths of ``tree`` and one of these values at each leaf; there, as in
          optax, None skips the leaf (rest) and ``"default"`` asks for the defaults.
      optimizer: the method whose orders count: a name in `costs.METHODS`, or a `costs.Method`.
      allow_unused: for trees of which a part, or all, is masked out: accept rules that match no
        leaf, entries of a given tree whose leaf is absent, and a tree without leaves.

    Raises:
      TypeError: if a leaf or a decision is of a wrong type.
      ValueError: if the tree has no leaf; one array stands at two paths; neither a rule nor a
        default reads a leaf of rank above 2; the method does not take its order; a decision does
        not fit its leaf; a rule matches nothing; a given tree differs from ``tree``. The message
        names the leaf and says what to change.

    Examples:
      >>> params = {"mlp": {"kernel": np.ones((8, 16)), "bias": np.ones(16)}}
      >>> [(leaf.path, decision.route) for leaf, decision in route(params)]
      [('mlp/bias', 'rest'), ('mlp/kernel', 'matrix')]
    """
    paths, values, _ = leaves.flatten(tree)
    if not paths and not allow_unused:
        raise ValueError(
            f"the tree has no leaf to route, got a {type(tree).__name__} without arrays; "
            "give the model's parameters, or their shapes as jax.ShapeDtypeStruct"
        )
    _refuse_ambiguous(paths)
    _refuse_tied(paths, values)
    described = [leaves.describe(p, v) for p, v in zip(paths, values, strict=True)]
    record = method(optimizer)
    decide = _decider(rules, described, allow_unused, record)
    routed: list[tuple[Leaf, LeafRoute]] = []
    undecided: list[Leaf] = []
    for leaf in described:
        try:
            routed.append((leaf, decide(leaf)))
        except NoRuleError as error:
            undecided += error.leaves
    if undecided:
        raise NoRuleError(undecided, record)
    return routed


def _decider(
    rules: Any, described: list[Leaf], allow_unused: bool, record: Method
) -> Callable[[Leaf], LeafRoute]:
    """What the user gave as rules, as one function of a leaf."""
    if rules is None:
        rules = Rules()
    if isinstance(rules, Rule):
        rules = (rules,)
    if isinstance(rules, list | tuple) and (
        not rules or any(isinstance(rule, Rule) for rule in rules)
    ):
        rules = Rules(tuple(rules))
    if isinstance(rules, Rules):
        if not allow_unused:
            _refuse_unused(rules, described)
        return partial(rules, record=record)
    # A module that defines __call__ is callable too, but as a pytree it is a node, not a leaf.
    if callable(rules) and jtu.treedef_is_leaf(jtu.tree_structure(rules)):
        source = f"function {_function_name(rules)}"
        return lambda leaf: _as_route(leaf, rules(leaf), source, record)
    given = _given_routes(rules, described, allow_unused)
    return lambda leaf: _as_route(leaf, given[leaf.path], "given tree", record)


def _given_routes(given: Any, described: list[Leaf], allow_unused: bool) -> dict[str, Any]:
    """The values of a given tree by path, None made visible."""
    skip = LeafRoute("rest", "given tree: None skips the leaf")
    visible = jtu.tree_map(lambda x: skip if x is None else x, given, is_leaf=lambda x: x is None)
    paths, values, _ = leaves.flatten(visible)
    known = {leaf.path for leaf in described}
    missing = [leaf.path for leaf in described if leaf.path not in set(paths)]
    extra = [
        path
        for path, value in zip(paths, values, strict=True)
        if path not in known and value is not skip and not _asks_default(value)
    ]
    if missing or (extra and not allow_unused):
        raise ValueError(
            "the tree given as rules differs from the tree of parameters: "
            f"{_listing('no route for', missing)}{_listing('a route for no leaf', extra)}"
            "give one of 'matrix', 'rest', 'frozen', 'default', a view or a LeafRoute at "
            "each leaf's path, or use path rules: default_rules(stacked('blocks/*'))"
        )
    return dict(zip(paths, values, strict=True))


def _asks_default(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "default")


def _as_route(leaf: Leaf, value: Any, source: str, record: Method) -> LeafRoute:
    """One decision of a function or of a given tree, checked."""
    if _asks_default(value):
        return _default_route(leaf, record)
    if isinstance(value, View):
        value = LeafRoute("matrix", f"{source}: view given", value)
    elif isinstance(value, str):
        view = MatrixView() if value == "matrix" and len(leaf.shape) == 2 else None
        value = LeafRoute(cast(Route, value), f"{source}: {value}", view)
    return _checked(leaf, value, source, record)


def _checked(leaf: Leaf, decision: Any, source: str, record: Method) -> LeafRoute:
    """The decision itself, if it fits the leaf."""
    if not isinstance(decision, LeafRoute):
        raise TypeError(
            f"{_text(leaf)}: {source} decided {decision!r}; expected a LeafRoute, a MatrixView, "
            "a TensorView, 'matrix', 'rest', 'frozen' or 'default'"
        )
    problem = _problem(leaf, decision, record)
    if problem:
        raise ValueError(f"{_text(leaf)}: {source} {problem}")
    return decision


def _problem(leaf: Leaf, decision: LeafRoute, record: Method) -> str | None:
    """What is wrong with a decision and what to do, or None."""
    view = decision.view
    if decision.route not in _ROUTES:
        return f"says route {decision.route!r}; use one of {', '.join(map(repr, _ROUTES))}"
    if decision.route != "matrix":
        if view is not None:
            return f"says {decision.route!r} and also gives {view}; leave the view out"
        return None
    otherwise = f"route it to rest, e.g. put {_call('rest', glob.escape(leaf.path))} first"
    if not is_inexact(leaf.dtype):
        return f"says 'matrix', but dtype {leaf.dtype} has no gradient; {otherwise}"
    if leaf.dtype.startswith("complex"):
        return f"says 'matrix', but matrix methods take no {leaf.dtype}; {otherwise}"
    if leaf.size == 0:
        return f"says 'matrix', but the leaf has no element; {otherwise}"
    if view is None:
        return f"says 'matrix' without a view; {_view_hint(leaf, record) or otherwise}"
    return _view_problem(leaf, view) or record.refusal(view, leaf.shape)


def _view_hint(leaf: Leaf, record: Method) -> str | None:
    """Views to choose from for a leaf of rank 2 or more."""
    rank = len(leaf.shape)
    views: list[View] = [MatrixView()]
    if rank > 2:
        views = [_view(rule, leaf) for rule in _readings(leaf, record)]
    return "\n  ".join(["give one, say", *dict.fromkeys(map(str, views))]) if rank >= 2 else None


def _view_problem(leaf: Leaf, view: View) -> str | None:
    rank = len(leaf.shape)
    groups = {"batch": view.batch_dims}
    if isinstance(view, TensorView):
        groups |= {"dims": view.dims}
    else:
        groups |= {"rows": view.row_dims, "cols": view.col_dims}
    if not all(isinstance(group, tuple) for group in (*groups.values(), view.splits)):
        return f"gives {view}; its dims and splits must be tuples of integers"
    reads = f"reads {', '.join(f'{name} {dims}' for name, dims in groups.items())}"
    if sorted(view.permutation) != list(range(rank)):
        return f"{reads}; together they must name each of the dims {tuple(range(rank))} once"
    if isinstance(view, TensorView):
        return None
    if not (view.row_dims and view.col_dims):
        return f"{reads}; rows and cols need at least one dim each"
    if view.out_side not in _SIDES or view.split_side not in _SIDES:
        return f"has sides {view.out_side!r}, {view.split_side!r}; use 'rows' or 'cols'"
    _, num_rows, num_cols = view.matrix_shape(leaf.shape)
    side = num_rows if view.split_side == "rows" else num_cols
    if view.splits and (min(view.splits) <= 0 or sum(view.splits) != side):
        return (
            f"splits {view.split_side} into {view.splits} (sum {sum(view.splits)}); give positive "
            f"sizes that add up to the {side} {view.split_side} of the matrix"
        )
    return None


def _refuse_ambiguous(paths: list[str]) -> None:
    """Layouts know leaves by path: of two leaves of one path, one would be lost."""
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ValueError(
            f"two leaves have the path {twice[0]!r}, because a key of the tree holds a '/' itself; "
            "rename that key"
        )


def _refuse_tied(paths: list[str], values: list[Any]) -> None:
    """One array at two paths would get two states and drift apart."""
    at: dict[int, list[str]] = {}
    for path, value in zip(paths, values, strict=True):
        if isinstance(value, jax.Array | np.ndarray):
            at.setdefault(id(value), []).append(path)
    for same in at.values():
        if len(same) > 1:
            raise ValueError(
                f"one and the same array stands at {' and '.join(map(repr, same))} (tied weights); "
                "its copies would get separate updates and drift apart. Tie by use: keep one leaf "
                "and use it twice in the model, e.g. logits = x @ embedding.T, or attend() of "
                "nnx.Embed or linen Embed. If they are only equal at the start, give each leaf "
                "its own copy (jnp.copy)"
            )


def _refuse_unused(rules: Rules, described: list[Leaf]) -> None:
    """A rule with a typo would silently change nothing."""
    unused = [rule for rule in rules.rules if not any(map(rule.matches, described))]
    if unused:
        rule = unused[0]
        near = get_close_matches(
            str(rule.match), [leaf.path for leaf in described], n=3, cutoff=0.0
        )
        raise ValueError(
            f"{', '.join(f'rule {r.name}' for r in unused)} matches no leaf of the tree; the paths "
            f"nearest to the first are {', '.join(map(repr, near))}. Correct or drop the rule"
        )


def _default_route(leaf: Leaf, record: Method) -> LeafRoute:
    """The defaults of `default_rules` for one leaf."""
    rank = len(leaf.shape)
    if not is_inexact(leaf.dtype):
        return LeafRoute("rest", f"{leaf.dtype}: no gradient")
    if leaf.size == 0:
        return LeafRoute("rest", "zero-size")
    if leaf.dtype.startswith("complex"):
        return LeafRoute("rest", "complex")
    if rank <= 1:
        return LeafRoute("rest", f"rank {rank}")
    kind = kind_by_name(leaf.path)
    if kind:
        return LeafRoute("rest", f"named like {kind}")
    if rank >= 3 and leaf.shape[-2] == 1 and re.search("conv|depthwise", leaf.path.lower()):
        return LeafRoute("rest", "depthwise convolution: one input channel per filter")
    if rank == 2:
        return LeafRoute("matrix", "rank 2", MatrixView())
    as_it_is = TensorView(dims=tuple(range(rank)))
    if record.refusal(as_it_is, leaf.shape) is None:
        return LeafRoute("matrix", f"rank {rank}: a tensor as it is", as_it_is)
    raise NoRuleError([leaf], record)


def _readings(leaf: Leaf, record: Method) -> list[Rule]:
    """The rules that could be meant for a leaf of rank above 2."""
    path, rank = glob.escape(leaf.path), len(leaf.shape)
    attention = [attention_in(path, batch=rank - 3), attention_out(path, batch=rank - 3)]
    others = [stacked(path), *attention]
    if rank >= 4:
        stacked_conv = matrix(path, rows=range(1, rank - 1), cols=(rank - 1,), batch=(0,))
        others = [stacked_conv, *others]
    if record.orders != (2,):
        others = [tensor(path, range(max(0, rank - max(record.orders)))), *others]
    return [*([conv(path)] if leaf.shape[-2] > 1 else []), *others]


def _view(rule: Rule, leaf: Leaf) -> View:
    assert callable(rule.decide)
    view = rule.decide(leaf).view
    assert view is not None
    return view


def _reading_text(rule: Rule, leaf: Leaf) -> str:
    view = _view(rule, leaf)
    item = view.item_shape(leaf.shape)
    count = math.prod(leaf.shape[d] for d in view.batch_dims)
    one, many = ("tensor", "tensors") if isinstance(view, TensorView) else ("matrix", "matrices")
    return f"{count} {one if count == 1 else many} of {' x '.join(map(str, item))}"


def _matrix_dims(
    leaf: Leaf,
    name: str,
    rows: tuple[int, ...] | None,
    cols: tuple[int, ...] | None,
    batch: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Rows, cols and batch of `matrix`: negative dims counted from the end, defaults filled in."""
    rank = len(leaf.shape)
    batch = _from_start(batch, rank)
    rows = None if rows is None else _from_start(rows, rank)
    cols = None if cols is None else _from_start(cols, rank)
    if rows is None or cols is None:
        left = [d for d in range(rank) if d not in batch]
        wants = "rows= and cols= unless exactly two dims remain beside batch"
        _need(len(left) == 2, leaf, name, wants, verb="needs")
        first, last = left
        if rows is None:
            rows = (last,) if cols == (first,) else (first,)
        if cols is None:
            cols = (first,) if rows == (last,) else (last,)
    return rows, cols, batch


def _from_start(dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(d + rank if d < 0 else d for d in dims)


def _attention(kind: str, match: Match, batch: int, num_row_dims: int) -> Rule:
    if not isinstance(batch, int) or batch < 0:
        raise ValueError(f"{kind}: batch is the number of leading dims, 0 or more, got {batch!r}")
    name = _call(kind, match, batch=batch)

    def decide(leaf: Leaf) -> LeafRoute:
        _need(len(leaf.shape) == batch + 3, leaf, name, f"leaves of rank {batch + 3}")
        middle = batch + num_row_dims
        rows, cols = range(batch, middle), range(middle, batch + 3)
        view = MatrixView(tuple(rows), tuple(cols), tuple(range(batch)))
        return LeafRoute("matrix", f"rule {name}: attention projection", view)

    return Rule(match, decide, name)


def _need(fits: bool, leaf: Leaf, name: str, wants: str, verb: str = "reads") -> None:
    if not fits:
        raise ValueError(
            f"{_text(leaf)}: rule {name} {verb} {wants}; narrow its pattern or put a rule for "
            f"this leaf first, e.g. {_call('rest', glob.escape(leaf.path))}"
        )


def _ints(key: str, value: Any) -> tuple[int, ...]:
    ints = tuple(value) if isinstance(value, Iterable) else None
    if ints is None or not all(isinstance(d, int) for d in ints):
        raise TypeError(f"{key} must be a sequence of integers such as (0, 1), got {value!r}")
    return ints


def _call(name: str, match: Match, **options: Any) -> str:
    """The text of a builder call, to paste; options at their defaults are left out."""
    pattern = repr(match) if isinstance(match, str) else _function_name(match)
    given = [f"{k}={v!r}" for k, v in options.items() if v not in (None, (), 0, "cols")]
    return f"{name}({', '.join([pattern, *given])})"


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _text(leaf: Leaf) -> str:
    return f"leaf {leaf.path!r} (shape {leaf.shape}, {leaf.dtype})"


def _listing(what: str, paths: list[str], limit: int = 5) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return f"{what} {', '.join(map(repr, paths[:limit]))}{more}; "
