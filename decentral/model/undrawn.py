"""Build layers without sampling their weights."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.overrides import BaseTorchFunctionMode


class Undrawn(BaseTorchFunctionMode):
    """A context in which layers are built without sampling their weights, which stay uninitialised.

    This saves most of the time of building a large model whose weights are replaced later.
    """

    DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.trunc_normal_)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the function, unless it is an initialiser that samples weights: then return its tensor unchanged."""
        if func in self.DRAWS and kwargs:
            return kwargs["tensor"]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
