"""Train and eval steps: gather, differentiate, reduce to the owners, update.

The loss and its gradient run under ``jax.shard_map`` over the owner axis; the optimizer then runs
on global owner params in the same jitted program, so that elementwise and global transformations of
optax mean what they mean on one device; those that look at one leaf's shape or norm (adafactor,
lamb, adaptive clipping) see a whole stack. This package's own enter ``shard_map`` by themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.layout.leaves import natural_key, states_of
from matrixfsdp_jax.owner import collectives, gradients, replicas
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams
from matrixfsdp_jax.owner.update import global_norm
from matrixfsdp_jax.transforms.shampoo import ShampooState

PyTree = Any

_OVER_DEVICES = {
    "mean": collectives.mean_over,
    "sum": collectives.sum_over,
    "max": collectives.max_over,
}
_OVER_MICRO_BATCHES: dict[str, Callable[..., jax.Array]] = {
    "mean": jnp.mean,
    "sum": jnp.sum,
    "max": jnp.max,
}


class TrainStep:
    """A compiled training step; made by ``train_step``.

    ``step(owned, state, batch, key=None, model_state=None)`` returns ``(owned, state, metrics)``,
    or ``(owned, state, model_state, metrics)`` if a ``model_state_reduction`` was given.
    """

    def __init__(
        self,
        jitted: Any,
        prepare: Callable[..., tuple[Any, ...]],
        layout: OwnerLayout,
        tolerated_failures: int,
    ) -> None:
        self._jitted = jitted
        self._prepare = prepare
        self._layout = layout
        self._tolerated = tolerated_failures
        self._unread: list[dict[str, jax.Array]] = []

    def __call__(
        self,
        owned: OwnerParams,
        state: PyTree,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        model_state: PyTree = None,
    ) -> tuple[Any, ...]:
        """Make one step; ``owned``, ``state`` and ``model_state`` are used up if donated."""
        out = self._jitted(*self._prepare(owned, state, batch, key, model_state))
        out = _settled(out, self._layout)
        self._raise_failures(out)
        return out

    def _raise_failures(self, out: tuple[Any, ...]) -> None:
        """Read the failure counters of this step and of earlier ones as far as they are there.

        Nothing waits for a device, so on an accelerator the error comes a few steps late.
        """
        if "preconditioner" in out[-1]:
            self._unread.append(out[-1]["preconditioner"])
        while self._unread and all(
            x.is_ready()  # type: ignore[attr-defined]  # jax.Array has it since 0.4
            for x in self._unread[0].values()
        ):
            counters = {name: int(x) for name, x in self._unread.pop(0).items()}
            if counters["nonfinite"] or counters["failures"] > self._tolerated:
                self._unread.clear()
                names = {
                    "failures": _names(out[1], self._layout, "failures", self._tolerated),
                    "nonfinite": _names(out[1], self._layout, "nonfinite", 0),
                }
                raise PreconditionerError(counters, self._tolerated, out, names)

    def lower(
        self,
        owned: OwnerParams,
        state: PyTree,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        model_state: PyTree = None,
    ) -> jax.stages.Lowered:
        """The lowered step, for ``mfsdp.audit`` and ahead-of-time compilation."""
        return self._jitted.lower(*self._prepare(owned, state, batch, key, model_state))


class PreconditionerError(RuntimeError):
    """A factor of Shampoo or SOAP was not finite, or its decomposition failed too often.

    Attributes:
      counters: ``failures``, the most refreshes of one block that failed in a row, and
        ``nonfinite``, how many so far met a factor with an infinity or a NaN.
      outputs: what the step returned, for its arguments may have been donated. Blocks that failed
        went on with their last good root, but parameters may hold NaN after a factor that was not
        finite.
      matrices: for each counter the names of the matrices (or tensors) concerned, as far as this
        process holds them.
    """

    def __init__(
        self,
        counters: dict[str, int],
        tolerated: int,
        outputs: tuple[Any, ...],
        matrices: dict[str, list[str]],
    ) -> None:
        found = []
        if counters["nonfinite"]:
            found.append(
                f"{counters['nonfinite']} refreshes of blocks met a factor that was not finite "
                f"(in {_some(matrices['nonfinite'])}), so parameters may hold NaN: go on from a "
                "saved state, with the optimizer inside mfsdp.skip_nonfinite(tx, layout=layout)"
            )
        if counters["failures"] > tolerated:
            found.append(
                f"{counters['failures']} refreshes of a block failed in a row (in "
                f"{_some(matrices['failures'])}), more than tolerated_failures={tolerated}: raise "
                "that or epsilon"
            )
        super().__init__(f"{'; '.join(found)}. The step's results are in error.outputs")
        self.counters = counters
        self.outputs = outputs
        self.matrices = matrices


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: OwnerLayout,
    *,
    has_aux: bool = False,
    aux_reduction: Any = "mean",
    extra_args: Callable[[PyTree], Mapping[str, Any]] | None = None,
    accumulate: int = 1,
    model_state_reduction: Any = None,
    tolerated_failures: int = 3,
    donate: bool = True,
    lazy: bool = False,
) -> TrainStep:
    """One jitted, donated training step on owner params.

    Args:
      loss_fn: ``loss_fn(params, batch)``, or ``loss_fn(params, batch, key)`` if the step is called
        with a key; plus ``model_state=`` if a reduction for it is declared. ``params`` is the
        canonical tree, ``batch`` this device's part. Returns the mean loss over that part, or
        ``(sum, count)`` for a mean weighted over the whole global batch (tokens). With
        ``has_aux`` it returns ``(loss, aux)``; with a model state ``(loss, new_model_state)``; with
        both ``(loss, (new_model_state, aux))``.
      tx: any optax transformation on owner params.
      layout: from ``mfsdp.plan``.
      has_aux: whether the loss function returns ``aux``, a tree of arrays. Combined over devices
        and micro-batches it is in ``metrics["aux"]``.
      aux_reduction: ``"mean"`` (each device and micro-batch with equal weight), ``"sum"`` or
        ``"max"``, or a tree (prefix) of them in the structure of the aux.
      extra_args: function from the combined aux to a dict of extra arguments for ``tx.update``
        (``mfsdp.qk_clip`` takes ``max_logits``).
      accumulate: number of micro-batches that each device makes of its part. Gradients are reduced
        to the owners per micro-batch and summed there in float32; the optimizer runs once.
      model_state_reduction: ``"mean"``, ``"sum"`` or ``"max"`` over devices for state that the
        forward pass changes (batch norm), or a tree (prefix) of them. Each device carries its own
        through its micro-batches; the reduction makes them one again.
      tolerated_failures: for Shampoo and SOAP: how many refreshes of one block may fail in a row.
        A gradient with a NaN shows only when its block is refreshed, and never in kinds without
        factors; ``mfsdp.skip_nonfinite`` is what guards against it.
      donate: give the buffers of ``owned``, ``state`` and ``model_state`` to the outputs.
      lazy: give the loss function an ``mfsdp.LazyParams`` in place of ``params``: it gathers them
        where it uses them, and only a group of layers is whole at a time (docs/layouts.md).

    Returns:
      A ``TrainStep``. ``metrics`` holds float32 scalars ``loss`` (mean over the global batch),
      ``grad_norm`` and ``update_norm`` (over all devices), and ``aux``; for Shampoo and SOAP
      ``preconditioner``, the counters of ``PreconditionerError``.
      The loss is also handed to ``tx.update`` as the extra argument ``value``.

    Collectives: those of ``layout.gather``, per micro-batch (XLA moves the forward ones out of the
    loop over micro-batches); one scalar all-reduce each for the loss, its token count, and the two
    norms; those of ``tx`` (none for matrices); one all-reduce for the aux and one for the model
    state; for Shampoo and SOAP one scalar all-reduce per failure counter and group of blocks.

    Raises:
      ValueError: before any device work, if ``accumulate`` is not a positive integer,
        ``tolerated_failures`` is no integer >= 0, the batch does not divide, the reduction is
        unknown, or the params are not of this layout.
      PreconditionerError: from the step, for a factor that is not finite or too many failed
        decompositions.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} must be a positive integer")
    tolerated = tolerated_failures
    if isinstance(tolerated, bool) or not isinstance(tolerated, int) or tolerated < 0:
        raise ValueError(f"tolerated_failures={tolerated!r} must be an integer >= 0")
    _check_reduction("model_state_reduction", model_state_reduction)
    _check_reduction("aux_reduction", aux_reduction, none=False)
    if not has_aux and (extra_args is not None or aux_reduction != "mean"):
        raise ValueError("extra_args and aux_reduction are about the aux, which needs has_aux=True")
    tx = optax.with_extra_args_support(tx)
    state_shardings = layout.state_shardings(tx)
    has_model_state = model_state_reduction is not None
    aux_reduction = aux_reduction if has_aux else None
    local = _local_step(loss_fn, layout, aux_reduction, accumulate, model_state_reduction, lazy)

    def step(
        owned: OwnerParams, state: PyTree, batch: PyTree, key: Any, model_state: PyTree
    ) -> tuple[Any, ...]:
        specs = gradients.batch_specs(layout, batch, accumulate)
        mapped = layout.mapped(
            local,
            (layout.specs, specs, P(), P()),
            (P(), layout.update_specs, P(), P()),
        )
        loss, grads, aux, model_state = mapped(owned, batch, key, model_state)
        with jax.named_scope("mfsdp.optimizer"):
            extra = {} if extra_args is None else _checked_extra(extra_args(aux))
            params = replicas.as_updates(layout, layout.trainable(owned))
            updates, state = tx.update(grads, state, params, value=loss, **extra)
            owned = layout.apply_updates(owned, updates)
        with jax.named_scope("mfsdp.metrics"):
            metrics = {
                "loss": loss,
                "grad_norm": global_norm(grads, layout),
                "update_norm": global_norm(updates, layout),
            }
            metrics |= _counters(state)
        if has_aux:
            metrics["aux"] = aux
        return (owned, state, *((model_state,) if has_model_state else ()), metrics)

    replicated = NamedSharding(layout.mesh, P())
    out = (layout.shardings, state_shardings, *((replicated,) if has_model_state else ()))
    jitted = jax.jit(
        step,
        out_shardings=(*out, replicated),
        donate_argnums=((0, 1, 4) if has_model_state else (0, 1)) if donate else (),
    )

    def prepare(
        owned: OwnerParams, state: PyTree, batch: PyTree, key: Any, model_state: PyTree
    ) -> tuple[Any, ...]:
        layout.check_owned(owned)
        _refuse_donated(owned=owned, state=state, model_state=model_state)
        if (model_state is not None) != has_model_state:
            raise ValueError(
                "model_state= goes with train_step(..., model_state_reduction=...): got "
                f"model_state {'with' if model_state is not None else 'missing, with'} "
                f"model_state_reduction={model_state_reduction!r}"
            )
        gradients.batch_specs(layout, batch, accumulate)
        model_state = gradients.replicate(layout, model_state)
        return owned, state, gradients.shard_batch(layout, batch), key, model_state

    return TrainStep(jitted, prepare, layout, tolerated_failures)


def eval_step(
    fn: Callable[..., Any], layout: OwnerLayout, *, lazy: bool = False
) -> Callable[..., Any]:
    """A jitted evaluation on owner params; needs no optimizer.

    Args:
      fn: ``fn(params, batch, *args)`` on canonical params and this device's part of the batch.
        Returns a scalar, a pair ``(sum, count)``, or a dict (any nesting) of those.
      layout: from ``mfsdp.plan``.
      lazy: give ``fn`` an ``mfsdp.LazyParams`` in place of ``params`` (see ``train_step``).

    Returns:
      ``eval(owned, batch, *args)`` with the same tree of float32 means over the global batch
      (weighted ones for pairs). ``args`` (a key, model state) are the same on every device.

    Collectives: one all-gather per wave and per sharded rest leaf, one scalar all-reduce per value.
    """

    def local(owned: OwnerParams, batch: PyTree, args: tuple[Any, ...]) -> PyTree:
        params = layout.lazy(owned)
        out = fn(params if lazy else params.gather(), batch, *args)
        return jax.tree.map(
            lambda v: gradients.global_mean(v, layout.data_axis)[0],
            out,
            is_leaf=lambda v: type(v) is tuple,  # a NamedTuple is a container of values
        )

    @jax.jit
    def run(owned: OwnerParams, batch: PyTree, args: tuple[Any, ...]) -> PyTree:
        specs = gradients.batch_specs(layout, batch)
        mapped = layout.mapped(local, (layout.specs, specs, P()), P())
        return mapped(owned, batch, args)

    def evaluate(owned: OwnerParams, batch: PyTree, *args: Any) -> PyTree:
        layout.check_owned(owned)
        _refuse_donated(owned=owned)
        gradients.batch_specs(layout, batch)
        return _settled(run(owned, gradients.shard_batch(layout, batch), args), layout)

    return evaluate


def _counters(state: PyTree) -> dict[str, dict[str, jax.Array]]:
    """The failure counters of all Shampoo and SOAP states in ``state``, over all devices."""
    found = states_of(ShampooState, state)
    failures = [jnp.max(x) for s in found for x in jax.tree.leaves(s.failures)]
    nonfinite = [jnp.sum(x) for s in found for x in jax.tree.leaves(s.nonfinite)]
    if not failures:
        return {}
    counters = {
        "failures": jnp.max(jnp.stack(failures)),
        "nonfinite": jnp.sum(jnp.stack(nonfinite)),
    }
    return {"preconditioner": counters}


def _names(state: PyTree, layout: OwnerLayout, field: str, limit: int) -> list[str]:
    """The matrices with a block whose counter is above ``limit``, of those held by this process."""
    classes = {c.key: dict(zip(c.slots, c.matrices, strict=True)) for c in layout.plan.classes}
    found = set()
    for own in states_of(ShampooState, state):
        for key, groups in getattr(own, field).items():
            for shard in (s for x in jax.tree.leaves(groups) for s in x.addressable_shards):
                start = [part.start or 0 for part in shard.index[:2]]
                for *slot, _ in np.argwhere(np.asarray(shard.data) > limit).tolist():
                    matrix = classes.get(key, {}).get((start[0] + slot[0], start[1] + slot[1]))
                    found.add(key if matrix is None else matrix.name)
    return sorted(found, key=natural_key)


def _some(names: list[str]) -> str:
    """The first names, for a message."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more or "matrices of other processes or steps"


def _refuse_donated(**trees: PyTree) -> None:
    """An earlier step may have used a buffer up; XLA's CPU devices end the process over that."""
    for name, tree in trees.items():
        for keys, x in jtu.tree_leaves_with_path(tree):
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
                raise ValueError(
                    f"{name}{jtu.keystr(keys)} was donated to an earlier step and is gone; go on "
                    "with what that step returned, or build it with train_step(..., donate=False)"
                )


def _settled(out: Any, layout: OwnerLayout) -> Any:
    """``out``, waited for on simulated devices.

    XLA's CPU devices share one thread pool. Programs with collectives that pile up in it wait for
    one another, and after 40 seconds the process is ended. Accelerators run ahead as usual.
    """
    simulated = layout.mesh.devices.flat[0].platform == "cpu" and layout.mesh.size > 1
    return jax.block_until_ready(out) if simulated else out


def _local_step(
    loss_fn: Callable[..., Any],
    layout: OwnerLayout,
    aux_reduction: Any,
    accumulate: int,
    state_reduction: Any,
    lazy: bool,
) -> Callable[..., Any]:
    """Loss, gradients, aux and model state of one step, inside ``shard_map``."""
    axis = layout.data_axis
    has_aux, has_state = aux_reduction is not None, state_reduction is not None

    def micro(
        owned: OwnerParams, batch: PyTree, key: Any, model_state: PyTree
    ) -> tuple[gradients.LocalResult, PyTree]:
        def loss(params: PyTree) -> Any:
            keys = () if key is None else (key,)
            states = {"model_state": model_state} if has_state else {}
            return loss_fn(params, batch, *keys, **states)

        result = gradients.local_value_and_grad(layout, loss, owned, has_aux or has_state, lazy)
        if not has_state:
            return result, None
        new_state, aux = gradients.split_aux(result.aux, True) if has_aux else (result.aux, None)
        return result._replace(aux=aux), _varying(new_state, axis)

    def local(owned: OwnerParams, batch: PyTree, key: Any, model_state: PyTree) -> tuple[Any, ...]:
        key = gradients.local_key(key, axis)
        model_state = _varying(model_state, axis)
        if accumulate == 1:
            result, model_state = micro(owned, batch, key, model_state)
            loss, grads, aux = result.loss, result.gradients, result.aux
        else:
            loss, grads, aux, model_state = _accumulate(
                micro, layout, owned, batch, key, model_state, accumulate
            )
            if has_aux:
                aux = _over_micro_batches(aux, aux_reduction)
        if has_aux:
            aux = _over_devices(aux, aux_reduction, axis)
        if has_state:
            _refuse_integer_means(model_state, state_reduction)
            model_state = _over_devices(model_state, state_reduction, axis)
        return loss, grads, aux, model_state

    return local


def _accumulate(
    micro: Callable[..., Any],
    layout: OwnerLayout,
    owned: OwnerParams,
    batch: PyTree,
    key: Any,
    model_state: PyTree,
    parts: int,
) -> tuple[Any, ...]:
    """Weighted mean over micro-batches, gradients summed on the owners in float32.

    Aux comes stacked, one per micro-batch.
    """

    def one(model_state: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[Any, Any]:
        index, part = xs
        folded = None if key is None else jax.random.fold_in(key, index)
        return micro(owned, part, folded, model_state)

    split = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
    indices = jnp.arange(parts)
    first = (indices[0], jax.tree.map(lambda x: x[0], split))
    shapes = jax.eval_shape(one, model_state, first)[0]
    own = layout.parts(owned)
    zeros = jax.tree.map(
        lambda p: collectives.varying(
            jnp.zeros(p.shape, jnp.promote_types(jnp.float32, p.dtype)),
            tuple(a for a in layout.data_axis if a in collectives.varying_axes(p)),
        ),
        own,
    )
    scalar = jnp.zeros((), shapes.loss.dtype)

    def body(carry: tuple[Any, ...], xs: Any) -> tuple[Any, PyTree]:
        total, weight, grads, model_state = carry
        result, model_state = one(model_state, xs)
        grads = jax.tree.map(lambda a, g: a + g * result.weight, grads, result.gradients)
        carry = (total + result.loss * result.weight, weight + result.weight, grads, model_state)
        return carry, result.aux

    carry = (scalar, scalar, zeros, model_state)
    (total, weight, grads, model_state), aux = jax.lax.scan(body, carry, (indices, split))
    weight = jnp.where(weight == 0, 1, weight)
    grads = jax.tree.map(lambda g, like: (g / weight).astype(like.dtype), grads, own)
    return total / weight, grads, aux, model_state


def _varying(tree: PyTree, axis: collectives.Axis) -> PyTree:
    return jax.tree.map(lambda x: collectives.varying(jnp.asarray(x), axis), tree)


def _checked_extra(extra: Any) -> Mapping[str, Any]:
    if not isinstance(extra, Mapping) or "value" in extra:
        raise ValueError(
            f"extra_args returned {extra if isinstance(extra, Mapping) else type(extra).__name__}; "
            "expected a dict of extra arguments for tx.update, without value (the loss)"
        )
    return extra


def _check_reduction(argument: str, reduction: Any, *, none: bool = True) -> None:
    names = jax.tree.leaves(reduction, is_leaf=None if none else lambda x: x is None)
    for name in names:
        if name not in _OVER_DEVICES:
            raise ValueError(f"{argument} {name!r} is unknown; give one of {sorted(_OVER_DEVICES)}")


def _over_devices(tree: PyTree, reduction: Any, axis: collectives.Axis) -> PyTree:
    """``tree`` combined over devices by the names in ``reduction``, a prefix of it."""
    return jax.tree.map(lambda name, part: _OVER_DEVICES[name](part, axis), reduction, tree)


def _over_micro_batches(tree: PyTree, reduction: Any) -> PyTree:
    """The same over the leading dim of every leaf, without a collective."""

    def combine(name: str, part: PyTree) -> PyTree:
        return jax.tree.map(lambda x: _OVER_MICRO_BATCHES[name](x, axis=0), part)

    return jax.tree.map(combine, reduction, tree)


def _refuse_integer_means(model_state: PyTree, reduction: Any) -> None:
    def check(name: str, part: PyTree) -> None:
        for keys, x in jtu.tree_leaves_with_path(part):
            if name == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
                raise ValueError(
                    f"model state {jtu.keystr(keys)} is {x.dtype} and has no mean; declare "
                    '"max" or "sum" for it: model_state_reduction takes a tree'
                )

    jax.tree.map(check, reduction, model_state)
