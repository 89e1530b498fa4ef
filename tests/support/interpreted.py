"""Makes Triton's interpreter faster. Import this module before kernels run.

- A launch replaces functions of triton.language by versions for a CPU, and restores them at its end. Triton 3.7 repeats this for every call
  of one kernel by another within the launch, although everything is already replaced.
- The interpreter makes the table of numpy's dtypes again for every value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter

_dtype_of: Callable[[Any], Any] = interpreter._get_np_dtype
_dtypes: dict[str, Any] = {}


def _known_dtype(dtype: Any) -> Any:
    """Return the numpy dtype of a Triton type, looked up by the type's name."""
    if dtype.name not in _dtypes:
        _dtypes[dtype.name] = _dtype_of(dtype)
    return _dtypes[dtype.name]


class _Launch:
    """The functions replaced since the launch began. Its `restore` is called when the launch ends."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.replace = replace
        self.scopes: list[Any] = []
        self.modules: set[str] = set()

    def __call__(self, function: Any) -> _Launch | _Inside:
        """Called when a kernel, or a kernel that it calls, begins. Replace functions of language modules, once in a launch."""
        seen = {m.__name__ for m in (language, language.core) if any(value is m for value in function.__globals__.values())}
        first = not self.scopes
        if not seen <= self.modules:
            self.scopes.append(self.replace(function))
            self.modules |= seen
        return self if first else _Inside()

    def restore(self) -> None:
        while self.scopes:
            self.scopes.pop().restore()
        self.modules = set()


class _Inside:
    def restore(self) -> None: ...


if not isinstance(interpreter._patch_lang, _Launch):
    interpreter._get_np_dtype = _known_dtype
    interpreter._patch_lang = _Launch(interpreter._patch_lang)
