"""The operations that an uploaded loss may use, by name.

They are pure functions of tensors: no randomness, no files, no values leaving torch, no writes into arguments. The
memory of each is known from the shapes of inputs and output, so there is no einsum and no operation whose output size
depends on the values of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPERATORS = _names(
    """
    abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg not_ or_ pos pow sub truediv xor
    """
)
MATHS = _names(
    """
    acos asin atan atan2 ceil cos cosh degrees exp expm1 fabs floor fmod hypot isfinite isinf isnan log log10
    log1p log2 pow radians sin sinh sqrt tan tanh trunc
    """
)
# Both functions of torch and methods of Tensor.
_BOTH = _names(
    """
    abs absolute acos acosh add all amax amin any arctan argmax argmin argsort asin asinh atan atan2 atanh
    bitwise_and bitwise_not bitwise_or bitwise_xor bmm ceil chunk clamp clamp_max clamp_min clip clone copysign
    cos cosh count_nonzero cummax cummin cumprod cumsum deg2rad detach diag diagonal digamma div divide dot eq
    erf erfc exp exp2 expm1 fix flatten flip floor floor_divide fmax fmin fmod frac gather ge greater
    greater_equal gt heaviside hypot index_select inner isclose isfinite isinf isnan ldexp le lerp less
    less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not
    logical_or logical_xor logit logsumexp lt masked_fill masked_select matmul max maximum mean median min
    minimum mm movedim mul multiply mv nan_to_num nanmean nansum narrow ne neg negative norm not_equal numel
    outer permute positive pow prod reciprocal relu remainder reshape roll round rsqrt select sgn sigmoid sign
    sin sinc sinh softmax sort split sqrt square squeeze std sub subtract sum swapaxes t take_along_dim tan tanh
    tile topk transpose tril triu true_divide trunc unbind unflatten unsqueeze var where xlogy
    """
)
METHODS = _BOTH | _names(
    """
    bool contiguous dim double element_size expand expand_as float half int long ndimension nelement new_full
    new_ones new_zeros repeat reshape_as size to type_as view view_as is_floating_point
    """
)
TORCH = _BOTH | _names(
    """
    arange broadcast_to cat concat eye full full_like hstack linspace meshgrid ones ones_like std_mean stack
    tril_indices triu_indices var_mean vstack zeros zeros_like
    """
)
FUNCTIONAL = _names(
    """
    binary_cross_entropy binary_cross_entropy_with_logits celu elu gelu hardtanh huber_loss kl_div l1_loss
    leaky_relu log_softmax logsigmoid mse_loss normalize pad relu relu6 selu silu smooth_l1_loss softmax softmin
    softplus softsign tanh tanhshrink
    """
)
SPECIAL = _names("entr erf erfc expit expm1 log1p log_softmax logit logsumexp softmax xlog1py xlogy")
ATTRIBUTES = frozenset(("shape", "dtype", "device", "ndim", "T", "mT", "values", "indices"))
DTYPES = _names("bool float16 bfloat16 float32 float64 int8 uint8 int16 int32 int64")

MODULES: Mapping[str, frozenset[str]] = {
    "operator": OPERATORS,
    "math": MATHS,
    "torch": TORCH,
    "torch.nn.functional": FUNCTIONAL,
    "torch.special": SPECIAL,
}

FORBIDDEN = frozenset(("out", "generator", "pin_memory", "requires_grad", "layout", "memory_format", "names"))
"""Keyword arguments that no operation may have."""
