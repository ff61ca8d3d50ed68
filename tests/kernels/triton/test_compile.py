"""The kernels compiled for sm_90, without a GPU: spills, shared memory, tensor cores, asynchronous copies.

By the Triton that this environment's torch brings, and by the oldest that pyproject.toml allows, which comes with the
torch of some GPU machines, or by those that HEADWAY_TRITONS names.
"""

from __future__ import annotations

import pytest

from tests.kernels.triton.compiled import HOPPER, TRITONS, compile_in_new_process, cyclic_products, most_spilled

# Kernels that add floating-point numbers by a reduction, and why the order of their sums shows in no token. Products
# are summed by tensor cores, one step of 16 after the other (test below), and counts, weights and maxima as integers
# or by comparison.
FLOAT_SUMS = {
    **dict.fromkeys(
        (
            *("rms_norm_kernel", "layer_norm_kernel", "norm_beside_kernel"),
            *("embed_norm_gelu_kernel", "rotate_and_write_kernel"),
        ),
        "one program per row, whose layout follows from dtype and size",
    ),
    **dict.fromkeys(("best_of_block", "best_of_row"), "the mass, for log-probabilities of drafts and for display"),
    "walk_kernel": "one program per node; it decides what is drafted, not what is accepted",
    "scan_kernel": "one program per head and block of columns, whose layout follows from the sizes",
    "exit_kernel": "one program for all chains; it decides what is drafted, not what is accepted",
    "grow_kernel": "of one number and zeros: the log-probability of a candidate at a given place",
    **dict.fromkeys(("verify_block", "entropy_of_row"), "fp64, for the rules that are not exact"),
    **dict.fromkeys(("range_forward", "range_query_gradient"), "training"),
}
VARYING = {  # integers that differ from step to step: a value of another kind must not compile a kernel while serving
    *("rows", "count", "width", "num_states", "pages", "first", "window"),
    *("M", "T", "E", "uses", "depth"),
}
# Cases that differ in what requests ask for: one kernel serves both.
ALIKE = {"shape, a mask alone": "shape", "log-probabilities, other counts": "log-probabilities"}
# Kernels that may start before the kernel ahead of them has ended, those of a layer, and what they touch before it has:
# weights, which are constant, and what a step computes before its layers. Into L2 anything may be fetched.
AHEAD = {
    "rms_norm_kernel": {"ld weight"},
    "norm_beside_kernel": {"ld x_weight y_weight"},
    "linear_kernel": {"prefetch weight"},
    "ggml_linear_kernel": {"prefetch words"},
    "add_parts_kernel": set(),
    "residual_silu_kernel": set(),
    "rotate_and_write_kernel": {"ld cos", "ld sin", "ld slot", "ld q_weight", "ld k_weight", "ld k_weight q_weight"},
    "attend": {"ld blocks", "ld committed", "ld ends", "ld request", "ld table", "prefetch cache"},
    "branch": {"ld committed", "ld ends"},
    "combine": {"ld committed", "ld ends"},
    "convolve_kernel": set(),
    "keep_kernel": set(),
    "scan_kernel": set(),
}
SOURCES = ("kernels", "tests/kernels/triton/compiled.py", "tests/kernels/triton/launches.py", "pyproject.toml")
pytestmark = pytest.mark.sources(*SOURCES)
PRODUCTS = ("attend", "branch", "linear_kernel", "ggml_linear_kernel", "residual_silu_kernel")
EXACT = ("best_of_block", "count_digits", "read_threshold", "shape_kernel", "verify_block", "entropy_of_row")


@pytest.fixture(scope="module", params=TRITONS)
def compiled(request):
    return compile_in_new_process("tests.kernels.triton.launches", triton=request.param)


def test_nothing_spills_and_shared_memory_suffices(compiled, request):
    most = most_spilled(request.node.callspec.params["compiled"])
    kernels = [(case, kernel) for case, launched in compiled.items() for kernel in launched]
    assert {kernel["kernel"] for _, kernel in kernels} == {
        *("attend", "branch", "combine", "linear_kernel", "rotate_and_write_kernel", "write_kernel", "move_kernel"),
        *("ggml_linear_kernel", "add_parts_kernel", "block_rows_kernel"),
        *("rms_norm_kernel", "norm_beside_kernel", "embed_norm_gelu_kernel", "gate_mul_kernel"),
        *("layer_norm_kernel", "gelu_kernel"),
        *(
            "best_of_block",
            "best_of_row",
            "peak_of_block",
            "count_digits",
            "read_threshold",
            "count_above",
            "last_accepted",
        ),
        *("plan_rows", "plan_tails", "advance_kernel", "grow_kernel", "best_kernel", "exit_kernel"),
        *("shape_kernel", "gather_kernel", "residual_silu_kernel", "walk_kernel", "two_taps_kernel"),
        *("convolve_kernel", "keep_kernel", "scan_kernel"),
        *("verify_block", "entropy_of_row"),
        *("range_forward", "range_query_gradient", "key_gradient"),
    }
    assert [(case, k["kernel"], k["spilled"]) for case, k in kernels if k["spilled"] > most] == []
    assert [(case, k["kernel"], k["shared"]) for case, k in kernels if k["shared"] > HOPPER.shared_memory] == []


def test_products_run_on_one_kind_of_tensor_core_with_copies_under_way(compiled):
    """A row has the same bits alone and in a prompt only if the same instructions sum its products."""
    for case, launched in compiled.items():
        for kernel in launched:
            if kernel["kernel"] in PRODUCTS and "fp32" not in case:
                few_lines = "latents" in case and kernel["kernel"] in ("attend", "branch")  # too few for wgmma
                assert kernel["wgmma"] != few_lines, case
                assert kernel["mma.sync"] == few_lines, case
                assert kernel["cp.async"] or "odd" in case, case


def test_what_must_round_as_on_a_cpu_is_not_fused(compiled):
    """Kernels that compute noise or compare with thresholds contain no fused multiply-add."""
    rounded = [kernel for launched in compiled.values() for kernel in launched if kernel["kernel"] in EXACT]
    assert len(rounded) >= 6
    assert not any(kernel["fma.rn"] for kernel in rounded)


def test_no_sum_depends_on_what_else_is_in_the_batch(compiled):
    """Sums of floating-point numbers have one order for a row, whatever rows and strides a kernel is compiled for."""
    adding = {kernel["kernel"] for launched in compiled.values() for kernel in launched if kernel["float_sums"]}
    assert adding == set(FLOAT_SUMS)
    for several, one in (
        ("norms", "norms, 1 row"),
        ("rotary and QK norm", "rotary and QK norm, 1 row"),
        ("entropies", "entropies, 1 row"),
    ):
        sums = [[(kernel["kernel"], kernel["float_sums"]) for kernel in compiled[case]] for case in (several, one)]
        assert sums[0] == sums[1]
        assert all(layouts for _, layouts in sums[0])
    chains = [kernel["float_sums"] for kernel in compiled["block verification"]]
    assert chains[0] == chains[1]


def test_prompts_steps_and_trees_of_a_recurrence_run_one_kernel(compiled):
    """With a state or without: all have its layouts, hence its sums."""
    kinds = [compiled[f"recurrence {case}"][-1] for case in ("of chains", "of trees", "from zeros")]
    assert kinds[0]["kernel"] == "scan_kernel"
    assert kinds[1:] == kinds[:1] * 2


def test_what_starts_ahead_touches_nothing_that_the_kernel_ahead_writes(compiled):
    """With programmatic dependent launch: addresses and weights ahead of the wait, all else behind it."""
    kernels = [kernel for launched in compiled.values() for kernel in launched]
    touched = {kernel["kernel"]: set() for kernel in kernels if kernel["early"] is not None}
    for kernel in kernels:
        launched_ahead = bool(kernel["options"].get("launch_pdl"))
        assert launched_ahead == (kernel["early"] is not None) == bool(kernel["options"].get("PDL"))
        if launched_ahead:
            touched[kernel["kernel"]] |= {" ".join(access) for access in kernel["early"]}
    assert touched == AHEAD


def test_no_kernel_is_compiled_for_what_a_request_asks(compiled):
    for case, other in ALIKE.items():
        assert [kernel for kernel in compiled[case] if kernel not in compiled[other]] == []


def test_no_accumulator_of_a_loop_goes_through_two_products(compiled):
    """Products of a group of weights share an accumulator, but that of each group begins at zero."""
    kernels = [kernel for launched in compiled.values() for kernel in launched]
    assert [(kernel["kernel"], kernel["cyclic"]) for kernel in kernels if kernel["cyclic"]] == []


def test_a_loops_accumulator_that_goes_through_two_products_is_found():
    loop = """
    %acc_3 = scf.for %i = %c0 to %K step %c1 iter_args(%total = %zero, %w = %words) -> (f32)  : i32 {
      %first = tt.dot %a, %b, %total, inputPrecision = ieee : x
      %second = tt.dot %c, %d, %first, inputPrecision = ieee : x"""
    assert cyclic_products(loop) == ["%first"]
    assert cyclic_products(loop.replace("%b, %total", "%b, %zero")) == []


def test_integers_that_vary_are_not_specialized(compiled):
    kernels = [kernel for launched in compiled.values() for kernel in launched]
    assert [(k["kernel"], k["specialized"]) for k in kernels if VARYING & set(k["specialized"])] == []
    linear = next(kernel for kernel in kernels if kernel["kernel"] == "linear_kernel")
    strides = ["x_stride", "residual_stride"]  # whether rows are aligned decides how they are copied
    assert linear["specialized"] == [*strides, "K", "N"]
