"""What torch's operations do on a CUDA device: which may take numbers of the host, and which make the host wait.

Names are those of ATen, an in-place form by its plain name: `add` is also `add_`. An operation that is in none of these
sets is an error: find out whether its CUDA form waits for the device, and add it.
"""

from __future__ import annotations

# The result shares memory with the first operand; nothing is launched.
VIEWS = frozenset(
    "alias as_strided detach diagonal expand permute select slice split split_with_sizes squeeze t transpose unbind"
    " unfold unsqueeze view view_as _reshape_alias _unsafe_view".split()
)

# They allocate memory and do not fill it.
UNFILLED = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())

# Elementwise: an operand without dimensions may be on the host, for its value becomes an argument of the launch.
ELEMENTWISE = frozenset(
    "__and__ __lshift__ __or__ __rshift__ __xor__ add bitwise_and bitwise_left_shift bitwise_not bitwise_or"
    " bitwise_right_shift clamp clone div eq exp fill ge gt le log logical_and logical_not lt masked_fill maximum minimum"
    " mul ne neg pow rsub sigmoid silu sub where zero _to_copy".split()
)

# All operands are on one device.
WHOLE = VIEWS | UNFILLED | frozenset("embedding stack floor_divide _softmax any max constant_pad_nd index_select index_copy sort baddbmm ones_like mm _scaled_dot_product_flash_attention_for_cpu full_like logsumexp argmax mean rsqrt reciprocal cat cumsum gather index_add new_full new_ones new_zeros zeros_like sum".split())

# The size or the value of the result is known only to the device.
READS = frozenset("_local_scalar_dense equal is_nonzero masked_select nonzero repeat_interleave".split())

# Their operands are checked one by one (tensor.py).
INDEXING = frozenset("index index_put _index_put_impl _unsafe_index".split())

# torch.<name>(device=...), or a method of a tensor: they allocate on the device and need nothing of the host.
FACTORIES = UNFILLED | frozenset(
    "arange eye full full_like linspace new_full new_ones new_zeros ones ones_like zeros zeros_like".split()
)
RANDOM = frozenset("rand randint randn randperm".split())  # from the device's own generator
UPLOADING_FACTORIES = frozenset("as_tensor asarray new_tensor tensor".split())

# Functions of a host tensor that neither read nor write its memory, and those that write it.
HOST_VIEWS = frozenset(
    "__get__ __len__ __hash__ data_ptr dim element_size expand flatten is_contiguous narrow new_zeros numel permute"
    " reshape size squeeze stride t transpose unbind unsqueeze untyped_storage view".split()
)
HOST_WRITES = frozenset("__setitem__ copy_ fill_ zero_".split())
