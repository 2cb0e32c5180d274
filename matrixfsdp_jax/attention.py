"""``mfsdp.qk_clip``: the attention logits' maxima in, smaller query and key weights out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.layout.costs import Method
from matrixfsdp_jax.layout.rules import route
from matrixfsdp_jax.layout.spec import LeafRoute, Matrix, MatrixView, Plan, TensorView
from matrixfsdp_jax.owner.canonical import on_canonical
from matrixfsdp_jax.owner.collectives import manual_over
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams
from matrixfsdp_jax.owner.routed import Routes, check_owned, refuse_rules, row_outputs
from matrixfsdp_jax.owner.update import on_owners
from matrixfsdp_jax.transforms.checks import check_number
from matrixfsdp_jax.transforms.qk_clip import (
    AttentionWeight,
    HeadTables,
    clip_stacks,
    head_gammas,
    rescaled,
)

PyTree = Any
Layers = Mapping[str, Sequence[AttentionWeight]]


def qk_clip(
    layers: Layers,
    max_logit: float = 100.0,
    *,
    layout: OwnerLayout | None = None,
    rules: Any = None,
    optimizer: str | Method = "muon",
) -> optax.GradientTransformationExtraArgs:
    """Bound attention logits by shrinking the query and key weights of heads that exceed them.

    The last transformation of a chain: after the update is applied, the weights of a head with
    largest logit ``S > max_logit`` are those without clipping times ``gamma ** exponent`` with
    ``gamma = max_logit / S``. All other weights get the update that came in, bit for bit. With
    ``mfsdp.muon`` before it this is MuonClip.

    The maxima are the extra argument ``max_logits`` of ``update``: a dict with a float array
    ``[heads]`` per layer (``[layers, heads]`` for stacked leaves), the largest scaled logit of
    this step over the *global* batch; one that is not finite clips nothing. In
    ``mfsdp.train_step`` return them as aux, with ``aux_reduction="max"`` and
    ``extra_args=lambda aux: {"max_logits": aux}``. ``optax.MultiSteps`` passes no extra arguments
    on: accumulate by ``train_step(accumulate=...)``, or put this around it.

    With grouped queries the largest logit of the heads that share a key counts for all of them.

    Args:
      layers: name of each attention layer (any name; the key in ``max_logits``) -> its query and
        key parameters, biases among them.
      max_logit: the threshold, > 0.
      layout: an ``OwnerLayout`` for owner params; None for the user's own tree, on one device.
      rules: routing for ``layout=None``.
      optimizer: whose default routes apply, for ``layout=None``.

    Collectives: none here; the maximum over devices costs one small all-reduce where it is taken.

    Raises:
      ValueError: for a path, head count or block that does not fit the parameters, or a parameter
        that is read as tensors (its outputs are not known), naming it.
      TypeError: from ``update`` without ``max_logits``.

    Examples:
      >>> W = mfsdp.AttentionWeight
      >>> layers = {"block_0": [W("block_0/query/kernel", 8), W("block_0/key/kernel", 2)]}
      >>> tx = optax.chain(mfsdp.muon(0.02), mfsdp.qk_clip(layers))

    Reference: Kimi Team, "Kimi K2", arXiv 2507.20534, 2025, section 2.1.
    """
    check_number("max_logit", max_logit, low=0.0, above_low=True)
    own = {name: tuple(weights) for name, weights in layers.items()}
    if layout is None:
        inner = _on_tree(own, rules, optimizer)
    else:
        refuse_rules(rules)
        inner = _on_owned(own, layout)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError("qk_clip needs the parameters: tx.update(grads, state, params, ...)")
        if "max_logits" not in extra:
            raise TypeError(
                "qk_clip needs the extra argument max_logits, a dict with the largest logit of "
                f"every head for {sorted(own)}: tx.update(grads, state, params, max_logits=...), "
                "or train_step(..., has_aux=True, aux_reduction=..., extra_args=...)"
            )
        return inner(updates, params, extra["max_logits"], max_logit), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _on_owned(layers: Layers, layout: OwnerLayout) -> Any:
    plan = layout.plan
    heads = _Heads(layers, {lp.leaf.path: (lp.leaf, lp.route) for lp in plan.leaves})
    tables = heads.stack_tables(plan)
    clip = on_owners(lambda local: clip_stacks(tables, local), layout)

    def update(updates: Any, params: Any, max_logits: Any, max_logit: float) -> OwnerParams:
        check_owned(layout, updates)
        check_owned(layout, params)
        gammas = heads.gammas(max_logits, max_logit)
        sharded = [p for p in heads.rest if any(layout.specs.rest[p])]
        if sharded and manual_over(layout.owner_axis):
            raise ValueError(
                f"qk_clip cannot see {sharded} whole inside shard_map; plan with a larger "
                "rest_shard_min_size, so that they are replicated, or update outside shard_map"
            )
        stacks, _ = clip.update(updates.stacks, optax.EmptyState(), params.stacks, gammas=gammas)
        rest = updates.rest | {
            p: heads.rescale_rest(p, updates.rest[p], params.rest[p], gammas)
            for p in heads.rest
            if not isinstance(updates.rest[p], optax.MaskedNode)
        }
        return updates._replace(stacks=stacks, rest=rest)

    return update


def _on_tree(layers: Layers, rules: Any, optimizer: str | Method) -> Any:
    def update(updates: PyTree, params: PyTree, max_logits: Any, max_logit: float) -> PyTree:
        paths, values, treedef = tree_leaves.flatten(updates)
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        routed = route(treedef.unflatten(shapes), rules, optimizer=optimizer)
        routes = {leaf.path: (leaf, r) for leaf, r in routed}
        heads = _Heads(layers, routes)
        gammas = heads.gammas(max_logits, max_logit)
        new = dict(zip(paths, values, strict=True))
        whole = dict(zip(paths, tree_leaves.flatten(params)[1], strict=True))
        clip = on_canonical(
            lambda plan, local: clip_stacks(heads.stack_tables(plan), local),
            {p: routes[p] for p in heads.matrices},
        )
        clipped, _ = clip.update(
            {p: new[p] for p in heads.matrices},
            optax.EmptyState(),
            {p: whole[p] for p in heads.matrices},
            gammas=gammas,
        )
        new |= clipped
        new |= {p: heads.rescale_rest(p, new[p], whole[p], gammas) for p in heads.rest}
        return treedef.unflatten([new[p] for p in paths])

    return update


@dataclass(frozen=True)
class _Group:
    """The gammas of one layer: ``batch x count`` of them from ``offset`` on."""

    offset: int
    batch: int
    count: int
    heads: int


class _Heads:
    """Which gamma belongs to which output of which leaf."""

    def __init__(self, layers: Layers, routes: Routes) -> None:
        self.layers = layers
        self.routes = routes
        self.groups: dict[str, _Group] = {}
        self.matrices: list[str] = []
        self.rest: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        seen: set[tuple[str, int]] = set()
        offset = 1
        for name, weights in layers.items():
            for w in weights:
                self._check(name, w, seen)
            group = self._group(name, weights, offset)
            self.groups[name] = group
            offset += group.batch * group.count
            for w in weights:
                leaf, leaf_route = routes[w.path]
                if leaf_route.route == "matrix":
                    self.matrices.append(w.path)
                else:
                    old = self.rest.get(w.path, (0, 0.0))  # another block of the same leaf
                    new = self._rest_tables(group, w, leaf.shape)
                    self.rest[w.path] = (old[0] + new[0], old[1] + new[1])
        self.matrices = list(dict.fromkeys(self.matrices))

    def gammas(self, max_logits: Any, max_logit: float) -> jax.Array:
        if not isinstance(max_logits, Mapping) or set(max_logits) != set(self.groups):
            got = sorted(max_logits) if isinstance(max_logits, Mapping) else type(max_logits)
            raise ValueError(f"max_logits must be a dict over {sorted(self.groups)}, got {got}")
        for name, group in self.groups.items():
            shapes: list[tuple[int, ...]] = [(group.heads,)] if group.batch == 1 else []
            shapes.append((group.batch, group.heads))
            if jnp.shape(max_logits[name]) not in shapes:
                raise ValueError(
                    f"max_logits[{name!r}] has shape {jnp.shape(max_logits[name])}, expected "
                    f"{' or '.join(map(str, shapes))}: one largest logit per head"
                )
        counts = {name: group.count for name, group in self.groups.items()}
        return head_gammas(max_logits, counts, max_logit)

    def stack_tables(self, plan: Plan) -> HeadTables:
        """The tables of all classes that hold a query or key matrix."""
        by_leaf: dict[str, list[tuple[str, tuple[int, int], Matrix]]] = {}
        for c in plan.classes:
            for matrix, slot in zip(c.matrices, c.slots, strict=True):
                path = plan.leaves[matrix.leaf].leaf.path
                by_leaf.setdefault(path, []).append((c.key, slot, matrix))
        shapes = {c.key: (*c.stack_shape[:2], max(c.shape, default=1)) for c in plan.classes}
        gamma: dict[str, np.ndarray] = {}
        exponent: dict[str, np.ndarray] = {}
        for name, weights in self.layers.items():
            for w in weights:
                own = by_leaf.get(w.path, [])  # none of a rest leaf
                starts = sorted({matrix.start for _, _, matrix in own})
                for key, slot, matrix in own:
                    if matrix.start != starts[w.block]:
                        continue
                    index, power = self._outputs(
                        self.groups[name], w, matrix.batch, self._num_outputs(matrix, w.path)
                    )
                    gamma.setdefault(key, np.zeros(shapes[key], np.int32))
                    exponent.setdefault(key, np.zeros(shapes[key]))
                    gamma[key][slot][: len(index)] = index
                    exponent[key][slot][: len(index)] = power
        return HeadTables(gamma, exponent, row_outputs(plan))

    def rescale_rest(
        self, path: str, update: jax.Array, param: jax.Array, gammas: jax.Array
    ) -> jax.Array:
        index, power = self.rest[path]
        factor = gammas[index] ** jnp.asarray(power, jnp.float32)
        return rescaled(update, param, factor.reshape(update.shape))

    def _rest_tables(
        self, group: _Group, w: AttentionWeight, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gamma and exponent of every entry ``[batch, outputs]`` of a leaf that is no matrix."""
        inner = shape[1:] if group.batch > 1 else shape
        heads = w.num_heads if w.splits is None else None
        if (group.batch > 1 and shape[:1] != (group.batch,)) or not (
            len(inner) == 1 or (len(inner) == 2 and inner[0] == heads)
        ):
            layers = f"{group.batch} layers, then " if group.batch > 1 else ""
            raise ValueError(
                f"{w.path!r} is no matrix and has shape {list(shape)}; expected {layers}[outputs] "
                f"or [{w.num_heads} heads, head_dim]. Route a kernel as a matrix"
            )
        size = int(np.prod(inner))
        splits = (size,) if w.splits is None else w.splits
        if sum(splits) != size or not 0 <= w.block < len(splits):
            raise ValueError(
                f"{w.path!r} has {size} outputs, which splits={w.splits} and block={w.block} do "
                "not describe"
            )
        start = sum(splits[: w.block])
        index = np.zeros((group.batch, size), np.int32)
        power = np.zeros((group.batch, size))
        for b in range(group.batch):
            part = slice(start, start + splits[w.block])
            index[b, part], power[b, part] = self._outputs(group, w, b, splits[w.block])
        return index, power

    def _check(self, name: str, w: AttentionWeight, seen: set[tuple[str, int]]) -> None:
        if w.path not in self.routes:
            raise ValueError(
                f"attention layer {name!r} names {w.path!r}, which is no leaf; there are "
                f"{sorted(self.routes)[:8]}, ..."
            )
        leaf_route: LeafRoute = self.routes[w.path][1]
        if leaf_route.route == "frozen":
            raise ValueError(f"{w.path!r} of layer {name!r} is frozen, so it cannot be clipped")
        if isinstance(leaf_route.view, TensorView):
            raise ValueError(
                f"{w.path!r} of layer {name!r} is read as tensors, whose outputs are not known; "
                "give a rule that reads it as matrices (attention_in, matrix, ...), or rest for a "
                "bias"
            )
        if (w.path, w.block) in seen:
            raise ValueError(f"block {w.block} of {w.path!r} is listed twice")
        seen.add((w.path, w.block))
        view = leaf_route.view
        if leaf_route.route != "matrix" or view is None:
            return
        if w.splits is not None:
            raise ValueError(f"{w.path!r} is a matrix, whose splits come from its rule")
        blocks = max(1, len(view.splits))
        if not 0 <= w.block < blocks:
            raise ValueError(f"{w.path!r} has {blocks} blocks, so block={w.block} is none of them")

    def _group(self, name: str, weights: Sequence[AttentionWeight], offset: int) -> _Group:
        if not weights:
            raise ValueError(f"attention layer {name!r} lists no parameter")
        batches = {
            view.matrix_shape(leaf.shape)[0]
            for leaf, r in (self.routes[w.path] for w in weights)
            if isinstance(view := r.view, MatrixView)
        } or {1}
        heads = {w.num_heads for w in weights}
        count, most = min(heads), max(heads)
        if len(batches) > 1 or count < 1 or any(h % count for h in heads):
            raise ValueError(
                f"the parameters of attention layer {name!r} do not fit together: stacked "
                f"{sorted(batches)} times, with {sorted(heads)} heads; every number of heads must "
                "be a multiple of the smallest"
            )
        return _Group(offset, batches.pop(), count, most)

    def _num_outputs(self, matrix: Matrix, path: str) -> int:
        view = self.routes[path][1].view
        assert view is not None  # matrix leaves have a view
        return matrix.rows if view.out_side == "rows" else matrix.cols

    @staticmethod
    def _outputs(
        group: _Group, w: AttentionWeight, batch: int, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        head, exponent = w.heads_and_exponents(size)
        first = group.offset + batch * group.count
        return first + head // (w.num_heads // group.count), exponent
