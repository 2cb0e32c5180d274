"""A ``torch.optim.Optimizer`` whose parameter groups are stepped by compiled JAX functions."""

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import torch

F = TypeVar("F", bound=Callable[..., Any])


def _x64(function: F) -> F:
    """64-bit dtypes in JAX while ``function`` runs: torch has them whatever JAX's flag says."""

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return cast(F, scoped)


class Group(ABC):
    """What belongs to one parameter group: blocks, state, compiled step."""

    @abstractmethod
    def step(self, options: dict[str, Any]) -> None:
        """One update of all parameters of the group, in place."""

    @abstractmethod
    def entries(self, options: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Parameter -> its part of the state dict."""

    @abstractmethod
    def load(self, entries: dict[int, dict[str, Any]], options: dict[str, Any]) -> None:
        """The inverse of ``entries``."""

    @abstractmethod
    def marks(self) -> dict[str, torch.Tensor]:
        """Tensors of the group that the state of each of its parameters has."""

    @property
    def shown(self) -> dict[str, torch.Tensor]:
        """What ``optimizer.state[p]`` shows between steps; ``state_dict()`` has the whole state."""
        marks = self.marks()
        return {name: marks[name] for name in marks.keys() & {"step", "train_mode"}}


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
    def _agree(self, groups: list[dict[str, Any]]) -> None:
        """Make sure that all processes have the same new groups."""

    @abstractmethod
    def _make_group(self, options: dict[str, Any]) -> Group:
        """The group's blocks, state and step."""

    @_x64
    def _build(self, groups: list[dict[str, Any]]) -> None:
        for options in groups:
            _check_params(options["params"])
            self._check(options)
        self._agree(groups)
        for options in groups:
            group = self._make_group(options)
            self._groups.append(group)
            for p in options["params"]:
                self.state[p] |= group.shown

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
        self._each(lambda group, options: group.step(options))
        return loss

    @_x64
    def _each(self, do: Callable[[Any, dict[str, Any]], None]) -> None:
        for group, options in zip(self._groups, self.param_groups, strict=True):
            do(group, options)

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
            optimizer._load(given)

        before = [dict(options) for options in self.param_groups], dict(self.state)
        try:
            with (
                _hook(self.register_load_state_dict_pre_hook, strip),
                _hook(self.register_load_state_dict_post_hook, load, prepend=True),
            ):
                super().load_state_dict(state_dict)
        except BaseException:
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
            for p in options["params"]:
                self.state[p] |= group.shown

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
