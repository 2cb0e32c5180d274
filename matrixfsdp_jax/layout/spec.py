"""The words of a layout as plain, hashable data (no jax here).

A *leaf* is one array of the user's tree. A route says what happens to it; a view says
how it is read as matrices; a plan deals those matrices out to devices. A method that takes other
orders than 2 (Shampoo) may read a leaf as tensors; all that is said of matrices holds for them.

Shape legend: ``N`` devices on the owner axis, ``W`` waves.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from matrixfsdp_jax.layout.costs import Method

Route = Literal["matrix", "rest", "frozen"]
Side = Literal["rows", "cols"]
Dealing = Literal["slots", "lpt"]


@dataclass(frozen=True)
class Leaf:
    """One array of the user's tree: its path (``"blocks/0/mlp/kernel"``), shape and dtype name."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class MatrixView:
    """How a leaf is read as a batch of matrices ``[batch, rows, cols]``.

    The three groups of dims, put one after the other, are a permutation of the leaf's dims;
    each group is flattened in the order given. A flax kernel ``[in, out]`` has
    ``out_side="cols"``; a torch weight ``[out, in]`` has ``out_side="rows"``.
    ``splits`` cuts every matrix into blocks of the given sizes along ``split_side`` (fused QKV).
    """

    row_dims: tuple[int, ...] = (0,)
    col_dims: tuple[int, ...] = (1,)
    batch_dims: tuple[int, ...] = ()
    out_side: Side = "cols"
    splits: tuple[int, ...] = ()
    split_side: Side = "cols"

    @property
    def permutation(self) -> tuple[int, ...]:
        """The leaf's dims in the order batch, rows, cols."""
        return self.batch_dims + self.row_dims + self.col_dims

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """``(batch, rows, cols)`` of a leaf of ``shape``, before any split."""
        batch, rows, cols = (
            math.prod(shape[d] for d in dims)
            for dims in (self.batch_dims, self.row_dims, self.col_dims)
        )
        return batch, rows, cols

    def item_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``(rows, cols)`` of a leaf of ``shape``, before any split."""
        return self.matrix_shape(shape)[1:]

    @property
    def split_axis(self) -> int:
        """The axis of a matrix that ``splits`` cuts."""
        return 0 if self.split_side == "rows" else 1

    def fans(self, dims: tuple[int, ...]) -> tuple[int, int]:
        """``(fan_in, fan_out)`` of a matrix ``rows x cols``."""
        rows, cols = dims
        return (rows, cols) if self.out_side == "cols" else (cols, rows)


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """How a leaf is read as a batch of tensors ``[batch, *dims]``: nothing is flattened.

    Batch dims and dims, one after the other, are a permutation of the leaf's dims. The last dim
    counts as the outputs (a flax kernel ``[*spatial, in, out]``).
    """

    batch_dims: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    out_side: ClassVar[Side] = "cols"
    splits: ClassVar[tuple[int, ...]] = ()
    split_axis: ClassVar[int] = 0

    @property
    def permutation(self) -> tuple[int, ...]:
        """The leaf's dims in the order batch, dims."""
        return self.batch_dims + self.dims

    def item_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one tensor of a leaf of ``shape``."""
        return tuple(shape[d] for d in self.dims)

    def fans(self, dims: tuple[int, ...]) -> tuple[int, int]:
        """``(fan_in, fan_out)`` of a tensor: all dims but the last, and the last."""
        return math.prod(dims[:-1]), math.prod(dims[-1:])


View = MatrixView | TensorView


@dataclass(frozen=True)
class LeafRoute:
    """What the rules decided for a leaf: its route, why, and (for a matrix) how it is read."""

    route: Route
    reason: str
    view: View | None = None


@dataclass(frozen=True)
class Matrix:
    """One matrix (or tensor) of one leaf, as the user holds it (not yet oriented).

    ``dims`` is its shape, ``(rows, cols)`` for a matrix. ``transposed`` says whether it is stored
    transposed. ``batch`` is its flat index over the view's batch dims; ``start`` its offset along
    the side that the view splits (0 where nothing is split). ``leaf`` indexes ``Plan.leaves``.
    """

    name: str
    leaf: int
    batch: int
    start: int
    dims: tuple[int, ...]
    transposed: bool
    fan_in: int
    fan_out: int

    @property
    def rows(self) -> int:
        """Rows of a matrix (order 2)."""
        return _pair(self.dims)[0]

    @property
    def cols(self) -> int:
        """Columns of a matrix (order 2)."""
        return _pair(self.dims)[1]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in a stack."""
        return self.dims[::-1] if self.transposed else self.dims


@dataclass(frozen=True)
class ShapeClass:
    """All matrices of one stored shape and dtype, and the slot ``(device, wave)`` of each.

    ``matrices`` is in forward order and ``slots`` runs parallel to it. The owner stack of the
    class is ``[N, W, *shape]``; slots that no matrix takes are pads, zero for ever.
    """

    shape: tuple[int, ...]
    dtype: str
    num_devices: int
    num_waves: int
    matrices: tuple[Matrix, ...]
    slots: tuple[tuple[int, int], ...]

    @property
    def key(self) -> str:
        """Name of the class and of its stack: ``"256x1024:float32"``, ``"scalar:float32"``."""
        return class_key(self.shape, self.dtype)

    @property
    def m(self) -> int:
        """Rows of a class of matrices (order 2)."""
        return _pair(self.shape)[0]

    @property
    def n(self) -> int:
        """Columns of a class of matrices (order 2)."""
        return _pair(self.shape)[1]

    @property
    def size(self) -> int:
        """Elements of one matrix."""
        return math.prod(self.shape)

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """``(N, W, *shape)``."""
        return self.num_devices, self.num_waves, *self.shape

    @property
    def num_pads(self) -> int:
        """Slots that hold no matrix."""
        return self.num_devices * self.num_waves - len(self.matrices)


@dataclass(frozen=True)
class LeafPlan:
    """A leaf with its route; ``shard_dim`` is the dim of a rest or frozen leaf that is sharded.

    ``trainable`` is False for frozen leaves and for leaves that have no gradient (integers).
    """

    leaf: Leaf
    route: LeafRoute
    trainable: bool
    shard_dim: int | None = None


@dataclass(frozen=True)
class Plan:
    """Shapes in, layout out: who owns which matrix. Deterministic, hashable, free of jax.

    ``optimizer`` is a name in ``layout.costs.METHODS`` or a record of one's own.
    ``gather_dtype`` None means that parameters are gathered in their own dtype, ``reduce_dtype``
    None that gradients are summed in float32, those of float64 leaves in float64. ``replicas`` is
    the number of replicas of the owners; ``shared`` says whether they share the waves of a stack.
    ``dealing`` ``"slots"``: every device updates all waves; ``"lpt"``: a device updates those waves
    in which it has a matrix (see `layout.balance`).
    """

    num_devices: int
    optimizer: "str | Method"
    ns_steps: int
    leaves: tuple[LeafPlan, ...]
    classes: tuple[ShapeClass, ...]
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    replicas: int = 1
    shared: bool = False
    dealing: Dealing = "slots"

    def wire_dtypes(self, dtype: str) -> tuple[str, str]:
        """In what a leaf of ``dtype`` is gathered and its gradient summed.

        Only real floating leaves are cast.
        """
        if not dtype.startswith(("float", "bfloat")):
            return dtype, dtype
        default = "float64" if dtype == "float64" else "float32"
        return self.gather_dtype or dtype, self.reduce_dtype or default


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    """Both sides of a matrix; an error for any other order."""
    rows, cols = shape
    return rows, cols


def class_key(shape: tuple[int, ...], dtype: str) -> str:
    """Name of the class of a stored shape: ``"256x1024:float32"``, ``"scalar:float32"``."""
    return f"{'x'.join(map(str, shape)) or 'scalar'}:{dtype}"


def is_inexact(dtype: str) -> bool:
    """Whether a dtype name is a float or complex type, that is, whether a leaf has a gradient."""
    return dtype.startswith(("float", "bfloat", "complex"))


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype name (``"bfloat16"`` -> 2, ``"float8_e4m3fn"`` -> 1)."""
    if dtype == "bool":
        return 1
    bits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 4
