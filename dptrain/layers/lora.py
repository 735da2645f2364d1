"""LoRA: a matrix stays as it is, and the product of two narrow ones that is added to it is trained.

Source: E. Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022; `enable_lora` in
keras/src/layers/core/dense.py, Keras 3.15.
"""

import math
from numbers import Real
from typing import Any

from dptrain import initializers, ops
from dptrain.errors import ConfigError
from dptrain.initializers import Zeros
from dptrain.layers.arguments import positive
from dptrain.layers.base import InitializerArgument, Layer
from dptrain.layers.kernel import KernelLayer
from dptrain.layers.low_rank import LowRank, sum_of
from dptrain.layers.weight import Weight, allow_without_file, is_reading, wide
from dptrain.program.shapes import size
from dptrain.program.tensor import Tensor, Variable

# The factors are drawn where no weight of the layer's model is: this many positions after their matrix, and twice that.
_STEP = 1 << 20


class LoraLayer(Layer):
    """A layer with a matrix that LoRA can adapt.

    Attributes:
        lora_rank, lora_alpha: the rank of the product, and its factor times the rank; None without LoRA.
        lora_enabled: whether the matrix is frozen and the product is trained.
    """

    # The name of the matrix, which is an attribute with "_" before it.
    _matrix_name = "kernel"

    lora_rank: int | None
    lora_alpha: float | None
    lora_enabled: bool

    def _set_lora(self, rank: int | None, alpha: float | None) -> None:
        """Take the constructor's arguments."""
        self.lora_rank = positive("lora_rank", rank) if rank else None
        self.lora_alpha, self.lora_enabled = _alpha(alpha, self.lora_rank), False

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, those of LoRA if there is any."""
        lora = {"lora_rank": self.lora_rank, "lora_alpha": self.lora_alpha} if self.lora_rank else {}
        return super()._get_own_config() | lora

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: InitializerArgument = "he_uniform",
        b_initializer: InitializerArgument = "zeros",
    ) -> None:
        """Freeze the matrix, kernel or embeddings, and add `lora_alpha / rank * A @ B` to it, of which A and B train.

        A is the weight `lora_kernel_a`, or `lora_embeddings_a`, (..., rank), and B is `lora_kernel_b` (rank, columns),
        both float32, or float64 in a layer of that type. Files of weights and exported programs have the sum as the
        matrix.

        Args:
            rank: of the product, at least 1.
            lora_alpha: the rank by default.
            a_initializer, b_initializer: of the factors.

        Raises:
            ConfigError: the layer is not built, has LoRA already, or has a constraint or pruning of the matrix; or an
                argument is out of range.
        """
        self._require_no_constraint()
        if not self.built:
            raise ConfigError("Cannot enable lora on a layer that isn't yet built.")
        self._add_factors(rank, lora_alpha, a_initializer, b_initializer)

    def _build_lora(self) -> None:
        """Begin with LoRA, at the end of `build`, if the constructor was told so."""
        if self.lora_rank:
            self._require_no_constraint()
            self._add_factors(self.lora_rank, self.lora_alpha, "he_uniform", "zeros")

    def _require_no_constraint(self) -> None:
        name = self._matrix_name
        if getattr(self, f"{name}_constraint") is not None:
            singular = "embedding" if name == "embeddings" else name
            raise ConfigError(
                f"Lora is incompatible with {singular} constraints. In order to enable lora on this layer, remove the "
                f"`{name}_constraint` argument."
            )

    def _add_factors(
        self, rank: int, alpha: float | None, a_initializer: InitializerArgument, b_initializer: InitializerArgument
    ) -> None:
        if self.lora_enabled:
            raise ConfigError("lora is already enabled. This can only be done once per layer.")
        matrix, name = self._matrix, self._matrix_name
        if matrix.pruning is not None:
            raise ConfigError(
                f"LoRA is incompatible with pruning: the {name} of layer {self._display_name!r} would have no zeros "
                "with the product. Leave the layer out of pruning, or call `dptrain.pruning.strip_pruning` before"
            )
        self.lora_rank, self.lora_alpha = positive("rank", rank), _alpha(alpha, rank)
        starts_at_zero = isinstance(initializers.get(a_initializer), Zeros)
        a = self._add_factor(f"lora_{name}_a", (*matrix.shape[:-1], rank), a_initializer, 1, starts_at_zero)
        b = self._add_factor(f"lora_{name}_b", (rank, matrix.shape[-1]), b_initializer, 2, not starts_at_zero)
        matrix.low_rank = LowRank(a, b, self._scale_of_lora)
        matrix.trainable = False
        self._frozen = [weight for weight in self._frozen if weight is not matrix]  # which `trainable` must not free
        self.lora_enabled = True
        self._changes += 1

    def _add_factor(
        self, name: str, shape: tuple[int, ...], initializer: InitializerArgument, number: int, is_zeroed: bool
    ) -> Variable:
        matrix = self._matrix
        regularizer = getattr(self, f"{self._matrix_name}_regularizer")
        if (self.lora_rank or 0) <= min(size(matrix.shape[:-1]), matrix.shape[-1]):  # else a file may be hostile
            allow_without_file(size(shape))
        dtype = wide(self.variable_dtype).name  # in halves, small updates would be lost
        factor = self.add_weight(shape, initializer, dtype, regularizer=regularizer, name=name)
        assert isinstance(factor, Weight)
        setattr(self, name, factor)
        factor._path = f"{matrix._path.rpartition('/')[0]}/{name}".lstrip("/")
        factor.autocast, factor.is_wide = matrix.autocast, True
        factor.if_missing = "zero" if is_zeroed else "keep"  # one of them not 0, or neither would have a gradient
        factor.provisional = is_reading() or (isinstance(matrix, Weight) and matrix.provisional)
        if isinstance(matrix, Weight) and not factor.provisional:
            seed, position = matrix.drawn_with
            factor.initialize(seed, position + number * _STEP)
        return factor

    # For subclasses to call

    @property
    def _matrix(self) -> Variable:
        """The matrix as it is stored."""
        matrix: Variable = getattr(self, f"_{self._matrix_name}")
        return matrix

    @property
    def _base(self) -> Variable:
        """What the product is added to, or in an exported program the sum."""
        matrix = self._matrix
        total = sum_of(matrix)
        return matrix if total is None else total

    @property
    def _scale_of_lora(self) -> float:
        assert self.lora_alpha is not None
        assert self.lora_rank is not None
        return self.lora_alpha / self.lora_rank

    @property
    def _factors(self) -> tuple[Variable, Variable] | None:
        """A and B, if there is anything to add."""
        low_rank = getattr(self._matrix, "low_rank", None)
        return None if low_rank is None or sum_of(self._matrix) is not None else (low_rank.a, low_rank.b)

    def _adapted(self) -> Any:
        """Return the matrix that the layer computes with: its variable, or a tensor with LoRA."""
        if self._factors is None:
            return self._base
        a, b = self._factors
        product = ops.reshape(ops.matmul(ops.reshape(a, (-1, a.shape[-1])), b), self._base.shape)
        return ops.cast(self._base + self._scale_of_lora * product, self.compute_dtype)

    def _widened(self, narrow: Tensor, b: Variable) -> Tensor:
        """Return scale * narrow @ b for (..., rank) of the product's first factor: no sum of matrices is needed."""
        rank, columns = b.shape
        flat = narrow if narrow.ndim == 2 else ops.reshape(narrow, (-1, rank))
        product = ops.matmul(self._scale_of_lora * flat, ops.cast(b, narrow.dtype))
        return product if narrow.ndim == 2 else ops.reshape(product, (*narrow.shape[:-1], columns))


class LoraKernelLayer(LoraLayer, KernelLayer):
    """A `KernelLayer` whose kernel LoRA can adapt."""

    lora_kernel_a: Variable
    lora_kernel_b: Variable

    @property
    def kernel(self) -> Any:
        """The kernel that the layer computes with; a tensor with LoRA. AttributeError before the layer is built."""
        kernel = super().kernel
        return self._adapted() if self.lora_enabled else kernel

    @kernel.setter
    def kernel(self, value: Any) -> None:
        self._kernel = value


def _alpha(alpha: Any, rank: int | None) -> float | None:
    if alpha is None:
        return rank
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not math.isfinite(alpha):
        raise ConfigError(f"lora_alpha: expected a finite number. Received: lora_alpha={alpha!r}")
    return alpha  # type: ignore[return-value]
