"""A stack transform on the user's own tree, on one device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.layout.costs import Method
from matrixfsdp_jax.layout.packing import build_leaf, take_matrix
from matrixfsdp_jax.layout.planner import make_plan
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, Matrix, MatrixView, Plan
from matrixfsdp_jax.owner.update import Local

PyTree = Any


def all_slots(key: str, table: Any) -> jax.Array:
    """The ``Local`` of whole stacks: every slot of a table belongs to them."""
    del key
    return jnp.asarray(table)


def on_canonical(
    make: Callable[[Plan, Local], optax.GradientTransformation],
    routes: dict[str, tuple[Leaf, LeafRoute]],
    optimizer: str | Method = "muon",
) -> optax.GradientTransformationExtraArgs:
    """A stack transform on a tree of matrix leaves, on one device.

    The leaves are packed into one stack ``[1, W, *dims]`` per shape class, updated, and unpacked.
    The classes are those of ``optimizer``.
    State that belongs to matrices (a dict with the keys of the stacks) is held per leaf, as
    ``{path: {class key: [k, ...]}}`` for the ``k`` matrices of a leaf in a class.
    """

    def init(params: PyTree) -> PyTree:
        packing = _Packing(params, routes, optimizer)
        tx = make(packing.plan, all_slots)
        return packing.unpack_state(tx.init(packing.pack(params)))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        packing = _Packing(updates, routes, optimizer)
        tx = optax.with_extra_args_support(make(packing.plan, all_slots))
        stacks = packing.pack(updates)
        template = jax.eval_shape(tx.init, stacks)
        stacks, new = tx.update(
            stacks,
            packing.pack_state(state, template),
            None if params is None else packing.pack(params),
            **extra,
        )
        return packing.unpack(stacks), packing.unpack_state(new)

    return optax.GradientTransformationExtraArgs(init, update)


def is_placeholder(tree: PyTree) -> bool:
    """Whether this is the object by which ``optax.tree.map_params`` stands for any tree."""
    return not jax.tree.leaves(tree) and not isinstance(tree, Mapping | Sequence)


class _Packing:
    """How the leaves of a tree lie in stacks of one device."""

    def __init__(
        self, tree: PyTree, routes: dict[str, tuple[Leaf, LeafRoute]], optimizer: str | Method
    ) -> None:
        self.paths, values, self.treedef = tree_leaves.flatten(tree)
        self.shapes = [x.shape for x in values]
        self.placeholder = is_placeholder(tree)
        routed = [routes[p] for p in self.paths]
        self.plan = (
            make_plan(routed, 1, optimizer=optimizer) if routed else Plan(1, optimizer, 1, (), ())
        )
        self.views = [lp.route.view or MatrixView() for lp in self.plan.leaves]
        # Per class the matrix in every wave, per leaf the waves of its matrices in every class.
        self.waves: dict[str, list[Matrix]] = {}
        self.leaf_waves: list[dict[str, list[int]]] = [{} for _ in self.paths]
        for c in self.plan.classes:
            by_wave = sorted(zip(c.slots, c.matrices, strict=True))
            self.waves[c.key] = [matrix for _, matrix in by_wave]
            for (_, wave), matrix in by_wave:
                self.leaf_waves[matrix.leaf].setdefault(c.key, []).append(wave)

    def pack(self, tree: PyTree) -> dict[str, jax.Array]:
        values = tree_leaves.flatten(tree)[1]
        return {
            key: jnp.stack([take_matrix(values[m.leaf], self.views[m.leaf], m) for m in own])[None]
            for key, own in self.waves.items()
        }

    def unpack(self, stacks: dict[str, jax.Array]) -> PyTree:
        pieces: list[list[tuple[Matrix, jax.Array]]] = [[] for _ in self.paths]
        for key, own in self.waves.items():
            for wave, matrix in enumerate(own):
                pieces[matrix.leaf].append((matrix, stacks[key][0, wave]))
        leaves = []
        for parts, view, shape in zip(pieces, self.views, self.shapes, strict=True):
            parts.sort(key=lambda part: (part[0].batch, part[0].start))
            matrices, stored = zip(*parts, strict=True)
            leaves.append(build_leaf(stored, matrices, view, shape, jnp))
        return jax.tree.unflatten(self.treedef, leaves)

    def unpack_state(self, state: PyTree) -> PyTree:
        def split(stacked: Any) -> Any:
            if not self._is_stacked(stacked):
                return stacked
            if self.placeholder:
                return jnp.zeros(())  # one leaf that is no parameter
            return {
                path: {key: _take(stacked[key], waves) for key, waves in own.items()}
                for path, own in zip(self.paths, self.leaf_waves, strict=True)
            }

        return jax.tree.map(split, state, is_leaf=self._is_stacked)

    def pack_state(self, state: PyTree, template: PyTree) -> PyTree:
        """``template``: the stack transform's own state, for its structure."""

        def join(stacked: Any, per_leaf: Any) -> Any:
            if not self._is_stacked(stacked):
                return per_leaf
            return {key: self._join_class(key, per_leaf) for key in stacked}

        return jax.tree.map(join, template, state, is_leaf=self._is_stacked)

    def _join_class(self, key: str, per_leaf: dict[str, Any]) -> Any:
        owners = [
            (per_leaf[path][key], own[key])
            for path, own in zip(self.paths, self.leaf_waves, strict=True)
            if key in own
        ]
        order = np.argsort(np.concatenate([waves for _, waves in owners]))
        parts = [part for part, _ in owners]
        return jax.tree.map(lambda *xs: jnp.concatenate(xs)[order][None], *parts)

    def _is_stacked(self, x: Any) -> bool:
        return isinstance(x, dict) and set(x) == set(self.waves)


def _take(stacked: PyTree, waves: list[int]) -> PyTree:
    """The state of the matrices in some waves of the single device."""
    index = np.array(waves)
    return jax.tree.map(lambda x: x[0, index], stacked)
