"""Stack transforms that leave out the waves in which a device owns nothing.

All devices run one program, so a device pays for every wave of every stack. Under
``dealing="lpt"`` devices have different compositions (see `layout.balance`); the update then
branches on that of the device. An update sends nothing, so branches are legal under ``shard_map``.

Shape legend: ``N`` devices, ``W`` waves of a class, ``k`` those of them in a composition.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.layout.balance import Compositions
from matrixfsdp_jax.layout.costs import compositions
from matrixfsdp_jax.layout.leaves import is_masked
from matrixfsdp_jax.layout.spec import Plan
from matrixfsdp_jax.owner import collectives

PyTree = Any
Local = Callable[[str, Any], jax.Array]
Make = Callable[..., optax.GradientTransformation]


def by_composition(make: Make, plan: Plan) -> Make:
    """``make`` for stacks of which each device updates only those waves that it needs.

    ``make(local, **numbers)`` is a stack transform on local stacks ``{class key: [1, W, *dims]}``.
    What comes back is ``make`` itself where all devices need all waves. Else ``update`` is a
    ``lax.switch`` over the compositions of the plan: a branch sees the first ``k`` waves of each
    class, and no class of which it has none, in updates, parameters, state and ``local`` alike.
    In the other waves updates are zero and the state stays as it is.

    State that belongs to matrices is a dict with the keys of the stacks, of trees of arrays
    ``[1, W, ...]``. All other state, such as a count, must not depend on which classes there are.
    The transform must take stacks without some of the classes, or without any. ``init`` is that of
    whole stacks.

    Collectives: none.
    """
    found = compositions(plan)
    table = _numbers(found, plan)
    keys = [c.key for c in plan.classes]
    branches = [dict(zip(keys, waves, strict=True)) for waves in found.waves]
    if len(branches) == 1 and all(branches[0][k] == w for k, w in _waves(plan).items()):
        return make

    def branched(local: Local, **numbers: Any) -> optax.GradientTransformationExtraArgs:
        whole = optax.with_extra_args_support(make(local, **numbers))

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
        ) -> tuple[PyTree, PyTree]:
            given = updates, state, params
            like, _ = jax.eval_shape(lambda u, s, p: whole.update(u, s, p, **extra), *given)
            blank = {key: _zeros(like[key], updates[key]) for key in updates}

            def branch(waves: dict[str, int]) -> Callable[..., tuple[PyTree, PyTree]]:
                def cut_table(key: str, table: Any) -> jax.Array:
                    return local(key, table)[:, : waves[key]]

                def run(*given: PyTree) -> tuple[PyTree, PyTree]:
                    tx = optax.with_extra_args_support(make(cut_table, **numbers))
                    new = tx.update(*(_cut(tree, waves) for tree in given), **extra)
                    return _filled((blank, given[1]), new, waves)

                return run

            index = local(keys[0], table)[0, 0]
            return jax.lax.switch(index, [branch(waves) for waves in branches], *given)

        return optax.GradientTransformationExtraArgs(whole.init, update)

    return branched


def _waves(plan: Plan) -> dict[str, int]:
    """Waves of the local stacks."""
    return {c.key: c.num_waves // (plan.replicas if plan.shared else 1) for c in plan.classes}


def _numbers(found: Compositions, plan: Plan) -> np.ndarray:
    """The composition of every device, ``[N, W]`` as a table of the first class.

    Replicas that share the waves each have their own in theirs.
    """
    waves = next(iter(_waves(plan).values()), 0)
    return np.repeat(np.array(found.of, np.int32), waves, axis=1)


def _cut(tree: PyTree, waves: dict[str, int]) -> PyTree:
    """The first waves of everything that belongs to matrices."""

    def cut(x: Any) -> Any:
        if not _by_class(x, waves):
            return x
        return {key: jax.tree.map(lambda s, k=k: s[:, :k], x[key]) for key, k in waves.items() if k}

    return jax.tree.map(cut, tree, is_leaf=lambda x: _by_class(x, waves))


def _filled(old: PyTree, new: PyTree, waves: dict[str, int]) -> PyTree:
    """``new``, with the waves that it lacks from ``old``."""

    def fill(old: Any, new: Any) -> Any:
        if not _by_class(old, waves):
            return new
        return old | {
            key: jax.tree.map(lambda o, n, k=k: o.at[:, :k].set(n), old[key], new[key])
            for key, k in waves.items()
            if k
        }

    return jax.tree.map(fill, old, new, is_leaf=lambda x: _by_class(x, waves))


def _by_class(x: Any, waves: dict[str, int]) -> bool:
    return isinstance(x, dict) and set(x) == set(waves)


def _zeros(like: Any, stack: Any) -> Any:
    """Zeros of a shape and dtype that vary over devices as a stack does."""
    if is_masked(stack):
        return stack
    zeros = jnp.zeros(like.shape, like.dtype)
    return collectives.varying(zeros, tuple(collectives.varying_axes(stack)))
