"""The members of a training state that a backend uses: parameters and optimizer state."""

from typing import Any, Protocol, TypeVar


class HasParams(Protocol):
    """A pytree of arrays, or of their shapes, such as `gpt2.training.state.TrainState`."""

    params: Any
    opt_state: Any

    def replace(self, **members: Any) -> Any:
        """Returns the state with other members."""
        ...


State = TypeVar("State", bound=HasParams)
