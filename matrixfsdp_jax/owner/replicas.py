"""Replicas that share the owners' work: each updates its own part, then all gather the parameters.

With ``R`` replicas of ``N`` owners a stack is ``[N, W, *dims]``, ``W`` a multiple of ``R``. Replica
``r`` has the gradients and the state of the waves from ``r W / R`` on, and a rest leaf that is
sharded over the owners is cut once more on the same dim.
"""

from typing import TYPE_CHECKING, Any

import jax
import optax

from matrixfsdp_jax.layout.leaves import is_masked
from matrixfsdp_jax.owner import collectives

if TYPE_CHECKING:
    from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams


def parts(layout: "OwnerLayout", owned: "OwnerParams") -> "OwnerParams":
    """A replica's part of local owner params (without frozen leaves), inside ``shard_map``."""
    if not layout.sharing:
        return owned
    return _each(layout, owned, collectives.part_of)


def as_updates(layout: "OwnerLayout", params: Any) -> Any:
    """Trainable owner params, global or local, laid out as their updates are: nothing is sent."""
    if not layout.sharing or params is None:
        return params
    if not collectives.manual_over(layout.data_axis):
        return jax.device_put(params, like_masked(params, layout.update_shardings))
    whole = {c.key: c.num_waves for c in layout.plan.classes}
    waves = {key: x.shape[1] for key, x in params.stacks.items() if not is_masked(x)}
    if any(waves[key] != whole[key] for key in waves):
        return params  # they are already
    return parts(layout, params)


def like_masked(tree: Any, other: Any) -> Any:
    """``other`` with the leaves hidden that ``optax.masked`` has hidden in ``tree``."""
    return jax.tree.map(lambda x, o: x if is_masked(x) else o, tree, other, is_leaf=is_masked)


def apply_shared(
    layout: "OwnerLayout", owned: "OwnerParams", updates: "OwnerParams"
) -> "OwnerParams":
    """Owner params after updates of which each replica has a part."""

    def local(owned: "OwnerParams", updates: "OwnerParams") -> "OwnerParams":
        new: OwnerParams = optax.apply_updates(parts(layout, owned), updates)
        with jax.named_scope("mfsdp.gather_replicas"):
            return _each(layout, new, collectives.whole_of)

    trainable, updates = layout.trainable(owned), layout.trainable(updates)
    if collectives.manual_over(layout.data_axis):
        new = local(trainable, updates)
    else:
        specs = layout.trainable(layout.specs)
        mapped = jax.shard_map(
            local, mesh=layout.mesh, in_specs=(specs, layout.update_specs), out_specs=specs
        )
        new = mapped(trainable, updates)
    return new._replace(frozen=owned.frozen)


def _each(layout: "OwnerLayout", owned: "OwnerParams", move: Any) -> "OwnerParams":
    """``move(x, dim, axis)`` of everything that is cut once more over the replicas."""
    axis = layout.sharing_axis
    dims = {
        lp.leaf.path: lp.shard_dim
        for lp in layout.plan.leaves
        if lp.route.route == "rest" and layout.shares_leaf(lp)
    }
    stacks = {key: x if is_masked(x) else move(x, 1, axis) for key, x in owned.stacks.items()}
    rest = {
        path: move(x, dims[path], axis) if path in dims and not is_masked(x) else x
        for path, x in owned.rest.items()
    }
    return owned._replace(stacks=stacks, rest=rest)
