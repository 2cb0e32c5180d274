"""Momentum of a running Muon of optax or torch, put into a state of this package."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
import optax

from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.owner import host
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.transforms.muon import MuonState

PyTree = Any
TorchName = str | int


def import_momentum(
    state: PyTree,
    source: Any,
    *,
    layout: OwnerLayout | None = None,
    count: int | None = None,
    torch_names: Mapping[str, TorchName] | Callable[[str], TorchName] | None = None,
    torch_transposed: bool | Iterable[str] | None = None,
    drop: Iterable[str] = (),
) -> PyTree:
    """A fresh state of ``mfsdp.muon`` with the momentum of another Muon that is already running.

    Args:
      state: from ``tx.init(params)`` or ``layout.init(tx, owned)``, for a ``tx`` with exactly one
        ``mfsdp.muon`` or ``scale_by_muon`` in it.
      source: a state of ``optax.contrib.muon`` (any optax state around it), or the
        ``state_dict()`` of a ``torch.optim.Muon``. Both hold averages of the gradients:
        ``momentum_rule="ema"``. For ``"sum"`` divide by ``1 - b`` first.
      layout: the layout of ``state``; None for a state on the user's own tree.
      count: number of updates made so far, for schedules and bias correction; None takes that of
        an optax state. A torch state has none, so give it.
      torch_names: torch only: from path here to the parameter's name (as given to the optimizer
        by ``named_parameters()``) or index there.
      torch_transposed: torch only: whether torch's ``[out, in]`` are ``[in, out]`` here, for all
        or for the paths given. Shapes alone would not say for square matrices.
      drop: paths whose momentum is given up on purpose (optax gives one to embeddings).

    Returns:
      A new state. Counts of the matrix part are set to ``count``; the state of ``rest`` is not
      touched.

    Raises:
      ValueError: if a matrix here has no momentum there or another shape, or a momentum there has
        no matrix here and is not in ``drop``; the message names it.
    """
    _check_arguments(count, torch_transposed, drop)
    own = _only_momentum(state)
    _check_layout(own.mu, layout)
    if layout is None:
        paths, values, _ = tree_leaves.flatten(own.mu)
        shapes = {p: x.shape for p, x in zip(paths, values, strict=True)}
    else:
        plan = layout.plan
        shapes = {lp.leaf.path: lp.leaf.shape for lp in plan.leaves if lp.route.route == "matrix"}
    if isinstance(source, Mapping) and {"state", "param_groups"} <= set(source):
        momenta = _torch_momenta(source, list(shapes), torch_names, torch_transposed)
    else:
        momenta, found = _optax_momenta(source)
        count = found if count is None else count
    if count is None:
        raise ValueError("a torch state has no count; give count=, the number of updates made")
    _check(momenta, shapes, set(drop))
    if layout is None:
        mu = _like(own.mu, [momenta[path] for path in shapes])
    else:
        mu = host.to_stacks(layout, momenta, {key: x.dtype for key, x in own.mu.items()})
    return _replaced(state, mu, count)


def _check_arguments(count: Any, transposed: Any, drop: Any) -> None:
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if count is not None and not (whole and 0 <= count < 2**31):
        raise ValueError(f"count={count!r} must be a number of updates, an int in [0, 2**31)")
    for name, paths in (("torch_transposed", transposed), ("drop", drop)):
        if isinstance(paths, str):
            raise TypeError(f"{name}={paths!r} must be a list of paths: [{paths!r}]")


def _check_layout(mu: PyTree, layout: OwnerLayout | None) -> None:
    """Whether the state is of this layout, or on the user's own tree."""
    shapes = {} if layout is None else {c.key: c.stack_shape for c in layout.plan.classes}
    stacked = isinstance(mu, dict) and bool(mu) and all(":" in str(key) for key in mu)
    if layout is None and stacked:
        raise ValueError("the state is that of a layout; give layout=, the one it was made with")
    if layout is None:
        return
    got = {key: getattr(x, "shape", None) for key, x in mu.items()} if stacked else None
    if got != shapes:
        raise ValueError(
            f"the state is not that of {layout!r}, which has stacks {shapes}, but "
            + (
                "on the user's own tree; leave layout= out"
                if got is None
                else f"has {got}; give the layout it was made with"
            )
        )


def _only_momentum(state: PyTree) -> MuonState:
    found = tree_leaves.states_of(MuonState, state)
    if len(found) != 1:
        raise ValueError(
            f"the state holds {len(found)} states of mfsdp.muon, expected one; import into each "
            "optimizer before they are chained or partitioned"
        )
    return found[0]


def _is_own(x: Any) -> bool:
    return isinstance(x, MuonState)


def _optax_momenta(source: PyTree) -> tuple[dict[str, Any], int]:
    found = tree_leaves.states_of(optax.contrib.MuonState, source)
    if len(found) != 1:
        raise ValueError(
            f"the source holds {len(found)} states of optax.contrib.muon, expected one (or the "
            "state_dict() of a torch.optim.Muon)"
        )
    paths, values, _ = tree_leaves.flatten(found[0].mu)
    return dict(zip(paths, values, strict=True)), int(found[0].count)


def _torch_momenta(
    source: Mapping[str, Any],
    paths: list[str],
    names: Any,
    transposed: bool | Iterable[str] | None,
) -> dict[str, Any]:
    """By our paths, in our orientation; what has no path here keeps its torch name."""
    if names is None or transposed is None:
        raise ValueError(
            "a torch state needs torch_names= (path here -> name or index there) and "
            "torch_transposed= (whether [out, in] there is [in, out] here)"
        )
    index_of: dict[TorchName, int] = {}
    for group in source["param_groups"]:
        index_of |= {i: i for i in group["params"]}
        index_of |= dict(zip(group.get("param_names", ()), group["params"], strict=False))
    turned = set(paths) if transposed is True else set(transposed or ())
    if turned - set(paths):
        raise ValueError(f"torch_transposed names {sorted(turned - set(paths))}, no matrices here")
    left = {i: buffers["momentum_buffer"] for i, buffers in source["state"].items()}
    momenta: dict[str, Any] = {}
    for path in paths:
        name = names(path) if callable(names) else names.get(path)
        if name not in index_of or index_of[name] not in left:
            raise ValueError(
                f"torch_names gives {name!r} for {path!r}, which has no momentum there; there are "
                f"{[n for n, i in index_of.items() if i in left][:8]} (a parameter that was never "
                "stepped, or another optimizer's, has none)"
            )
        value = left.pop(index_of[name]).detach().to("cpu").float().numpy()
        momenta[path] = value.T if path in turned else value
    name_of = {i: name for name, i in index_of.items()}
    return momenta | {str(name_of[i]): value for i, value in left.items()}


def _check(momenta: dict[str, Any], shapes: dict[str, Any], drop: set[str]) -> None:
    unknown = sorted(drop - set(momenta))
    if unknown:
        raise ValueError(f"drop names {unknown}, for which the source has no momentum")
    unused = sorted(set(momenta) - set(shapes) - drop)
    if unused:
        raise ValueError(
            f"the source has momentum for {unused[:5]}, no matrices here; route them with rules, "
            "or give their momentum up with drop="
        )
    for path, shape in shapes.items():
        if path not in momenta:
            raise ValueError(
                f"matrix {path!r} has no momentum in the source, which has {sorted(momenta)[:8]}"
            )
        if tuple(np.shape(momenta[path])) != tuple(shape):
            raise ValueError(
                f"momentum of {path!r} is {list(np.shape(momenta[path]))} in the source and "
                f"{list(shape)} here"
            )


def _like(mu: PyTree, values: list[Any]) -> PyTree:
    """``values`` in the structure, dtypes and places of ``mu``."""
    old, treedef = jax.tree.flatten(mu)
    new = [_placed(v, x) for v, x in zip(values, old, strict=True)]
    return jax.tree.unflatten(treedef, new)


def _placed(value: Any, like: Any) -> jax.Array:
    array = np.array(host.host_value(value)).astype(like.dtype)
    return jax.device_put(array, getattr(like, "sharding", None))


def _replaced(state: PyTree, mu: PyTree, count: int) -> PyTree:
    """The new momentum, and the new count wherever the same matrix part counts."""
    items = jtu.tree_leaves_with_path(state, is_leaf=_is_own)
    path = next(keys for keys, x in items if _is_own(x))
    inner = max(i for i, key in enumerate(path) if _name(key) == "matrix")
    part = path[: inner + 1]

    def replace(keys: tuple[Any, ...], x: Any) -> Any:
        if _is_own(x):
            return MuonState(_placed(count, x.count), mu)
        if keys[: len(part)] == part and _name(keys[-1]) == "count":
            return _placed(count, x)
        return x

    return jtu.tree_map_with_path(replace, state, is_leaf=_is_own)


def _name(key: Any) -> Any:
    return getattr(key, "name", getattr(key, "key", None))
