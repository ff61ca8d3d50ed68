"""Reference implementations in plain, slow float64 torch, against which kernels are tested."""
