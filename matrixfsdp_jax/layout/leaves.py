"""Paths of the user's tree: the one place that names leaves.

Only pytree structure is looked at. Works on nested dicts and lists, ``nnx.State``, nnx modules,
linen params (boxed with partitioning metadata or not), dataclass pytrees, and trees with ``None``
or ``optax.MaskedNode`` in place of a leaf.
"""

import re
from collections import Counter
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np
import optax

from matrixfsdp_jax.layout.spec import Leaf

PyTree = Any
State = TypeVar("State")

_BOX_FIELDS = ("value", "raw_value")


def flatten(tree: PyTree) -> tuple[list[str], list[Any], Any]:
    """Return ``(paths, leaves, treedef)`` of a tree, leaves in the tree's own order.

    A path joins the keys with ``"/"``. The field by which flax boxes hold their array
    (``.value`` of an nnx Variable or of a linen ``Partitioned``) is left out of it.
    """
    items, treedef = jtu.tree_flatten_with_path(tree)
    full = [jtu.keystr(keys, simple=True, separator="/") for keys, _ in items]
    short = [_path_without_box(keys) for keys, _ in items]
    counts = Counter(short)
    paths = [s if counts[s] == 1 else f for s, f in zip(short, full, strict=True)]
    return paths, [leaf for _, leaf in items], treedef


def _path_without_box(keys: tuple[Any, ...]) -> str:
    last = keys[-1] if keys else None
    if len(keys) > 1 and isinstance(last, jtu.GetAttrKey) and last.name in _BOX_FIELDS:
        keys = keys[:-1]
    return jtu.keystr(keys, simple=True, separator="/")


def describe(path: str, value: Any) -> Leaf:
    """The shape and dtype of one leaf: an array, a ``ShapeDtypeStruct`` or a Python scalar.

    Raises:
      TypeError: if the leaf is not array-like (say, a string or a function).
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return Leaf(path, tuple(int(d) for d in value.shape), str(value.dtype))
    if isinstance(value, (bool, int, float, complex)):
        return Leaf(path, (), str(np.asarray(value).dtype))
    raise TypeError(
        f"leaf {path!r} is a {type(value).__name__}, which has no shape and dtype; "
        "give arrays or jax.ShapeDtypeStruct"
    )


def is_masked(x: Any) -> bool:
    """Whether ``optax.masked`` has hidden a leaf here."""
    return isinstance(x, optax.MaskedNode)


def states_of(kind: type[State], state: PyTree) -> list[State]:
    """All states of a kind in an optax state."""

    def is_kind(x: Any) -> bool:
        return isinstance(x, kind)

    return [x for x in jtu.tree_leaves(state, is_leaf=is_kind) if is_kind(x)]


def spread(prefix: PyTree, tree: PyTree) -> PyTree:
    """The values of a prefix of ``tree`` at each of its leaves. ValueError if it is none."""
    return jtu.tree_map(lambda value, part: jtu.tree_map(lambda _: value, part), prefix, tree)


def children(tree: PyTree) -> list[tuple[str, PyTree]]:
    """The nodes one below the root of a tree, each with its key as in a path."""
    items, _ = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return [(jtu.keystr(keys, simple=True, separator="/"), child) for keys, child in items if keys]


def subtree(tree: PyTree, path: str) -> PyTree:
    """What lies at a path, a leaf or a tree; all for ``""``.

    Raises:
      ValueError: if nothing does.
    """
    node, left = tree, path
    while left:
        below = children(node)
        found = [(k, c) for k, c in below if left == k or left.startswith(f"{k}/")]
        if not found:
            parent = path[: len(path) - len(left)].rstrip("/")
            names = [key for key, _ in below]
            raise ValueError(
                f"there is nothing at {path!r}: below {parent or 'the root'!r} are {names[:8]}"
                + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            )
        key, node = found[0]
        left = left[len(key) + 1 :]
    return node


def natural_key(path: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which ``blocks/2`` comes before ``blocks/10``."""
    parts = re.split(r"(\d+)", path)
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if p)
