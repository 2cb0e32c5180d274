"""Owner parameters: a plan bound to a mesh, and the moves between canonical and owner form.

Shape legend: ``N`` devices on the owner axis, ``W`` waves, ``dims`` the stored shape of a matrix
(``m x n``) or tensor.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.layout import picture, report
from matrixfsdp_jax.layout.costs import Method, method
from matrixfsdp_jax.layout.planner import CAST_DTYPES, make_plan, share_waves
from matrixfsdp_jax.layout.rules import route
from matrixfsdp_jax.layout.sources import Axes, Source, settle, source, spec_entry
from matrixfsdp_jax.layout.spec import Leaf, LeafPlan, Matrix, Plan, ShapeClass
from matrixfsdp_jax.owner import collectives, gradients, host
from matrixfsdp_jax.owner import replicas as replica_parts
from matrixfsdp_jax.owner.lazy import LazyParams

PyTree = Any

Storage = Literal["owner", "sharded"]
Replicas = Literal["each", "shared"]
_WIDE_DTYPES = ("float64", "int64", "uint64", "complex128")


class OwnerParams(NamedTuple):
    """Parameters in owner form; gradients, updates and momentum have the same structure.

    stacks: class key -> owner stack ``[N, W, *dims]``, sharded ``P(owner_axis, None, ...)``.
    rest: path -> leaf that no matrix method updates, in its own shape.
    frozen: path -> leaf that nothing updates (frozen or without a gradient). Gradients and
      updates have ``{}`` here.
    """

    stacks: dict[str, Any]
    rest: dict[str, Any]
    frozen: dict[str, Any]


@dataclass(frozen=True)
class OwnerLayout:
    """A plan bound to a mesh: what ``mfsdp.plan`` returns.

    Attributes:
      plan: who owns what, as plain data (``matrixfsdp_jax.layout.spec.Plan``).
      mesh: the device mesh.
      owner_axis: the mesh axes over which matrices are dealt out, in order.
      treedef: structure of the canonical tree.
      replica_axis: the mesh axes over which owner params are replicated and the batch is split.
      sharing: whether the replicas share the owners' work: each has the gradients and the state of
        its own part of the waves, and parameters are gathered over ``replica_axis`` afterwards.
      storage: ``"owner"``, or ``"sharded"``: parameters keep the user's own sharding.
      source_axes: for ``"sharded"`` the mesh axes over which each dim of each leaf is sharded.
      tensor_axis: the mesh axis over which the long side of stored matrices is split; ``()`` where
        owners hold whole matrices.
    """

    plan: Plan
    mesh: Mesh
    owner_axis: tuple[str, ...]
    treedef: Any
    replica_axis: tuple[str, ...] = ()
    sharing: bool = False
    storage: Storage = "owner"
    source_axes: tuple[tuple[Axes, ...], ...] = ()
    tensor_axis: tuple[str, ...] = ()

    # ---- what people look at -------------------------------------------------------------------

    def report(self, **options: Any) -> str:
        """A table of who owns what, for people; see ``layout.report.render`` for the options."""
        return report.render(self.plan, **options)

    def to_dict(self) -> dict[str, Any]:
        """The plan and its costs as JSON-ready data."""
        return report.to_dict(self.plan)

    def plot(self, path: Any) -> None:
        """Write the ownership picture to ``path``: devices across, waves down."""
        picture.plot(self.plan, path)

    def __repr__(self) -> str:
        p = self.plan
        matrices = sum(len(c.matrices) for c in p.classes)
        return (
            f"OwnerLayout({matrices} matrices in {len(p.classes)} classes over "
            f"{p.num_devices} devices of {self.owner_axis}, {len(p.leaves)} leaves"
            + (")" if self.storage == "owner" else f", {self.storage})")
        )

    # ---- shardings -----------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """``N``, the number of devices on the owner axis."""
        return self.plan.num_devices

    @property
    def data_axis(self) -> tuple[str, ...]:
        """The mesh axes over which a batch is split, in the order of the mesh."""
        used = self.owner_axis + self.replica_axis
        return tuple(a for a in self.mesh.axis_names if a in used)

    @property
    def sharing_axis(self) -> tuple[str, ...]:
        """The mesh axes whose devices share the waves; empty where every replica owns all."""
        return self.replica_axis if self.sharing else ()

    def tensor_axis_of(self, c: ShapeClass) -> tuple[str, ...]:
        """``tensor_axis`` for a class whose long side it divides, else ``()``."""
        parts = math.prod(self.mesh.shape[a] for a in self.tensor_axis)
        return self.tensor_axis if len(c.shape) == 2 and c.n % parts == 0 else ()

    @property
    def axis_entry(self) -> Any:
        """The owner axis as one ``PartitionSpec`` entry."""
        return spec_entry(self.owner_axis)

    @cached_property
    def sources(self) -> dict[str, P]:
        """``PartitionSpec`` of every leaf of the user's tree (by path) under sharded storage."""
        pairs = zip(self.plan.leaves, self.source_axes, strict=True)
        return {lp.leaf.path: P(*map(spec_entry, dims)) for lp, dims in pairs}

    @cached_property
    def matrix_sources(self) -> tuple[Source | None, ...]:
        """How the matrices of every leaf lie under sharded storage (see ``layout.sources``)."""
        return _matrix_sources(self.plan, self.source_axes)

    @cached_property
    def specs(self) -> OwnerParams:
        """``PartitionSpec`` of every owner parameter, written at full rank."""
        stacks = {c.key: self._stack_spec(c, None) for c in self.plan.classes}
        rest, frozen = (
            {lp.leaf.path: self._leaf_spec(lp) for lp in self.outside(trainable)}
            for trainable in (True, False)
        )
        return OwnerParams(stacks, rest, frozen)

    @cached_property
    def shardings(self) -> OwnerParams:
        """``NamedSharding`` of every owner parameter."""
        return self._named(self.specs)

    @cached_property
    def update_specs(self) -> OwnerParams:
        """``PartitionSpec`` of every gradient and update; ``specs`` unless replicas share."""
        waves = spec_entry(self.sharing_axis)
        stacks = {c.key: self._stack_spec(c, waves) for c in self.plan.classes}
        rest = {lp.leaf.path: self._update_spec(lp) for lp in self.outside(True)}
        return OwnerParams(stacks, rest, {})

    @cached_property
    def update_shardings(self) -> OwnerParams:
        """``NamedSharding`` of every gradient and update."""
        return self._named(self.update_specs)

    def mapped(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """``jax.shard_map`` over the axes of this layout; others of the mesh are left to ``fn``."""
        names = set(self.data_axis)
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names
        )

    @cached_property
    def abstract(self) -> OwnerParams:
        """The owner parameters as ``ShapeDtypeStruct`` with their shardings."""
        stacks = {c.key: (c.stack_shape, c.dtype) for c in self.plan.classes}
        rest, frozen = (
            {lp.leaf.path: (lp.leaf.shape, lp.leaf.dtype) for lp in self.outside(trainable)}
            for trainable in (True, False)
        )
        return jax.tree.map(
            lambda sd, sharding: jax.ShapeDtypeStruct(sd[0], sd[1], sharding=sharding),
            OwnerParams(stacks, rest, frozen),
            self.shardings,
            is_leaf=lambda x: type(x) is tuple,
        )

    def tree_specs(self, tree: PyTree) -> PyTree:
        """``PartitionSpec`` of every leaf of an optimizer state (global shapes).

        A leaf found under the key of a stack whose first two dims are that stack's ``[N, W]``
        belongs to the owners; a leaf found under the path of a rest leaf and of its shape is
        sharded like it; everything else (counts, hyperparameters) is replicated.
        """
        stacks = {c.key: c for c in self.plan.classes}
        rest = {lp.leaf.path: lp for lp in self.outside(True)}

        def spec(keys: tuple[Any, ...], leaf: Any) -> P:
            for key in reversed(keys):
                name = key.key if isinstance(key, jtu.DictKey) else None
                if name in stacks and leaf.shape[:2] == stacks[name].stack_shape[:2]:
                    waves = spec_entry(self.sharing_axis)
                    if leaf.shape == stacks[name].stack_shape:
                        return self._stack_spec(stacks[name], waves)
                    return P(self.axis_entry, waves, *[None] * (leaf.ndim - 2))
                if name in rest and leaf.shape == rest[name].leaf.shape:
                    return self._update_spec(rest[name])
            return P(*[None] * leaf.ndim)

        return jtu.tree_map_with_path(spec, tree)

    def state_specs(self, tx: optax.GradientTransformation) -> PyTree:
        """``PartitionSpec`` of every leaf of ``tx``'s state (for your own ``shard_map``)."""
        return self.tree_specs(self._abstract_state(tx))

    def state_shardings(self, tx: optax.GradientTransformation) -> PyTree:
        """``NamedSharding`` of every leaf of ``tx``'s state, from shapes alone."""
        return self._named(self.state_specs(tx))

    # ---- canonical <-> owner -------------------------------------------------------------------

    def shard(self, params: PyTree) -> OwnerParams:
        """Canonical parameters to owner form, always as copies.

        Args:
          params: a tree of the planned structure. A leaf is a numpy array, a jax array, or a
            function of no argument that returns one (called once, so that a large model can be
            loaded or initialised leaf by leaf).

        Returns:
          Global arrays with ``layout.shardings``. Donating them later never touches ``params``.
          Host memory: one shape class at a time; device memory: each device gets its own part.

        Raises:
          ValueError: if structure, a shape or a dtype differs from the plan, naming the leaf.
        """
        self._require_owner_storage()
        return OwnerParams(*host.to_owned(self, self._checked(params)))

    def unshard(self, owned: OwnerParams) -> PyTree:
        """Owner form back to the canonical tree, bit for bit.

        Returns:
          A tree of the planned structure. Each leaf is a global array, sharded over the owner
          axis on its largest dim that divides, else replicated; it shares no memory with
          ``owned``. Host memory: one leaf at a time.
        """
        self.check_owned(owned)
        return jtu.tree_unflatten(self.treedef, host.to_canonical(self, owned))

    def init(self, tx: optax.GradientTransformation, owned: OwnerParams) -> PyTree:
        """Optimizer state for owner parameters, born sharded and in memory of its own.

        Frozen leaves get no state.
        """
        self.check_owned(owned)

        def init(trainable: OwnerParams) -> PyTree:
            return jax.tree.map(jnp.copy, tx.init(trainable))

        jitted = jax.jit(init, out_shardings=self.state_shardings(tx))
        return jitted(self.trainable(owned))

    def trainable(self, owned: OwnerParams) -> OwnerParams:
        """What the optimizer sees: ``owned`` without its frozen leaves."""
        return owned._replace(frozen={})

    def apply_updates(self, owned: OwnerParams, updates: OwnerParams) -> OwnerParams:
        """``optax.apply_updates`` that leaves frozen leaves as they are.

        Works on global arrays and inside ``shard_map``.

        Collectives: none; where replicas share the work one all-gather of the new parameters over
        ``replica_axis`` per class and sharded rest leaf.
        """
        if not self.sharing:
            new: OwnerParams = optax.apply_updates(self.trainable(owned), self.trainable(updates))
            return new._replace(frozen=owned.frozen)
        return replica_parts.apply_shared(self, owned, updates)

    # ---- inside the model ----------------------------------------------------------------------

    def lazy(
        self, owned: OwnerParams, parts: OwnerParams | None = None, dtype: Any = None
    ) -> LazyParams:
        """Local owner parameters as parameters to gather block by block (see ``LazyParams``).

        Inside ``shard_map`` over ``data_axis``; arguments as for ``gather``. Moves nothing yet.
        """
        self._require_owner_storage()
        if not collectives.manual_over(self.data_axis):
            raise ValueError(
                f"layout.gather moves data over the mesh axes {self.data_axis} and so runs "
                "inside jax.shard_map over them; use layout.value_and_grad or mfsdp.train_step, "
                "or layout.unshard for the canonical parameters outside"
            )
        dtype = None if dtype is None else _dtype_name("dtype", dtype)
        if dtype not in (None, *CAST_DTYPES):
            raise ValueError(f"dtype={dtype!r} must be one of {', '.join(CAST_DTYPES)}")
        self.check_owned(owned, local=True)
        sharing = parts is not None and self.sharing
        return LazyParams(self, owned, owned if parts is None else parts, dtype, sharing)

    def gather(
        self,
        owned: OwnerParams,
        dtype: Any = None,
        parts: OwnerParams | None = None,
        only: str | Sequence[str] = "",
    ) -> PyTree:
        """Whole canonical parameters on every device, inside ``shard_map`` over the owner axis.

        Args:
          owned: local owner parameters (stacks ``[1, W, *dims]``).
          dtype: dtype of the floating leaves; default the plan's ``gather_dtype``, else their own.
          parts: ``layout.parts(owned)``, which then gets the gradient in place of ``owned``: where
            replicas share the work, that is this device's part alone.
          only: a path of the report (``"blocks/3"``), or a list of them: what to gather.

        Returns:
          The canonical tree, each matrix in its own orientation and shape; the subtree at ``only``,
          or a list of those. Boxes of linen metadata are taken off: they would constrain the
          sharding of whole arrays on one device.

        Collectives: one all-gather per wave that holds a matrix of them and per sharded rest leaf,
        in ``dtype``. In reverse mode one reduce-scatter for each, in ``reduce_dtype``, and one
        all-reduce for the replicated rest; with replicas one more of each class over them.
        """
        return self.lazy(owned, parts, dtype).gather(only)

    def parts(self, owned: OwnerParams) -> OwnerParams:
        """What the optimizer of this device updates of its local owner params.

        All that is trainable; where replicas share the work its own waves and its own part of
        sharded rest leaves. Inside ``shard_map`` over ``data_axis``.
        """
        return replica_parts.parts(self, self.trainable(owned))

    def value_and_grad(
        self, loss_fn: Callable[..., Any], has_aux: bool = False, *, lazy: bool = False
    ) -> Callable:
        """The mean loss over all devices and its gradient, reduced to the owners.

        Args:
          loss_fn: ``loss_fn(params, batch)`` or ``loss_fn(params, batch, key)`` on canonical
            params and the local part of the batch. Returns a scalar (the mean over the local
            batch) or ``(sum, count)`` for a weighted mean over the global batch; with ``has_aux``
            a pair of that and a tree of arrays.
          has_aux: whether ``loss_fn`` returns ``(loss, aux)``; ``aux`` is averaged over devices.
          lazy: give ``loss_fn`` a ``LazyParams`` in place of the params: it gathers them itself.

        Returns:
          ``fn(owned, batch, key=None) -> (loss, gradients)``, or ``((loss, aux), gradients)``.
          Works under plain ``jit`` on global arrays (the batch is split on dim 0) and inside
          ``shard_map`` on local ones. ``key`` is folded with the device index.
        """
        return gradients.value_and_grad(self, loss_fn, has_aux, lazy)

    def _require_owner_storage(self) -> None:
        if self.storage != "owner":
            raise ValueError(
                f"{self!r} keeps parameters in the user's own tree: there are no owner params. Use "
                "tx.init(params) and tx.update(grads, state, params) in your own step, or plan "
                'with storage="owner"'
            )

    # ---- own parts -----------------------------------------------------------------------------

    @cached_property
    def leaf_slots(self) -> list[list[tuple[str, int, int, Matrix]]]:
        """Per leaf ``(class key, device, wave, matrix)`` of its matrices, by batch and block."""
        slots: list[list[tuple[str, int, int, Matrix]]] = [[] for _ in self.plan.leaves]
        for c in self.plan.classes:
            for matrix, (device, wave) in zip(c.matrices, c.slots, strict=True):
                slots[matrix.leaf].append((c.key, device, wave, matrix))
        for own in slots:
            own.sort(key=lambda s: (s[3].batch, s[3].start))
        return slots

    def outside(self, trainable: bool) -> list[LeafPlan]:
        """Leaves that are in no stack: the rest (trainable) or the frozen ones."""
        return [
            lp
            for lp in self.plan.leaves
            if lp.route.route != "matrix" and lp.trainable == trainable
        ]

    def _stack_spec(self, c: ShapeClass, waves: Any) -> P:
        dims: list[Any] = [None] * len(c.shape)
        if self.tensor_axis_of(c):
            dims[-1] = spec_entry(self.tensor_axis)
        return P(self.axis_entry, waves, *dims)

    def _leaf_spec(self, lp: LeafPlan) -> P:
        dims = range(len(lp.leaf.shape))
        return P(*[self.axis_entry if d == lp.shard_dim else None for d in dims])

    def _update_spec(self, lp: LeafPlan) -> P:
        if not self.shares_leaf(lp):
            return self._leaf_spec(lp)
        entry = spec_entry(self.owner_axis + self.sharing_axis)
        return P(*[entry if d == lp.shard_dim else None for d in range(len(lp.leaf.shape))])

    def shares_leaf(self, lp: LeafPlan) -> bool:
        """Whether each replica updates its own part of a rest leaf (else each the whole)."""
        if not self.sharing or lp.shard_dim is None:
            return False
        replicas = math.prod(self.mesh.shape[a] for a in self.sharing_axis)
        return lp.leaf.shape[lp.shard_dim] % (self.num_devices * replicas) == 0

    def _named(self, specs: PyTree) -> PyTree:
        return jax.tree.map(
            lambda s: NamedSharding(self.mesh, s), specs, is_leaf=lambda x: isinstance(x, P)
        )

    def _abstract_state(self, tx: optax.GradientTransformation) -> PyTree:
        return jax.eval_shape(tx.init, self.trainable(self.abstract))

    def wire(self, own: str, dtype: Any, *, sharing: bool) -> collectives.Wire:
        """How a leaf travels forward (in ``dtype`` where it is cast) and its gradient back."""
        plan = replace(self.plan, gather_dtype=dtype) if dtype else self.plan
        dtypes = plan.wire_dtypes(own)
        return collectives.Wire(self.owner_axis, *dtypes, self.replica_axis, sharing)

    def _checked(self, params: PyTree) -> list[Any]:
        """The leaves of ``params`` after checking paths, shapes and dtypes against the plan."""
        paths, values, _ = tree_leaves.flatten(params)
        planned = [lp.leaf for lp in self.plan.leaves]
        _check_dtypes(planned)
        if set(paths) != {leaf.path for leaf in planned} or len(paths) != len(planned):
            missing = sorted({leaf.path for leaf in planned} - set(paths))
            extra = sorted(set(paths) - {leaf.path for leaf in planned})
            raise ValueError(
                "the tree differs from the one this layout was planned for: "
                f"missing {missing[:5] or 'nothing'}, not planned {extra[:5] or 'nothing'}; "
                "plan again with this tree, or pass the tree that was planned"
            )
        by_path = dict(zip(paths, values, strict=True))
        for leaf in planned:
            value = by_path[leaf.path]
            if not callable(value):
                host.check_leaf(leaf, value)
        return [by_path[leaf.path] for leaf in planned]

    def check_owned(self, owned: Any, *, local: bool = False) -> None:
        """Refuse what is not owner params of this layout (``local``: one device's part).

        Raises:
          TypeError: if it is not an ``OwnerParams``.
          ValueError: if its leaves, shapes or dtypes are not those of the layout.
        """
        self._require_owner_storage()
        if not isinstance(owned, OwnerParams):
            raise TypeError(
                f"expected owner params of {self!r}, got {type(owned).__name__}; "
                "convert canonical parameters with layout.shard(params)"
            )
        expected = self.abstract
        if not _same_structure(owned, expected):
            raise ValueError(
                f"owner params with stacks {sorted(owned.stacks)}, {len(owned.rest)} rest and "
                f"{len(owned.frozen)} frozen leaves do not belong to this layout, which has "
                f"{sorted(expected.stacks)}, {len(expected.rest)} and {len(expected.frozen)}; "
                "use the layout that sharded them"
            )
        got = jax.tree.leaves(owned)
        for (keys, want), x in zip(jtu.tree_leaves_with_path(expected), got, strict=True):
            shape = want.sharding.shard_shape(want.shape) if local else want.shape
            if jnp.shape(x) != shape or x.dtype != want.dtype:
                raise ValueError(
                    f"owner params{jtu.keystr(keys)} is {x.dtype}{list(x.shape)}, this layout "
                    f"expects {want.dtype}{list(shape)}; use the layout that sharded it"
                )
        for x in got:
            mesh = getattr(getattr(x, "sharding", None), "mesh", None)
            if isinstance(mesh, Mesh) and mesh != self.mesh:
                raise ValueError(
                    f"owner params lie on {mesh}, this layout is bound to {self.mesh}; to change "
                    "the mesh, unshard with the old layout and shard with the new one"
                )


def plan(
    params: PyTree,
    mesh: Mesh,
    *,
    owner_axis: str | Sequence[str] | None = None,
    replica_axis: str | Sequence[str] | None = None,
    replicas: Replicas | Literal["auto"] = "auto",
    dealing: Literal["slots", "lpt", "auto"] = "slots",
    optimizer: str | Method = "muon",
    rules: Any = None,
    order: Sequence[str] | Callable[[str], Any] | None = None,
    ns_steps: int = 5,
    gather_dtype: Any = None,
    reduce_dtype: Any = None,
    rest_shard_min_size: int = 0,
    storage: Storage = "owner",
    tensor_axis: str | None = None,
) -> OwnerLayout:
    """Deal the matrices of a parameter tree out to the devices of a mesh.

    Nothing runs on a device: shapes are enough.

    Args:
      params: the canonical tree, of arrays or ``jax.ShapeDtypeStruct``.
      mesh: from ``jax.make_mesh``; Auto and Explicit axes both work.
      owner_axis: the mesh axis (or axes) over which matrices are dealt out. None: ``"fsdp"`` for
        owner storage, every axis of the mesh for sharded storage.
      replica_axis: for owner storage, the other axes over which the batch is split (HSDP). ``()``:
        none; then what runs inside the model may use the other axes (tensor parallelism), and all
        else is the same on each of their devices. May be left out where every other axis of the
        mesh has size 1. Sharded storage does the same work again on every axis that is no owner
        axis.
      replicas: ``"each"``: every replica owns all matrices; gradients are summed over the replicas
        and the step sends nothing. ``"shared"``: one global owner; the replicas share gradients,
        state and work, and gather the new parameters (``layout.apply_updates``). ``"auto"``:
        ``"shared"`` unless that would make more than a quarter of the slots pads.
      dealing: ``"slots"``: every device has the same number of slots of a class, and works on all.
        ``"lpt"``: the costliest matrices first, each to the device with the least work; devices
        then branch over the few sets of matrices that they have, and stacks may hold more pads.
        ``"auto"``: that where it takes more than 5% off the busiest device.
      optimizer: what a slot costs in the report, and which orders are stacked: ``"muon"``,
        ``"normuon"``, ``"adamuon"``, ``"adamw"`` and ``"sgd"`` take matrices, ``"shampoo"`` and
        ``"soap"`` tensors of order 0 to 4; or a ``layout.costs.Method``. Shampoo and SOAP with
        other options than their names stand for (blocks up to 1024, small dims merged down to order
        2, a decomposition every 10 steps): ``mfsdp.shampoo_method(name, max_preconditioner_dim,
        target_parameter_dimensionality, precondition_frequency)``, with the optimizer's own
        numbers. Only then does the report speak of that optimizer, and are the matrices of a wave
        dealt so that its decompositions spread over the steps of each device.
      rules: which leaf is a matrix and how it is read; see ``mfsdp.rules``. Default
        ``mfsdp.default_rules()``.
      order: forward order of the leaves, as a list of paths or a sort key on paths; default the
        natural sort of the paths. Matrices that are near in it share a wave.
      ns_steps: Newton-Schulz steps, for the FLOPs in the report.
      gather_dtype: dtype in which parameters are gathered for the model; None keeps their own.
      reduce_dtype: dtype in which gradients are summed over devices; None is float32 (float64 for
        float64 leaves).
      rest_shard_min_size: rest leaves with fewer elements stay replicated.
      storage: ``"owner"``: parameters live as owner params. ``"sharded"``: they keep the sharding
        that the arrays of ``params`` have, any ``NamedSharding`` over the owner axes; only
        gradients and updates visit the owners. A drop-in for a ``jit`` loop (docs/layouts.md).
      tensor_axis: for Muon with sharded storage, a mesh axis (no owner axis) over which matrices
        stay split in the update: owners hold the long side in parts, and Newton-Schulz sums its
        Gram matrix over the axis. Matrices that are cut elsewhere by it are gathered over it, and
        so is the update of one that is not cut by it. A class whose long side it does not divide is
        updated whole on each of its devices. None: nothing is split; take the axis in
        ``owner_axis``, and matrices move to whole owners.

    Raises:
      ValueError: for an unknown axis or option, an empty tree, tied weights, a leaf that no rule
        reads, or one of an order that the optimizer does not take. The message names the leaf or
        the argument and says what to do.

    Examples:
      >>> import jax, jax.numpy as jnp, matrixfsdp_jax as mfsdp
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> layout = mfsdp.plan({"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, mesh)
      >>> layout
      OwnerLayout(1 matrices in 1 classes over 1 devices of ('fsdp',), 2 leaves)
      >>> method = mfsdp.shampoo_method("soap", 256, 2, 5)
      >>> layout = mfsdp.plan({"w": jnp.ones((4, 8))}, mesh, optimizer=method)
      >>> layout.to_dict()["refresh"]["frequency"]
      5
    """
    if storage not in get_args(Storage):
        raise ValueError(f"storage={storage!r} must be one of {get_args(Storage)}")
    if replicas not in ("auto", *get_args(Replicas)):
        raise ValueError(f"replicas={replicas!r} must be 'auto' or one of {get_args(Replicas)}")
    tensor = () if tensor_axis is None else (tensor_axis,)
    if tensor and (storage == "owner" or not method(optimizer).oriented):
        raise ValueError(
            f'tensor_axis={tensor_axis!r} is for Muon with storage="sharded"; else leave it out '
            "and take the axis in owner_axis, so that whole matrices visit their owners"
        )
    axes, others = _checked_axes(mesh, owner_axis, replica_axis, storage, tensor_axis)
    num_devices = 1
    for axis in axes:
        num_devices *= mesh.shape[axis]
    routed = route(params, rules, optimizer=optimizer)
    _check_dtypes(leaf for leaf, _ in routed)
    bound = make_plan(
        routed,
        num_devices,
        optimizer=optimizer,
        dealing=dealing,
        ns_steps=ns_steps,
        order=order,
        gather_dtype=None if gather_dtype is None else _dtype_name("gather_dtype", gather_dtype),
        reduce_dtype=None if reduce_dtype is None else _dtype_name("reduce_dtype", reduce_dtype),
        rest_shard_min_size=rest_shard_min_size,
    )
    sharing = False
    if others:
        bound, sharing = share_waves(bound, math.prod(mesh.shape[a] for a in others), replicas)
    axes_of: tuple[tuple[Axes, ...], ...] = ()
    if storage == "sharded":
        paths, values, _ = tree_leaves.flatten(params)
        by_path = dict(zip(paths, values, strict=True))
        axes_of = tuple(
            _source_axes(lp.leaf, by_path[lp.leaf.path], mesh, axes + tensor) for lp in bound.leaves
        )
        bound = settle(bound, _matrix_sources(bound, axes_of), axes, dict(mesh.shape))
    treedef = jax.tree.structure(params)
    return OwnerLayout(bound, mesh, axes, treedef, others, sharing, storage, axes_of, tensor)


def _source_axes(leaf: Leaf, value: Any, mesh: Mesh, owner_axis: Axes) -> tuple[Axes, ...]:
    """The mesh axes, of size above 1, over which each dim of a leaf is sharded."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ((),) * len(leaf.shape)  # one device, or no device yet: as if replicated
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"leaf {leaf.path!r} lies on {sharding.mesh}, and the layout is to be bound to {mesh}; "
            "plan with the mesh of the parameters"
        )
    spec = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))
    dims = tuple(
        tuple(a for a in (e if isinstance(e, tuple) else (e,)) if a and mesh.shape[a] > 1)
        for e in spec
    )
    foreign = [a for own in dims for a in own if a not in owner_axis]
    if foreign:
        raise ValueError(
            f"leaf {leaf.path!r} is sharded as {sharding.spec}, also over {foreign}, but matrices "
            f"are dealt out over {owner_axis} alone; take those axes in: "
            f"owner_axis={tuple(a for a in mesh.axis_names if a in (*owner_axis, *foreign))!r}"
        )
    return dims


def _matrix_sources(plan: Plan, axes_of: Sequence[Sequence[Axes]]) -> tuple[Source | None, ...]:
    return tuple(
        source(lp, dims) if lp.route.route == "matrix" else None
        for lp, dims in zip(plan.leaves, axes_of, strict=True)
    )


def _checked_axes(
    mesh: Mesh,
    owner_axis: str | Sequence[str] | None,
    replica_axis: str | Sequence[str] | None,
    storage: Storage,
    tensor_axis: str | None,
) -> tuple[Axes, Axes]:
    """The owner axes and the replica axes (those of size above 1)."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; give a jax.sharding.Mesh, for example "
            'jax.make_mesh((jax.device_count(),), ("fsdp",))'
        )
    if owner_axis is None:
        free = tuple(a for a in mesh.axis_names if a != tensor_axis)
        owner_axis = "fsdp" if storage == "owner" else free
    axes = (owner_axis,) if isinstance(owner_axis, str) else tuple(owner_axis)
    others = (replica_axis,) if isinstance(replica_axis, str) else tuple(replica_axis or ())
    sizes = dict(mesh.shape)
    named = axes + others + (() if tensor_axis is None else (tensor_axis,))
    if not axes or any(a not in sizes for a in named) or len(set(named)) != len(named):
        raise ValueError(
            f"owner_axis={owner_axis!r}, replica_axis={replica_axis!r} and "
            f"tensor_axis={tensor_axis!r} do not name different axes of the mesh, which has "
            f"{sizes}; give some of them, each once"
        )
    left = {a: s for a, s in sizes.items() if a not in axes + others and s > 1}
    if left and storage == "owner" and replica_axis is None:
        raise ValueError(
            f"mesh axes {left} are not owner axes {axes}. Say what they are: "
            f"replica_axis={tuple(left)!r} to split the batch over them as well (HSDP), "
            f"owner_axis={tuple(a for a in sizes if a in axes or a in left)!r} to deal matrices "
            "out over all, or replica_axis=() to leave them to the model"
        )
    if others and storage == "sharded":
        raise ValueError(
            f"replica_axis={replica_axis!r} is for owner storage; with sharded storage the loop is "
            "your own, and axes that are no owner axes need not be named"
        )
    return axes, tuple(a for a in others if sizes[a] > 1)


def _same_structure(a: PyTree, b: PyTree) -> bool:
    structure: Any = jax.tree.structure
    return bool(structure(a) == structure(b))


def _dtype_name(argument: str, dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError as error:
        raise ValueError(
            f"{argument}={dtype!r} is not a dtype; give one like 'bfloat16'"
        ) from error


def _check_dtypes(leaves: Iterable[Leaf]) -> None:
    """Refuse leaves that would not be held as they are."""
    wide = () if jax.config.read("jax_enable_x64") else _WIDE_DTYPES
    for leaf in leaves:
        if leaf.dtype.startswith("key<"):
            raise ValueError(
                f"leaf {leaf.path!r} is a random key ({leaf.dtype}), not a parameter; split it off "
                "(nnx.split(model, nnx.Param, ...)) and give it to the step as key="
            )
        if leaf.dtype in wide:
            raise ValueError(
                f"leaf {leaf.path!r} is {leaf.dtype}, which JAX would cut to 32 bits; cast it "
                "first, or enable 64 bits (jax.enable_x64)"
            )
