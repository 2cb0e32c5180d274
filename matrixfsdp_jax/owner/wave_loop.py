"""A scan over stacked layers that holds few waves of whole parameters alive.

Shape legend: ``N`` devices on the owner axis, ``L`` layers, ``Q`` groups of ``G`` layers, ``U``
waves of a class that a group needs, ``b`` matrices of a layer in one leaf.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from matrixfsdp_jax.layout.packing import build_leaf
from matrixfsdp_jax.layout.spec import LeafPlan, Matrix, View
from matrixfsdp_jax.owner import collectives, prefetch

if TYPE_CHECKING:
    from matrixfsdp_jax.owner.lazy import LazyParams

PyTree = Any


def blocks_per_group(lazy: "LazyParams", block: str) -> int:
    """The least number of blocks like this one whose matrices fill waves of every class."""
    counts: dict[str, int] = {}
    for i in jtu.tree_leaves(lazy.below(block)):
        for key, *_ in lazy.layout.leaf_slots[i]:
            counts[key] = counts.get(key, 0) + 1
    return _filling(lazy.layout.num_devices, counts.values())


def _filling(num_devices: int, counts: Any) -> int:
    return math.lcm(*(num_devices // math.gcd(num_devices, k) for k in counts))


def take_waves(stack: jax.Array, waves: Sequence[int]) -> jax.Array:
    """Some waves of a local stack ``[1, W, *dims]``, in order; those in one run as a slice."""
    first, count = waves[0], len(waves)
    if list(waves) == list(range(first, first + count)):
        return stack[:, first : first + count]
    return jnp.take(stack, np.asarray(waves), axis=1)


# ---- the layers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stacked:
    """One matrix leaf ``[L, ...]``: where its matrices lie, and how a layer is built from them.

    ``slots[l]`` are ``(device, wave)`` of the ``b`` matrices of layer ``l``.
    """

    plan: LeafPlan
    key: str
    slots: np.ndarray
    matrices: tuple[Matrix, ...]

    def layer(self, stored: jax.Array) -> jax.Array:
        """The leaf of one layer from its matrices ``[b, *dims]``."""
        view, shape = _without_dim_0(self.plan.route.view), self.plan.leaf.shape[1:]
        leaf: jax.Array = build_leaf(list(stored), self.matrices, view, shape, jnp)
        return leaf


def _without_dim_0(view: View | None) -> Any:
    dims = {
        f.name: tuple(d - 1 for d in getattr(view, f.name) if d)
        for f in fields(view)  # type: ignore[arg-type]
        if f.name in ("row_dims", "col_dims", "batch_dims", "dims")
    }
    return replace(view, **dims)  # type: ignore[type-var]


def _stacked(lazy: "LazyParams", i: int, layers: int) -> _Stacked:
    lp, slots = lazy.layout.plan.leaves[i], lazy.layout.leaf_slots[i]
    view = lp.route.view
    if view is None or 0 not in view.batch_dims:
        raise ValueError(
            f"leaf {lp.leaf.path!r} {list(lp.leaf.shape)} is not read as layers stacked on dim 0 "
            f"but as {view}; say so in the rules (batch_dims=(0, ...)), or gather it by itself"
        )
    sizes = [lp.leaf.shape[d] for d in view.batch_dims]
    layer_of = [np.unravel_index(m.batch, sizes)[view.batch_dims.index(0)] for *_, m in slots]
    by_layer = [
        [s for s, at in zip(slots, layer_of, strict=True) if at == k] for k in range(layers)
    ]
    places = np.array([[(d, w) for _, d, w, _ in own] for own in by_layer])
    return _Stacked(lp, slots[0][0], places, tuple(m for *_, m in by_layer[0]))


def _layers(lazy: "LazyParams", path: str, indices: list[int], xs: PyTree) -> int:
    """``L``, the same for all leaves and ``xs``."""
    shapes = {lp.leaf.path: lp.leaf.shape for i in indices for lp in [lazy.layout.plan.leaves[i]]}
    shapes |= {f"xs{jtu.keystr(k)}": jnp.shape(x) for k, x in jtu.tree_leaves_with_path(xs)}
    sizes = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise ValueError(
            f"scan over {path!r} needs the same number of layers on dim 0 of every leaf and of xs, "
            f"got {sizes}; give the path of the stacked leaves alone"
        )
    return int(next(iter(sizes.values())) or 0)


# ---- the loop ----------------------------------------------------------------------------------


def scan(
    lazy: "LazyParams",
    fn: Callable[..., tuple[Any, Any]],
    carry: Any,
    path: str,
    xs: PyTree,
    prefetch: bool,
) -> tuple[Any, PyTree]:
    """See ``LazyParams.scan``."""
    from matrixfsdp_jax.owner.lazy import unboxed

    tree = lazy.below(path)
    indices = jtu.tree_leaves(tree)
    layers = _layers(lazy, path, indices, xs)
    in_stacks = [i for i in indices if lazy.layout.leaf_slots[i]]
    stacked = {i: _stacked(lazy, i, layers) for i in in_stacks}
    plans = {i: lazy.layout.plan.leaves[i] for i in indices if i not in stacked}
    rest = lazy.outside(plans.values())
    others = {i: rest[lp.leaf.path] for i, lp in plans.items()}

    def layer(carry: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        matrices, others, x = inputs
        whole = {i: stacked[i].layer(m) for i, m in matrices.items()} | others
        params = unboxed(jtu.tree_map(whole.__getitem__, tree))
        carry, y = fn(carry, params) if xs is None else fn(carry, params, x)
        return _varying(lazy, carry), y

    loop = _Loop(lazy, stacked, layer, prefetch)
    size = min(
        layers, _filling(lazy.layout.num_devices, [s.slots.shape[1] for s in stacked.values()])
    )
    full = layers // size * size
    carry, ys = _varying(lazy, carry), []
    for start, stop, per_group in ((0, full, size), (full, layers, layers - full)):
        if start < stop:
            carry, y = loop.run(carry, start, stop, per_group, (others, xs))
            ys.append(y)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *ys)


@dataclass(frozen=True)
class _Loop:
    lazy: "LazyParams"
    stacked: dict[int, _Stacked]
    layer: Callable[..., tuple[Any, Any]]
    prefetch: bool

    def run(
        self, carry: Any, start: int, stop: int, size: int, scanned: PyTree
    ) -> tuple[Any, PyTree]:
        """The layers from ``start`` to ``stop`` in groups of ``size``."""
        count = (stop - start) // size
        waves = {key: self._waves(key, start, count, size) for key in self._keys()}
        picks = {i: self._picks(s, waves[s.key], start, size) for i, s in self.stacked.items()}
        static = {i: p[0] for i, p in picks.items() if (p == p[0]).all()}
        stacks = {key: self._grouped(key, own) for key, own in waves.items()}
        scanned = jax.tree.map(lambda x: x[start:stop].reshape(count, size, *x.shape[1:]), scanned)
        moving = {i: jnp.asarray(p) for i, p in picks.items() if i not in static}

        def run(carry: Any, waves: Any, inputs: Any) -> tuple[Any, Any]:
            moving, scanned = inputs
            matrices = self._matrices(waves, static | moving, size)
            body = jax.checkpoint(self.layer, prevent_cse=False)
            return lax.scan(body, carry, (matrices, *scanned))

        if self.prefetch and count > 1:
            varying = partial(_varying, self.lazy)
            carry, ys = prefetch.scan(run, self._gather, carry, stacks, (moving, scanned), varying)
        else:

            @partial(jax.checkpoint, prevent_cse=False)
            def group(carry: Any, inputs: Any) -> tuple[Any, Any]:
                return run(carry, self._gather(inputs[0]), inputs[1])

            carry, ys = lax.scan(group, carry, (stacks, (moving, scanned)))
        return carry, jax.tree.map(lambda y: y.reshape(stop - start, *y.shape[2:]), ys)

    def _keys(self) -> list[str]:
        return sorted({s.key for s in self.stacked.values()})

    def _waves(self, key: str, start: int, count: int, size: int) -> np.ndarray:
        """``[Q, U]``: the waves of a class that each group needs; the last again where fewer."""
        own = [
            sorted(
                {
                    int(w)
                    for s in self.stacked.values()
                    if s.key == key
                    for w in s.slots[k : k + size, :, 1].flat
                }
            )
            for k in range(start, start + count * size, size)
        ]
        most = max(map(len, own))
        return np.array([w + w[-1:] * (most - len(w)) for w in own])

    def _picks(self, s: _Stacked, waves: np.ndarray, start: int, size: int) -> np.ndarray:
        """``[Q, G b]``: where its matrices are in the group's waves ``[U N]``."""
        num = self.lazy.layout.num_devices
        groups = s.slots[start : start + len(waves) * size].reshape(len(waves), -1, 2)
        return np.array(
            [
                [own.index(w) * num + d for d, w in group]
                for own, group in zip(waves.tolist(), groups.tolist(), strict=True)
            ]
        )

    def _grouped(self, key: str, waves: np.ndarray) -> jax.Array:
        """The local stack by groups, ``[Q, 1, U, *dims]``."""
        taken = take_waves(self.lazy.stack(key), waves.ravel().tolist())
        return taken.reshape(len(waves), 1, waves.shape[1], *taken.shape[2:])

    def _gather(self, stacks: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
        """The waves ``[N, *dims]`` of a group on every device."""
        dtypes = {c.key: c.dtype for c in self.lazy.layout.plan.classes}
        waves = {}
        for key, stack in stacks.items():
            with jax.named_scope("mfsdp.gather"), jax.named_scope(key):
                wire = self.lazy.wire(dtypes[key])
                waves[key] = collectives.gather_waves(stack, wire, split=False)
        return waves

    def _matrices(
        self, waves: dict[str, list[jax.Array]], picks: dict[int, Any], size: int
    ) -> dict[int, jax.Array]:
        """Whole matrices ``[G, b, *dims]`` of every leaf."""
        return {
            i: x.reshape(size, -1, *x.shape[1:])
            for i, pick in picks.items()
            for x in [_picked(waves[self.stacked[i].key], pick)]
        }


def _varying(lazy: "LazyParams", tree: PyTree) -> PyTree:
    axis = lazy.layout.data_axis
    return jax.tree.map(lambda x: collectives.varying(x, axis), tree)


def _picked(waves: list[jax.Array], pick: Any) -> jax.Array:
    """Matrices ``[G b, *dims]`` of waves ``[N, *dims]``; whole waves are taken as they are."""
    if isinstance(pick, np.ndarray):
        num = len(waves[0])
        used = np.unique(pick // num)
        waves = [waves[u] for u in used]
        pick = np.searchsorted(used, pick // num) * num + pick % num
    whole = jnp.concatenate(waves) if len(waves) > 1 else waves[0]
    if isinstance(pick, np.ndarray) and pick.tolist() == list(range(len(whole))):
        return whole
    return jnp.take(whole, pick, axis=0)
