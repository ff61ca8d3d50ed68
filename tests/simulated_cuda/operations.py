"""What torch's operations do on a CUDA device: which may take numbers of the host, and which make the host wait.

Names are those of ATen, an in-place form by its plain name: `add` is also `add_`. An operation that is in none of these
sets is an error: find out whether its CUDA form waits for the device, and add it.
"""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The result shares memory with the first operand; nothing is launched.
VIEWS = names(
    """
    _reshape_alias _unsafe_view alias as_strided detach diagonal expand permute select slice split split_with_sizes
    squeeze t transpose unbind unfold unsqueeze view view_as
    """
)

# They allocate memory and do not fill it.
UNFILLED = names("empty empty_like empty_strided new_empty new_empty_strided")

# Elementwise: an operand without dimensions may be on the host, for its value becomes an argument of the launch.
ELEMENTWISE = names(
    """
    __and__ __lshift__ __or__ __rshift__ __xor__ _to_copy add addcdiv addcmul binary_cross_entropy
    binary_cross_entropy_backward bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    clamp clone div eq exp fill floor_divide ge gelu gelu_backward gt le lerp log log_sigmoid_backward
    log_sigmoid_forward logical_and logical_not lt masked_fill maximum minimum mul ne neg pow reciprocal rsqrt rsub
    sigmoid sigmoid_backward silu silu_backward smooth_l1_loss smooth_l1_loss_backward sqrt sub where zero
    """
)

# All operands are on one device.
WHOLE = (
    VIEWS
    | UNFILLED
    | names(
        """
    _log_softmax _log_softmax_backward_data _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _softmax _softmax_backward_data addmm all amax amin any argmax
    baddbmm bmm cat constant_pad_nd cumsum embedding embedding_dense_backward full_like gather index_add index_copy
    index_fill index_select linalg_vector_norm logsumexp max mean mm new_full new_ones new_zeros
    nll_loss_backward nll_loss_forward ones_like scatter scatter_add searchsorted
    select_backward slice_backward sort stack sum topk zeros_like
    """
    )
)

# The size or the value of the result is known only to the device.
READS = names("_local_scalar_dense equal is_nonzero masked_select nonzero repeat_interleave")

# Their operands are checked one by one (tensor.py).
INDEXING = names("index index_put _index_put_impl _unsafe_index")

# torch.<name>(device=...), or a method of a tensor: they allocate on the device and need nothing of the host.
FACTORIES = UNFILLED | names(
    "arange eye full full_like linspace new_full new_ones new_zeros ones ones_like zeros zeros_like"
)
RANDOM = names("rand randint randn randperm")  # from the device's own generator
UPLOADING_FACTORIES = names("as_tensor asarray new_tensor tensor")

# Functions of a host tensor that neither read nor write its memory, and those that write it.
HOST_VIEWS = names(
    """
    __get__ __hash__ __len__ data_ptr dim element_size expand flatten is_contiguous narrow new_zeros numel permute
    reshape size squeeze stride t transpose unbind unsqueeze untyped_storage view
    """
)
HOST_WRITES = names("__setitem__ copy_ fill_ zero_")
