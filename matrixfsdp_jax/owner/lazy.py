"""Parameters that become whole only where the model uses them, and again in the backward pass.

Everything here runs inside ``jax.shard_map`` over the data axes of a layout.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from flax import nnx
from flax.core import meta

from matrixfsdp_jax.layout.leaves import children, natural_key, subtree
from matrixfsdp_jax.layout.packing import build_leaf
from matrixfsdp_jax.layout.spec import LeafPlan
from matrixfsdp_jax.owner import collectives, wave_loop

if TYPE_CHECKING:
    from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams

PyTree = Any


@dataclass(frozen=True, eq=False)
class LazyParams:
    """The parameters of a model, each gathered where it is asked for.

    A loss function gets it in place of the parameters with ``lazy=True`` (``mfsdp.train_step``,
    ``mfsdp.eval_step``, ``layout.value_and_grad``); ``layout.lazy`` makes one in your own
    ``shard_map``. Paths are those of the report, up to any depth: ``"blocks/3"``.

    A wave holds one matrix of each of ``N`` owners, say those of one place in ``N`` layers. So
    layers come in groups that fill waves, each the least number of layers that does: 4 where a
    layer has two matrices of a shape and ``N`` is 8. A wave that two groups share travels for both.

    Attributes:
      layout: of the parameters.
      owned: local owner params.
      parts: what gets the gradient (see ``OwnerLayout.parts``).
      dtype: dtype of gathered floating leaves; None is the plan's.
      sharing: whether ``parts`` are those of replicas that share the work.
    """

    layout: "OwnerLayout"
    owned: "OwnerParams"
    parts: "OwnerParams"
    dtype: Any = None
    sharing: bool = False
    _entered: dict[str, jax.Array] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for c in self.layout.plan.classes:
            stack, part = self.owned.stacks[c.key], self.parts.stacks[c.key]
            wire = self.layout.wire(c.dtype, self.dtype, sharing=self.sharing)
            self._entered[c.key] = collectives.enter(stack, wire, part)

    def gather(self, path: str | Sequence[str] = "") -> PyTree:
        """The parameters below a path (all for ``""``), or a list of those below several paths.

        Collectives: one all-gather per wave that holds a matrix of them and per sharded rest leaf;
        backward one reduce-scatter for each.

        Raises:
          ValueError: if there is nothing at a path.
        """
        paths = [path] if isinstance(path, str) else list(path)
        trees = [self.below(p) for p in paths]
        with jax.named_scope("mfsdp.gather"):
            values = self._whole(sorted({i for tree in trees for i in jtu.tree_leaves(tree)}))
        found = [unboxed(jtu.tree_map(values.__getitem__, tree)) for tree in trees]
        return found[0] if isinstance(path, str) else found

    def remat(self, fn: Callable[..., Any], path: str | Sequence[str]) -> Callable[..., Any]:
        """``fn(params, *args)`` as a function of ``args``: the parameters come and go.

        They are gathered in the forward pass and, with all that ``fn`` computes, once more in the
        backward pass; in between only ``args`` are kept (``jax.checkpoint``).
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            return fn(self.gather(path), *args, **kwargs)

        return jax.checkpoint(run)

    def fold(self, fn: Callable[[Any, PyTree], Any], carry: Any, path: str) -> Any:
        """``carry = fn(carry, params)`` for the children of ``path`` one after the other.

        For models whose blocks are separate subtrees (``blocks/0``, ``blocks/1``, ...), in the
        natural order of their names. Blocks that share waves are gathered together, in the forward
        and again in the backward pass; between them only the carry is kept.

        Raises:
          ValueError: if there is nothing below ``path``.
        """
        prefix = f"{path}/" if path else ""
        names = [
            prefix + name
            for name in sorted((name for name, _ in children(self.below(path))), key=natural_key)
        ]
        if not names:
            raise ValueError(f"there are no blocks below {path!r}: it is a leaf")

        def run(blocks: list[PyTree], carry: Any) -> Any:
            for block in blocks:
                carry = jax.checkpoint(fn)(carry, block)
            return carry

        size = wave_loop.blocks_per_group(self, names[0])
        for k in range(0, len(names), size):
            carry = self.remat(run, names[k : k + size])(carry)
        return carry

    def scan(
        self,
        fn: Callable[..., tuple[Any, Any]],
        carry: Any,
        path: str,
        xs: PyTree = None,
        *,
        prefetch: bool = False,
    ) -> tuple[Any, PyTree]:
        """``jax.lax.scan`` over the layers of stacked parameters ``[L, ...]``, wave by wave.

        Gathers a group of layers, runs them, drops them. The backward pass gathers the group once
        more, recomputes it, and reduce-scatters its gradient. Alive are one group of whole
        parameters, in the backward pass two (they and their gradient), and the carry of each layer
        of a group and of each group. Leaves that no matrix method updates are gathered before.

        Args:
          fn: ``fn(carry, params) -> (carry, y)`` with the parameters of one layer, or
            ``fn(carry, params, x)`` where ``xs`` are given. What it closes over gets its gradient.
          carry: the first carry.
          path: where the stacked leaves are; all of them are stacked on dim 0.
          xs: a tree of arrays ``[L, ...]`` that are scanned too (keys for dropout, say).
          prefetch: gather the next group while one is computed; one more group is then alive.

        Returns:
          The last carry, and the stacked ``y``.

        Collectives: per wave one all-gather in the forward, one all-gather and one reduce-scatter
        in the backward pass.

        Raises:
          ValueError: if the leaves below ``path`` or ``xs`` are not stacked alike.
        """
        return wave_loop.scan(self, fn, carry, path, xs, prefetch)

    def linen(self, module: type[nn.Module], path: str) -> type[nn.Module]:
        """A linen module class whose parameters are those below ``path`` (``nn.map_variables``).

        For use inside another module, in place of ``module``: ``lazy.linen(Block, "block_0")()``.
        They are gathered when it is called, in the forward and again in the backward pass.
        """

        def gathered(_: PyTree) -> PyTree:
            return {"params": self.gather(path)}

        rematted: type[nn.Module] = nn.remat(
            nn.map_variables(module, "params", trans_in_fn=gathered)
        )
        return rematted

    def nnx(self, graphdef: Any, path: str, *rest: Any) -> Callable[..., Any]:
        """An nnx module as a function, with the parameters below ``path``.

        ``graphdef`` (and the ``rest`` of the state, if the module has any but parameters) is from
        ``nnx.split(block, nnx.Param, ...)``. The parameters are gathered when it is called, in the
        forward and again in the backward pass.
        """

        def call(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            return nnx.merge(graphdef, params, *rest)(*args, **kwargs)

        return self.remat(call, path)

    # ---- for the wave loop ---------------------------------------------------------------------

    def below(self, path: str) -> PyTree:
        """The subtree at a path, with the index of each leaf in place of it."""
        layout = self.layout
        tree = jtu.tree_unflatten(layout.treedef, range(len(layout.plan.leaves)))
        return subtree(tree, path)

    def stack(self, key: str) -> jax.Array:
        """The local stack ``[1, W, *dims]`` of a class, for ``collectives.gather_waves``."""
        return self._entered[key]

    def wire(self, own: str) -> collectives.Wire:
        """How waves of dtype ``own`` travel between the owners; replicas come after the loop."""
        return replace(self.layout.wire(own, self.dtype, sharing=False), replicas=())

    def outside(self, leaves: Iterable[LeafPlan]) -> dict[str, jax.Array]:
        """Leaves that are in no stack (rest and frozen), whole, by path."""
        whole: dict[str, jax.Array] = {}
        replicated: list[tuple[jax.Array, LeafPlan]] = []
        for lp in leaves:
            path = lp.leaf.path
            x = (self.owned.rest if lp.trainable else self.owned.frozen)[path]
            part = self.parts.rest[path] if lp.trainable else x
            if lp.shard_dim is None:
                replicated.append((part, lp))
                continue
            sharing = self.sharing and lp.trainable and self.layout.shares_leaf(lp)
            with jax.named_scope(path):
                wire = self.layout.wire(lp.leaf.dtype, self.dtype, sharing=sharing)
                whole[path] = collectives.gather_dim(x, lp.shard_dim, wire, part)
        wires = [self.layout.wire(lp.leaf.dtype, self.dtype, sharing=False) for _, lp in replicated]
        shared = collectives.share(
            [part for part, _ in replicated],
            self.layout.data_axis,
            gather_dtypes=[w.gather_dtype for w in wires],
            reduce_dtypes=[w.reduce_dtype for w in wires],
        )
        return whole | {lp.leaf.path: x for x, (_, lp) in zip(shared, replicated, strict=True)}

    def _whole(self, wanted: Sequence[int]) -> dict[int, jax.Array]:
        """Leaves by index, whole."""
        plan, slots = self.layout.plan, self.layout.leaf_slots
        waves: dict[str, dict[int, Any]] = {}
        for c in plan.classes:
            need = sorted({w for i in wanted for key, _, w, _ in slots[i] if key == c.key})
            if need:
                with jax.named_scope(c.key):
                    stack = wave_loop.take_waves(self.stack(c.key), need)
                    gathered = collectives.gather_waves(stack, self.wire(c.dtype))
                    waves[c.key] = dict(zip(need, gathered, strict=True))
        outside = self.outside(lp for i in wanted if not slots[i] for lp in [plan.leaves[i]])
        return {
            i: _built(plan.leaves[i], waves, slots[i])
            if slots[i]
            else outside[plan.leaves[i].leaf.path]
            for i in wanted
        }


def unboxed(tree: PyTree) -> PyTree:
    """``tree`` without boxes of linen metadata, which would constrain shardings."""
    return meta.map_axis_meta(lambda box: jtu.tree_leaves(box)[0], tree)


def _built(lp: LeafPlan, waves: dict[str, dict[int, Any]], slots: Sequence[Any]) -> jax.Array:
    leaf: jax.Array = build_leaf(
        [waves[key][w][d] for key, d, w, _ in slots],
        [matrix for *_, matrix in slots],
        lp.route.view,  # type: ignore[arg-type]  # a leaf with slots is a matrix leaf
        lp.leaf.shape,
        jnp,
    )
    return leaf
