"""The checks of `scripts/gpu_check.sh`. Each module of an operation has one function, on which plan.py calls:

    checks(device) -> Iterator[KernelCheck]

A KernelCheck says what it costs and yields comparisons and timings, made by the functions of measure.py: the kernel
against float64 or bit for bit against the torch form on the CPU, and its milliseconds and bytes, to which the runner
adds GB/s and the share of a plain copy's. Shapes are those of real models on a GPU and tiny ones on a CPU, where
Triton's interpreter runs the kernels. What is made for a check is made when it runs, so a plan costs nothing.

`runner.py` starts the processes, `compiling.py` those that compile first, and `report.py` keeps the files.
"""

# The parts of the first stage only ask whether results are right, so they run side by side; what is timed runs alone.
STAGES = (("kernels", "exact", "train"), ("bench",), ("timings",))
EXTRA = ("tiles",)  # parts that run only where they are named
PARTS = tuple(part for stage in STAGES for part in stage)
ENDS = (0.45, 0.8, 1.0)  # of each stage, as a share of all seconds; what a stage does not use is left to the next
