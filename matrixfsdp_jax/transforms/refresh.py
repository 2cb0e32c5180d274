"""When which unit is decomposed again: a phase for each unit, one dynamic loop per group.

A unit is one block of one slot. Shape legend: ``N`` devices, ``W`` waves, ``B`` blocks of a slot,
``F`` phases.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from matrixfsdp_jax.layout.costs import MAX_FREQUENCY, check_frequency

PyTree = Any
MAX_STEP = 2**31 - 1
FirstRefresh = Literal["all", "spread"]


@dataclass(frozen=True)
class Schedule:
    """Refresh at which steps.

    frequency: steps between two refreshes of a unit. start: the first step with a refresh.
    stagger: in each step refresh about 1/frequency of the units, instead of all in one.
    first: under ``stagger``, refresh all units at ``start``, or each at its own turn.
    """

    frequency: int
    start: int
    stagger: bool
    first: FirstRefresh

    def __post_init__(self) -> None:
        """Refuse what is out of range: steps are int32."""
        check_frequency(self.frequency, MAX_FREQUENCY if self.stagger else MAX_STEP)
        start = self.start
        if isinstance(start, bool) or not isinstance(start, int) or not 1 <= start <= MAX_STEP:
            raise ValueError(
                f"start_preconditioning_step={start!r} must be an int >= 1 and <= {MAX_STEP}"
            )
        if self.first not in get_args(FirstRefresh):
            raise ValueError(
                f"first_refresh={self.first!r} must be one of {get_args(FirstRefresh)}"
            )

    @property
    def num_phases(self) -> int:
        """``F``."""
        return self.frequency if self.stagger else 1

    def due(
        self, step: jax.Array, before: Callable[[Any], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The range ``[low, high)`` of the units due, of units in the order of their phases.

        ``before(phase)`` is the number of units of earlier phases.
        """
        turn = step % self.frequency
        if self.stagger:
            everything = (step == self.start) & (self.first == "all")
            low, high = before(turn), before(turn + 1)
        else:
            everything = (step == self.start) | (turn == 0)
            low = high = before(0)
        low = jnp.where(everything, before(0), low)
        high = jnp.where(everything, before(self.num_phases), high)
        return low, jnp.where(step >= self.start, high, low)


def refresh_units(
    refresh: Callable[[PyTree], tuple[PyTree, jax.Array, jax.Array]],
    state: PyTree,
    failures: jax.Array,
    nonfinite: jax.Array,
    phases: jax.Array,
    schedule: Schedule,
    step: jax.Array,
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Refresh the units that are due, one after the other.

    Args:
      refresh: one unit of the state to ``(new, ok, finite)``.
      state: a NamedTuple of arrays (or tuples of them) ``[1, W, B, ...]``.
      failures: ``[1, W, B]``, consecutive refreshes that failed.
      nonfinite: ``[1, W, B]``, refreshes so far of a factor that was not finite.
      phases: ``[1, W, B]``, in which step of a period each unit is due; ``F`` or more in pads.
      schedule: when.
      step: number of this update, from 1.
    """
    lead = failures.shape

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[len(lead) :])

    phase = flat(phases)
    units = jnp.argsort(phase, stable=True)
    old = jax.tree.map(flat, state)
    low, high = schedule.due(step, lambda p: jnp.sum(phase < p))
    # Only what a refresh replaces is carried; a probe tells which.
    leaves, treedef = jax.tree.flatten(old)
    kept = _untouched(refresh, old)

    def body(i: jax.Array, carry: Any) -> Any:
        changed, failures, nonfinite = carry
        unit = units[i]
        whole = _merged(changed, leaves, kept)
        one = jax.tree.unflatten(treedef, [x[unit] for x in whole])
        new, ok, finite = refresh(one)
        new_leaves = [x for x, keep in zip(jax.tree.leaves(new), kept, strict=True) if not keep]
        changed = [x.at[unit].set(y) for x, y in zip(changed, new_leaves, strict=True)]
        failures = failures.at[unit].set(jnp.where(ok, 0, failures[unit] + 1))
        nonfinite = nonfinite.at[unit].add(jnp.where(finite, 0, 1))
        return changed, failures, nonfinite

    changed = [x for x, keep in zip(leaves, kept, strict=True) if not keep]
    carry = (changed, flat(failures), flat(nonfinite))
    if len(units) == 1:
        # A loop over one unit does the same each time: XLA would move the decomposition out of it,
        # and so into every step.
        carry = jax.lax.cond(low < high, lambda c: body(low, c), lambda c: c, carry)
    else:
        carry = jax.lax.fori_loop(low, high, body, carry)
    changed, failures, nonfinite = carry
    new = jax.tree.unflatten(treedef, _merged(changed, leaves, kept))
    new = jax.tree.map(lambda x, like: x.reshape(like.shape), new, state)
    return new, failures.reshape(lead), nonfinite.reshape(lead)


def _untouched(refresh: Callable[[PyTree], Any], state: PyTree) -> list[bool]:
    """Which leaves a refresh hands on as they are."""
    seen: list[bool] = []

    def probe(state: PyTree) -> None:
        unit = jax.tree.map(lambda x: x[0], state)
        new = refresh(unit)[0]
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(unit), strict=True)
        seen.extend(a is b for a, b in pairs)

    jax.eval_shape(probe, state)
    return seen


def _merged(changed: list[Any], leaves: list[Any], kept: list[bool]) -> list[Any]:
    new = iter(changed)
    return [x if keep else next(new) for x, keep in zip(leaves, kept, strict=True)]
