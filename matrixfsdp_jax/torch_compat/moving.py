"""A run moves from PyTorch to JAX and back: parameters and the optimizer's whole state.

Parameters keep their names and the shapes they have in torch (``"net.0.weight"`` becomes
``{"net": {"0": {"weight": ...}}}``); a Flax model with other conventions reads them through a
function that transposes, inside the loss. Factors then stay those of the same dims.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import torch
import torch.distributed as dist

import matrixfsdp_jax.layout.rules as rules
from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.layout.blocks import BlockGroup, block_groups
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.second_order import shampoo
from matrixfsdp_jax.torch_compat import crossing, records, state_layout
from matrixfsdp_jax.torch_compat.blocks import Block, Cut
from matrixfsdp_jax.torch_compat.shampoo import (
    DistributedShampoo,
    Options,
    ShampooGroup,
    aliases,
    core_of,
)
from matrixfsdp_jax.transforms.averaging import AveragingState, MomentumBuffer
from matrixfsdp_jax.transforms.shampoo import ShampooState

PyTree = Any
Entries = dict[int, dict[str, Any]]
# Names of an entry, array of the blocks of one group ``[B, ...]`` to the array in its place.
Put = Callable[[str, int, state_layout.Names, Any], Any]

_WHOLE: dict[type, tuple[str, str]] = {
    MomentumBuffer: ("buffer", "momentum_buffer"),
    AveragingState: ("z", "weight_buffer"),
}


class JaxRun(NamedTuple):
    """tx: the transform. params: a tree, or owner params. state: of ``tx``, for ``params``."""

    tx: optax.GradientTransformationExtraArgs
    params: PyTree
    state: PyTree


def to_jax(
    optimizer: DistributedShampoo,
    model: torch.nn.Module,
    *,
    learning_rate: Any = None,
    layout: OwnerLayout | None = None,
) -> JaxRun:
    """Parameters, transform and state with which JAX goes on where ``optimizer`` stands.

    Args:
      optimizer: at any step, in train mode.
      model: whose ``named_parameters()`` it updates; those it does not update get zero updates.
      learning_rate: a number or a schedule (of the number of updates already made, which begins
        where torch stands); None takes the ``lr`` of each parameter group.
      layout: an ``OwnerLayout`` of the parameters as ``named_tree(model)`` gives them, planned with
        ``optimizer="shampoo"`` and ``rules=[mfsdp.rules.tensor("*")]``; then parameters and state
        are on their owners, and there must be one parameter group.

    Returns:
      A ``JaxRun``. The refresh schedule is torch's (``stagger=False``).

    Collectives: for ``DDPDistributedConfig`` the ranks gather all blocks (every rank must call it).

    Raises:
      ValueError: float64 values without ``jax.enable_x64``; an optimizer in eval mode; options that
        a transform has not (a ``scale_fn``; the reference's aliasing where it acts).
    """
    names = _names(optimizer, model)
    tree = named_tree(model)
    _check(optimizer, tree, layout)
    params: PyTree = tree if layout is None else layout.shard(tree)
    tx = _transform(optimizer, names, tree, learning_rate, layout)
    state = jax.jit(tx.init)(params)
    parts = _parts(state)
    for i, (group, options) in enumerate(optimizer.groups()):
        with jax.enable_x64(True):
            entries, marks = _all_entries(group, options), group.marks()
        places = _Places(group, [names[p] for p in options["params"]], layout)
        filled = places.filled(parts[i], entries)
        parts[i] = _with_scalars(filled, int(marks["step"]), float(marks.get("lr_sum", 0)))
    return JaxRun(tx, params, _joined(state, parts))


def from_jax(
    optimizer: DistributedShampoo,
    model: torch.nn.Module,
    params: PyTree,
    state: PyTree,
    *,
    layout: OwnerLayout | None = None,
) -> None:
    """The way back: parameters and state of a ``JaxRun`` into ``model`` and ``optimizer``.

    Args:
      optimizer: with the options of the one that was moved.
      model: with the same parameters.
      params: the trained parameters.
      state: the optimizer's state.
      layout: that of ``to_jax``.

    Raises:
      ValueError: if the tree or a shape is not the model's, or the state not that of the options.
    """
    names = _names(optimizer, model)
    tree = layout.unshard(params) if layout is not None else params
    paths, values, _ = tree_leaves.flatten(tree)
    given = dict(zip(paths, values, strict=True))
    own = {path: p for p, path in names.items()}
    for path, p in own.items():
        if path not in given or tuple(given[path].shape) != tuple(p.shape):
            raise ValueError(
                f"parameter {path!r} is {tuple(p.shape)} in the model and "
                f"{given[path].shape if path in given else 'missing'} in params, which have "
                f"{sorted(given)[:8]}"
            )
    loads = []
    for (group, options), part in zip(optimizer.groups(), _parts(state), strict=True):
        places = _Places(group, [names[p] for p in options["params"]], layout)
        loads.append((group, options, places.read(part)))
    with jax.enable_x64(True):
        for group, options, entries in loads:
            group.load(entries, options)
    with torch.no_grad():
        for path, p in own.items():
            p.copy_(_tensor(given[path]))


def named_tree(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters of a model as a nested dict of arrays, in copies.

    Raises: ValueError for float64 parameters without ``jax.enable_x64``.
    """
    tree: dict[str, Any] = {}
    for name, p in model.named_parameters():
        *modules, last = name.split(".")
        place = tree
        for module in modules:
            place = place.setdefault(module, {})
        if p.dtype == torch.float64 and not jax.config.read("jax_enable_x64"):
            raise ValueError(
                f"parameter {name!r} is float64, and JAX would round it to float32; move the run "
                "under jax.enable_x64(True)"
            )
        place[last] = jnp.array(crossing.to_jax(p), copy=True)
    return tree


# ---- checks and the transform ------------------------------------------------------------------


def _names(optimizer: DistributedShampoo, model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Path of every parameter of the optimizer."""
    names: dict[torch.Tensor, str] = {
        p: name.replace(".", "/") for name, p in model.named_parameters()
    }
    for options in optimizer.param_groups:
        for p in options["params"]:
            if p not in names:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} of the optimizer is none of the model's"
                )
    return names


def _check(optimizer: DistributedShampoo, tree: PyTree, layout: OwnerLayout | None) -> None:
    for group, options in optimizer.groups():
        if not bool(group.marks().get("train_mode", True)):
            raise ValueError("the optimizer is in eval mode; call optimizer.train() first")
        core = core_of(options)
        kinds = (core.options.preconditioner, core.options.grafting)
        if any(isinstance(kind, records.TorchScaledSign) for kind in kinds):
            raise ValueError(
                "scale_fn is a function of torch tensors; build mfsdp.shampoo with "
                "mfsdp.SignDescent(scale=...) and a function of arrays instead"
            )
        orders = {len(block.shape) for block in group.blocks}
        if optimizer._aliasing and any(aliases(core.options, order) for order in orders):
            raise ValueError(
                "the reference writes updates into its gradient average here (reference_aliasing), "
                "which no transform does; build the optimizer with reference_aliasing=False"
            )
    if layout is None:
        return
    if len(optimizer.param_groups) > 1:
        raise ValueError(
            f"a layout has one optimizer, and there are {len(optimizer.param_groups)} parameter "
            "groups; leave layout= out, or use one group"
        )
    updated = sum(len(options["params"]) for options in optimizer.param_groups)
    if updated != len(tree_leaves.flatten(tree)[0]):
        raise ValueError(
            f"the optimizer updates {updated} of the {len(tree_leaves.flatten(tree)[0])} "
            "parameters of the model, and a layout has one optimizer for all; leave layout= out"
        )
    for lp in layout.plan.leaves:
        if len(own := [m for c in layout.plan.classes for m in c.matrices if m.name == lp.leaf.path]
               ) != 1 or own[0].dims != lp.leaf.shape or own[0].transposed:  # fmt: skip
            raise ValueError(
                f"leaf {lp.leaf.path!r} is not one tensor of the layout; plan it with "
                'optimizer="shampoo", rules=[mfsdp.rules.tensor("*")]'
            )


def _transform(
    optimizer: DistributedShampoo,
    names: Mapping[torch.Tensor, str],
    tree: PyTree,
    learning_rate: Any,
    layout: OwnerLayout | None,
) -> optax.GradientTransformationExtraArgs:
    txs: dict[str, Any] = {}
    label_of: dict[str, str] = {}
    for i, options in enumerate(optimizer.param_groups):
        txs[f"group_{i}"] = _shampoo(options, learning_rate, layout)
        label_of |= {names[p]: f"group_{i}" for p in options["params"]}
    paths, _, treedef = tree_leaves.flatten(tree)
    if len(txs) == 1 and set(label_of) == set(paths):
        return txs["group_0"]
    labels = treedef.unflatten([label_of.get(path, "frozen") for path in paths])
    return optax.partition({**txs, "frozen": optax.set_to_zero()}, labels)


def _shampoo(options: Options, learning_rate: Any, layout: OwnerLayout | None) -> Any:
    core = core_of(options)
    own = core.options
    return shampoo(
        core.learning_rate if learning_rate is None else learning_rate,
        layout=layout,
        rules=None if layout is not None else [rules.tensor("*")],
        betas=own.betas,
        beta3=own.beta3,
        epsilon=own.epsilon,
        weight_decay=core.weight_decay,
        weight_decay_type=core.weight_decay_type,
        peak_learning_rate=core.peak_learning_rate,
        max_preconditioner_dim=options["max_preconditioner_dim"],
        target_parameter_dimensionality=options[
            "distributed_config"
        ].target_parameter_dimensionality,
        precondition_frequency=own.schedule.frequency,
        start_preconditioning_step=own.schedule.start,
        stagger=False,
        use_bias_correction=own.use_bias_correction,
        preconditioner=own.preconditioner,
        grafting=own.grafting,
        iterate_averaging=core.averaging,
        rest=optax.set_to_zero(),
    )


# ---- state -------------------------------------------------------------------------------------


def _all_entries(group: ShampooGroup, options: Options) -> Entries:
    entries: Entries = {i: {} for i in range(len(options["params"]))}
    # Whole matrices, as a transform keeps them.
    for block, own in state_layout.blocks_state(group.engine, packed=False).items():
        entries[block.param][block.name] = own
    if group.exchange is None:
        return entries
    everyone: list[Any] = [None] * group.exchange.num_ranks
    dist.all_gather_object(everyone, entries, group=group.exchange.group)
    merged: Entries = {i: {} for i in entries}
    for others in everyone:
        for i, blocks in others.items():
            merged[i] |= blocks
    return merged


class _Places:
    """Where the blocks of a parameter group lie in the state of a transform."""

    def __init__(self, group: ShampooGroup, paths: list[str], layout: OwnerLayout | None) -> None:
        limits = [block_groups(c.merged, group.max_dim) for c in group.cuts]
        self._paths = {path: i for i, path in enumerate(paths)}
        self._cuts: list[Cut] = list(group.cuts)
        # Per parameter and group of equal blocks its blocks in order.
        self._members = [
            [_members(cut, own) for own in groups]
            for cut, groups in zip(self._cuts, limits, strict=True)
        ]
        self._layout = layout

    def filled(self, state: PyTree, entries: Entries) -> PyTree:
        """``state`` with the values of ``entries``."""

        def put(path: str, g: int, names: state_layout.Names, old: Any) -> Any:
            members = self._members[self._paths[path]][g]
            values = [_array(self._entry(entries, block, names)) for block in members]
            return np.stack(values).astype(old.dtype)

        def whole(path: str, name: str, old: Any) -> Any:
            cut = self._cuts[self._paths[path]]
            new = np.zeros(cut.merged, old.dtype)
            for block in cut.blocks:
                new[block.index] = _array(self._entry(entries, block, (name,)))
            return new.reshape(old.shape)

        return self._visit(state, put, whole)

    def read(self, state: PyTree) -> Entries:
        """The entries that ``filled`` puts in, and the scalars of the group."""
        entries: Entries = {i: {} for i in self._paths.values()}

        def put(path: str, g: int, names: state_layout.Names, old: Any) -> Any:
            i = self._paths[path]
            for block, value in zip(self._members[i][g], old, strict=True):
                own = entries[i].setdefault(block.name, {})
                state_layout.set_entry(own, names, _tensor(value))
            return old

        def whole(path: str, name: str, old: Any) -> Any:
            i = self._paths[path]
            merged = np.asarray(old).reshape(self._cuts[i].merged)
            for block in self._cuts[i].blocks:
                own = entries[i].setdefault(block.name, {})
                own[name] = _tensor(merged[block.index])
            return old

        def scalars(found: Any) -> None:
            if isinstance(found, ShampooState):
                shared["step"] = _tensor(found.count)
            elif isinstance(found, AveragingState):
                shared["lr_sum"] = _tensor(found.lr_sum)

        shared: dict[str, Any] = {}
        self._visit(state, put, whole, scalars)
        if "step" not in shared:
            raise ValueError("the state is not that of a transform made by to_jax")
        return {i: {**own, **shared} for i, own in entries.items()}

    @staticmethod
    def _entry(entries: Entries, block: Block, names: state_layout.Names) -> torch.Tensor:
        return state_layout.entry(entries[block.param].get(block.name, {}), names, block)

    def _visit(
        self,
        state: PyTree,
        put: Put,
        whole: Callable[[str, str, Any], Any],
        each: Callable[[Any], None] = lambda found: None,
    ) -> PyTree:
        kinds = (ShampooState, *_WHOLE)

        def one(found: Any) -> Any:
            each(found)
            if isinstance(found, ShampooState):
                return self._visit_shampoo(found, put)
            if type(found) not in _WHOLE:
                return found
            field, name = _WHOLE[type(found)]
            return found._replace(**{field: self._visit_whole(getattr(found, field), name, whole)})

        return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, kinds))

    def _visit_shampoo(self, state: ShampooState, put: Put) -> ShampooState:
        new: dict[str, dict[str, Any]] = {name: {} for name in state_layout.GROUPED}
        for outer, classes in state.filtered.items():
            # A leaf has its class within, a stack is a class.
            keys = [None] if self._layout is not None else list(classes)
            for key in keys:
                old = [getattr(state, name)[outer] for name in state_layout.GROUPED]
                own = old if key is None else [field[key] for field in old]
                done = [
                    state_layout.visit_group(average, kind, graft, self._placing(outer, put, g))
                    for g, (average, kind, graft) in enumerate(zip(*own, strict=True))
                ]
                for name, groups in zip(state_layout.GROUPED, zip(*done, strict=True), strict=True):
                    if key is None:
                        new[name][outer] = groups
                    else:
                        new[name].setdefault(outer, {})[key] = groups
        return state._replace(**new)  # type: ignore[arg-type]  # dicts are trees of arrays

    def _placing(self, outer: str, put: Put, g: int) -> Callable[[state_layout.Names, Any], Any]:
        """``put`` for the arrays of a leaf ``[1, B, ...]``, or of a stack ``[N, W, B, ...]``."""

        def of_leaf(names: state_layout.Names, old: Any) -> Any:
            return _like(put(outer, g, names, old[0])[None], old)

        def of_stack(names: state_layout.Names, old: Any) -> Any:
            new = np.array(old)  # pads keep what they have
            for path, slot in self._slots(outer):
                new[slot] = put(path, g, names, new[slot])
            return _like(new, old)

        return of_leaf if self._layout is None else of_stack

    def _visit_whole(self, own: PyTree, name: str, whole: Callable[[str, str, Any], Any]) -> PyTree:
        if self._layout is None:
            paths, values, treedef = tree_leaves.flatten(own)
            new = [_like(whole(p, name, x), x) for p, x in zip(paths, values, strict=True)]
            return treedef.unflatten(new)
        stacks = {}
        for key, old in own.items():
            stack = np.array(old)
            for path, slot in self._slots(key):
                stack[slot] = whole(path, name, stack[slot])
            stacks[key] = _like(stack, old)
        return stacks

    def _slots(self, key: str) -> Iterator[tuple[str, tuple[int, int]]]:
        assert self._layout is not None
        for c in self._layout.plan.classes:
            if c.key == key:
                yield from ((m.name, slot) for m, slot in zip(c.matrices, c.slots, strict=True))


def _members(cut: Cut, group: BlockGroup) -> list[Block]:
    """The blocks of a group, in its order."""
    found: dict[int, Block] = {}
    for block in cut.blocks:
        steps = zip(block.start, group.starts, group.shape, strict=True)
        index = tuple((a - start) // size for a, start, size in steps)
        inside = all(0 <= i < n for i, n in zip(index, group.counts, strict=True))
        if block.shape == group.shape and inside:
            found[int(np.ravel_multi_index(index, group.counts)) if index else 0] = block
    return [found[i] for i in range(group.num_blocks)]


def _parts(state: PyTree) -> list[PyTree]:
    """The state of every parameter group."""
    inner = getattr(state, "inner_states", {})
    names = [name for name in inner if str(name).startswith("group_")]
    return [inner[f"group_{i}"] for i in range(len(names))] if names else [state]


def _joined(state: PyTree, parts: list[PyTree]) -> PyTree:
    """``state`` with the parts of ``_parts`` replaced."""
    if parts and len(_parts(state)) == 1 and _parts(state)[0] is state:
        return parts[0]
    new = {f"group_{i}": part for i, part in enumerate(parts)}
    return state._replace(inner_states={**state.inner_states, **new})


def _with_scalars(state: PyTree, step: int, lr_sum: float) -> PyTree:
    """Every count and sum of a parameter group's state set."""

    def scalar(path: tuple[Any, ...], x: Any) -> Any:
        name = getattr(path[-1], "name", None)
        value = {"count": step, "lr_sum": lr_sum}.get(str(name))
        return x if value is None else _like(np.asarray(value, x.dtype), x)

    return jtu.tree_map_with_path(scalar, state)


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(x: Any) -> torch.Tensor:
    x = np.asarray(x)
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x, np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def _like(new: Any, old: Any) -> jax.Array:
    return jax.device_put(jnp.asarray(new, old.dtype), old.sharding)
