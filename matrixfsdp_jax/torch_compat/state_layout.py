"""The state of an engine under the names of the reference's state dict, and back.

``block_N`` holds, as nested dicts, ``shampoo/factor_matrices/K`` and what is kept of each factor
(``shampoo/inv_factor_matrices/K``, or ``shampoo/factor_matrices_eigenvectors/K`` with
``.../factor_matrices_eigenvalues/K`` or ``shampoo/corrected_eigenvalues``), ``adagrad``,
``filtered_grad``, ``momentum_buffer`` and ``weight_buffer``. ``K`` counts the preconditioned dims.
Symmetric matrices are packed on demand: their upper triangle, row by row.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import torch

from matrixfsdp_jax.torch_compat import crossing
from matrixfsdp_jax.torch_compat.blocks import Block
from matrixfsdp_jax.torch_compat.engine import Engine
from matrixfsdp_jax.transforms.averaging import AveragingState, MomentumBuffer
from matrixfsdp_jax.transforms.muon import MuonState
from matrixfsdp_jax.transforms.shampoo import ShampooState

PyTree = Any
Names = tuple[str | int, ...]
# Key of a stack, names of the entry, array ``[W, ...]`` to the array in its place.
Visit = Callable[[str, Names, jax.Array], jax.Array]

_FACTORS = {
    "factors": "factor_matrices",
    "roots": "inv_factor_matrices",
    "vectors": "factor_matrices_eigenvectors",
    "values": "factor_matrices_eigenvalues",
}
_SYMMETRIC = ("factor_matrices", "inv_factor_matrices")
# Fields of ``ShampooState`` with an entry per group of blocks that a state dict keeps.
GROUPED = ("filtered", "preconditioner", "grafting")
_STATES = (ShampooState, MomentumBuffer, AveragingState, MuonState)


def visit_state(state: PyTree, visit: Visit) -> PyTree:
    """``state`` with every array that belongs to blocks replaced: the one place of the names."""

    def stacks(name: str, own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {key: visit(key, (name,), x[0])[None] for key, x in own.items()}

    def one(found: Any) -> Any:
        match found:
            case ShampooState():
                return _visit_shampoo(found, visit)
            case MomentumBuffer(buffer):
                return MomentumBuffer(stacks("momentum_buffer", buffer))
            case MuonState():
                return found._replace(mu=stacks("momentum_buffer", found.mu))
            case AveragingState():
                return found._replace(z=stacks("weight_buffer", found.z))
        return found

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, _STATES))


def _visit_shampoo(state: ShampooState, visit: Visit) -> ShampooState:
    new: dict[str, dict[str, Any]] = {name: {} for name in GROUPED}
    for key in state.filtered:

        def put(names: Names, x: jax.Array, key: str = key) -> jax.Array:
            return visit(key, names, x[0, :, 0])[None, :, None]

        # Every block is a tensor of its own here: one group, of one block.
        (average,), (own,), (graft,) = (getattr(state, name)[key] for name in GROUPED)
        done = visit_group(average, own, graft, put)
        for name, value in zip(GROUPED, done, strict=True):
            new[name][key] = (value,)
    return state._replace(**new)  # type: ignore[arg-type]  # dicts are trees of arrays


def visit_group(
    average: Any, own: Any, graft: Any, put: Callable[[Names, Any], Any]
) -> tuple[Any, Any, Any]:
    """The state of one group of equal blocks, with ``put(names, array)`` for every array."""
    # Two diagonal moments have one name in the reference, where one of them is lost.
    both = hasattr(own, "nu") and hasattr(graft, "nu")
    return (
        put(("filtered_grad",), average) if hasattr(average, "shape") else average,
        _visit_kind(own, put, ("preconditioner",) if both else ()),
        _visit_kind(graft, put, ("grafting",) if hasattr(graft, "factors") else ()),
    )


def _visit_kind(kind: Any, put: Callable[[Names, Any], Any], within: Names) -> Any:
    new: dict[str, Any] = {}
    for field, value in kind._asdict().items() if kind != () else ():
        if field in _FACTORS:
            lead = (*within, "shampoo", _FACTORS[field])
            new[field] = tuple(put((*lead, k), x) for k, x in enumerate(value))
        else:
            names = {"moment": ("shampoo", "corrected_eigenvalues"), "nu": ("adagrad",)}[field]
            new[field] = put((*within, *names), value)
    return kind._replace(**new) if new else kind


def blocks_state(engine: Engine, packed: bool) -> dict[Block, dict[str, Any]]:
    """The nested dict of every block, in tensors of their own."""
    found: dict[Block, dict[str, Any]] = {block: {} for block in engine.blocks}

    def record(key: str, names: Names, stack: jax.Array) -> jax.Array:
        for block, value in zip(engine.stacks[key], crossing.to_torch(stack), strict=False):
            value = _pack(value) if packed and _symmetric(names) else value.clone()
            set_entry(found[block], names, value)
        return stack

    visit_state(engine.state, record)
    return found


def load_blocks(
    engine: Engine, given: Mapping[Block, Mapping[str, Any]], step: int, lr_sum: float
) -> None:
    """Take over the state of every block and the scalars of the group; failures count anew.

    Raises: ValueError if a block lacks an entry, has one too many, or one of another shape.
    """
    unread = {block: _paths(given[block]) for block in engine.blocks}

    def read(key: str, names: Names, old: jax.Array) -> jax.Array:
        values = []
        for block in engine.stacks[key]:
            value = entry(given[block], names, block)
            unread[block].discard("/".join(map(str, names)))
            if _symmetric(names) and value.ndim == 1:
                value = unpack(value)
            if tuple(value.shape) != old.shape[1:]:
                raise ValueError(
                    f"{_where(block, names)} is {tuple(value.shape)} in the state dict, expected "
                    f"{old.shape[1:]}; it was saved with other blocks (max_preconditioner_dim, "
                    "target_parameter_dimensionality) or for another model"
                )
            values.append(value)
        values += values[:1] * (len(old) - len(values))  # the empty place beside one block
        stack = torch.stack(values).to(_device(old))
        return jnp.array(crossing.to_jax(stack), old.dtype, copy=True)

    def scalar(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = getattr(path[-1], "name", None)
        fields = {getattr(part, "name", None) for part in path}
        if name in ("count", "lr_sum"):
            return jnp.full_like(x, step if name == "count" else lr_sum)
        return jnp.zeros_like(x) if fields & {"failures", "nonfinite"} else x

    new = jtu.tree_map_with_path(scalar, visit_state(engine.state, read))
    for block, names in unread.items():
        if names:
            raise ValueError(
                f"the state dict has {sorted(names)} for {block.name} of parameter {block.param} "
                "of its group, which these options do not keep; load it with the options it was "
                "saved with"
            )
    engine.set_state(new)


def _device(array: jax.Array) -> torch.device:
    return crossing.to_torch(array).device


def _where(block: Block, names: Names) -> str:
    return f"{block.name}/{'/'.join(map(str, names))} of parameter {block.param} of its group"


def set_entry(own: dict[Any, Any], names: Names, value: torch.Tensor) -> None:
    """Put a value at the end of a path of nested dicts."""
    for name in names[:-1]:
        own = own.setdefault(name, {})
    own[names[-1]] = value


def entry(given: Mapping[Any, Any], names: Names, block: Block) -> torch.Tensor:
    """The value at the end of a path of nested dicts.

    Raises: ValueError if there is none.
    """
    value: Any = given
    for name in names:
        # A dict that went through JSON or a flattened checkpoint has text for numbers.
        value = value.get(name, value.get(str(name))) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(
            f"the state dict has no {_where(block, names)}; load it with the options, and for DDP "
            "the number of trainers, that it was saved with"
        )
    return torch.as_tensor(value).detach()


def _paths(given: Mapping[Any, Any], lead: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in given.items():
        path = f"{lead}{name}"
        found |= _paths(value, f"{path}/") if isinstance(value, Mapping) else {path}
    return found


def _symmetric(names: Names) -> bool:
    return len(names) > 1 and names[-2] in _SYMMETRIC


def _pack(matrix: torch.Tensor) -> torch.Tensor:
    rows, cols = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, cols]


def unpack(triangle: torch.Tensor) -> torch.Tensor:
    """The symmetric matrix of an upper triangle."""
    k = int(((8 * triangle.numel() + 1) ** 0.5 - 1) / 2)
    if k * (k + 1) // 2 != triangle.numel():
        raise ValueError(f"{triangle.numel()} numbers are no upper triangle of a square matrix")
    rows, cols = torch.triu_indices(k, k, device=triangle.device)
    matrix = triangle.new_empty(k, k)
    matrix[rows, cols] = matrix[cols, rows] = triangle
    return matrix
