"""A ``torch.optim.Optimizer`` whose parameter groups are stepped by compiled JAX functions."""

import enum
import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from matrixfsdp_jax.torch_compat.blocks import Block
from matrixfsdp_jax.torch_compat.engine import Engine

F = TypeVar("F", bound=Callable[..., Any])


def _x64(function: F) -> F:
    """JAX with 64-bit dtypes, as torch has them, and with no mesh, while ``function`` runs."""

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True), jax.set_mesh(Mesh(np.empty((), object), ())):
            return function(*args, **kwargs)

    return cast(F, scoped)


class Pending(NamedTuple):
    """updates: what is added to every block that has a gradient. into: these blocks of the
    parameters, under DDP those of other ranks too. error: what the step raises, if anything.
    """

    updates: dict[Block, torch.Tensor]
    into: dict[Block, torch.Tensor]
    error: Exception | None = None


class Group(ABC):
    """What belongs to one parameter group: blocks, state, compiled step."""

    engine: Engine

    @abstractmethod
    def prepare(self, options: dict[str, Any]) -> None:
        """Refuse a step before anything has changed, or take over changed options."""

    @abstractmethod
    def compute(self, options: dict[str, Any]) -> Pending:
        """The next step of the state, and what it adds to the parameters."""

    @abstractmethod
    def apply(self, pending: Pending, error: Exception | None) -> None:
        """Move the parameters, in place; raises ``error``, that of any group, before."""

    @abstractmethod
    def entries(self, options: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Parameter -> its part of the state dict."""

    @abstractmethod
    def load(self, entries: dict[int, dict[str, Any]], options: dict[str, Any]) -> None:
        """The inverse of ``entries``."""

    @abstractmethod
    def marks(self) -> dict[str, torch.Tensor]:
        """Tensors of the group that the state of each of its parameters has."""

    @abstractmethod
    def names(self) -> dict[int, list[str]]:
        """Parameter -> the names of its entries in the state dict, besides the marks."""

    def snapshot(self) -> Callable[[], None]:
        """What brings the state of now back after ``load``; of no use after a step."""
        own, state = dict(vars(self)), self.engine.state
        marks = {name: x.clone() for name, x in self.marks().items()}

        def restore() -> None:
            self.__dict__ |= own
            self.engine.state = state
            for name, x in self.marks().items():
                x.copy_(marks[name])

        return restore


class JaxOptimizer(torch.optim.Optimizer, ABC):
    """Groups, state dicts, closures and hooks; subclasses say what a group is.

    What a subclass sets before it calls ``__init__`` belongs to its copies too.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._own = dict(self.__dict__)
        self._groups: list[Group] = []
        self._built = False
        super().__init__(params, defaults)
        self._build(self.param_groups)
        self._built = True

    @abstractmethod
    def _check(self, options: dict[str, Any]) -> None:
        """Complete and check the options of a parameter group, before any state is made."""

    @abstractmethod
    def _agree(self, groups: list[dict[str, Any]], error: Exception | None) -> None:
        """Make sure that all processes have the same new groups; ``error`` is that of this one."""

    def _keep_live(self, options: dict[str, Any], old: dict[str, Any]) -> None:
        """Put back options that do not come from a loaded state dict."""
        del options, old

    @abstractmethod
    def _make_group(self, options: dict[str, Any]) -> Group:
        """The group's blocks, state and step."""

    @_x64
    def _build(self, groups: list[dict[str, Any]]) -> None:
        error: Exception | None = None
        try:
            for options in groups:
                _check_params(options["params"])
                self._check(options)
        except Exception as own:
            error = own
        self._agree(groups, error)  # the others would wait for this process
        if error is not None:
            raise error
        for options in groups:
            group = self._make_group(options)
            self._groups.append(group)
            self._show(group, options)

    def _show(self, group: Group, options: dict[str, Any]) -> None:
        """Counts, and the names of all entries, in ``self.state``; see ``state_dict()``."""
        names = group.names()
        for i, p in enumerate(options["params"]):
            self.state[p] |= {key: {} for key in names.get(i, ())} | group.marks()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; under DDP to be called on all ranks."""
        super().add_param_group(param_group)
        if self._built:
            try:
                self._build(self.param_groups[-1:])
            except BaseException:
                self.param_groups.pop()
                raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all groups; the loss if there is a closure, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for options in self.param_groups:
            _check_gradients(options["params"])
        self._each(lambda group, options: group.prepare(options))
        pending = self._each(lambda group, options: group.compute(options))
        error = next((own.error for own in pending if own.error is not None), None)
        own = iter(pending)
        self._each(lambda group, options: group.apply(next(own), error))
        return loss

    @_x64
    def _each(self, do: Callable[[Any, dict[str, Any]], Any]) -> list[Any]:
        groups = zip(self._groups, self.param_groups, strict=True)
        return [do(group, options) for group, options in groups]

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in the layout of the reference, in tensors of its own.

        Under DDP a rank has the blocks that it owns, and the step of every parameter.
        """
        with _hook(self.register_state_dict_post_hook, _add_entries, prepend=True):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of ``state_dict`` and its options.

        Raises: ValueError for a state of other blocks, shapes or options, or one that lacks blocks
          that this rank owns now; nothing has changed then.
        """
        given: dict[str, Any] = {}

        def strip(_: Any, final: dict[str, Any]) -> dict[str, Any]:
            # The base class would cast all state to the dtype of the parameters.
            given.update(final)
            return {**final, "state": {}}

        def load(optimizer: JaxOptimizer) -> None:
            for options, old in zip(optimizer.param_groups, before[0], strict=True):
                _keep_own(options, old)
                optimizer._keep_live(options, old)
            optimizer._load(given)

        before = [dict(options) for options in self.param_groups], dict(self.state)
        snapshots = [group.snapshot() for group in self._groups]
        try:
            with (
                _hook(self.register_load_state_dict_pre_hook, strip),
                _hook(self.register_load_state_dict_post_hook, load, prepend=True),
            ):
                super().load_state_dict(state_dict)
        except BaseException:
            for restore in snapshots:
                restore()
            groups, state = before
            for options, old in zip(self.param_groups, groups, strict=True):
                options.clear()
                options |= old
            self.state.clear()
            self.state |= state
            raise

    @_x64
    def _load(self, given: dict[str, Any]) -> None:
        for options in self.param_groups:
            self._check(options)
        for group, options, saved in zip(
            self._groups, self.param_groups, given["param_groups"], strict=True
        ):
            numbers = dict(enumerate(saved["params"]))
            found = {i: given["state"].get(n, {}) for i, n in numbers.items()}
            group.load(found, options)
            self._show(group, options)

    def __getstate__(self) -> dict[str, Any]:
        own = super().__getstate__()
        own["state"] = defaultdict(dict)
        own["saved"] = self._own, self.state_dict()
        return own

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved", None)
        super().__setstate__(state)
        if saved is None:  # from load_state_dict: only options
            return
        self._own, state_dict = saved
        self.__dict__.update(self._own)
        self._groups, self._built = [], True
        self._build(self.param_groups)
        self.load_state_dict(state_dict)
        for group, packed in zip(self._groups, state_dict["param_groups"], strict=True):
            entry = state_dict["state"][packed["params"][0]]
            for name, mark in group.marks().items():  # the train or eval mode among them
                mark.copy_(entry[name])


class _hook:
    """A hook for the time of a ``with`` statement."""

    def __init__(self, register: Callable[..., Any], hook: Callable[..., Any], **options: Any):
        self._handle = register(hook, **options)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()


@_x64
def _add_entries(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(optimizer, JaxOptimizer)
    state = {}
    for group, options, packed in zip(
        optimizer._groups, optimizer.param_groups, state_dict["param_groups"], strict=True
    ):
        marks = {name: x.clone() for name, x in group.marks().items()}
        for i, entry in group.entries(options).items():
            state[packed["params"][i]] = {**entry, **marks}
    return {**state_dict, "state": state}


def _keep_own(options: dict[str, Any], old: dict[str, Any]) -> None:
    """Keep our configurations where the loaded ones are of other classes of the same names.

    So are those of a state dict that the reference saved.
    """
    for name, value in options.items():
        kind, own = type(value), type(old.get(name))
        if kind is own or not (is_dataclass(kind) or issubclass(kind, enum.Enum)):
            continue
        if kind.__name__ == own.__name__:
            options[name] = old[name]
        elif kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
            raise ValueError(
                f"{name} is a {kind.__module__}.{kind.__name__} in the state dict and a "
                f"{own.__name__} here; build the optimizer with the options it was saved with"
            )


def _check_params(params: list[torch.Tensor]) -> None:
    if not params:
        raise ValueError("a parameter group has no parameters")
    for p in params:
        if p.is_complex():
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is complex ({p.dtype}); give real ones, or "
                "torch.view_as_real of it"
            )
        if p.is_sparse or p.layout is not torch.strided:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} has layout {p.layout}; give dense ones"
            )
        if not p.is_floating_point():
            raise ValueError(f"a parameter of shape {tuple(p.shape)} has dtype {p.dtype}")


def _check_gradients(params: list[torch.Tensor]) -> None:
    for p in params:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is sparse; use dense "
                "gradients (nn.Embedding(..., sparse=False)), or another optimizer for it"
            )
