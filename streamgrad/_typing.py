"""Array types for annotations: jaxtyping's where it is installed, plain names where it is not.

Shapes stand in the annotations for the reader, and are checked at run time only under pytest. The core must import
with jax, numpy and optax alone, so that jaxtyping stays a tool of development.
"""

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, PyTree
else:
    try:
        from jaxtyping import Array, Bool, Float, Int, PyTree
    except ModuleNotFoundError:
        Array = jax.Array

        class _Shaped:
            """Stands for jaxtyping's `Float[Array, "T N"]`: an annotation that nothing checks."""

            def __class_getitem__(cls, item: Any) -> type:
                return jax.Array

        Bool = Float = Int = _Shaped
        PyTree = Any

__all__ = ["Array", "Bool", "Float", "Int", "PyTree"]
