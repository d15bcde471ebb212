"""Triton's interpreter, more like a GPU: quicker, with any numpy, and adding products in an order that company does not
change."""

from typing import Any

import numpy as np


def improve() -> None:
    """Call it before kernels run."""
    import triton.language as tl
    from triton.runtime import interpreter

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        """Triton replaces all functions of its language before each call of a function inside a kernel, which takes
        longer than most of these take: here it does where they have not been replaced yet."""
        known = function.fn.__globals__.values()
        if any(language in known and tl.core.is_builtin(language.load) for language in (tl, tl.core)):
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **named)

    def dot(builder: Any, a: Any, b: Any, sums: Any, *options: object) -> Any:
        """An element's products one after the other, as the units of a GPU are assumed to add them. numpy's own product
        leaves the order to a library, which has another one for each processor and each shape."""
        assert min(*a.data.shape, *b.data.shape) > 1, "numpy would add along the only row otherwise"
        products = np.einsum("ik,kj->ij", a.data, b.data, dtype=sums.data.dtype)
        return interpreter.TensorHandle(products + sums.data, sums.dtype.scalar)

    plain = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes an index from an array in a way that numpy 2.4 refuses, and numpy 2.3 warns of."""
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpretedFunction.__call__ = call
    interpreter.InterpreterBuilder.create_dot = dot
