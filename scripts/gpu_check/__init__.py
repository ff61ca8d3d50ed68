"""The checks of `scripts/gpu_check.sh`. Each module of an operation has two functions, built from those in measure.py:

    correctness(device) -> list[dict]     the kernel against float64, or bit for bit against the torch form on the CPU
    timings(device) -> list[dict]         milliseconds and bytes; the runner adds GB/s and the share of a plain copy's

Shapes are those of real models on a GPU and tiny ones on a CPU, where Triton's interpreter runs the kernels.
"""
