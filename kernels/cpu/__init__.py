"""Kernels in C for the CPU, built on first use with the machine's own compiler."""
