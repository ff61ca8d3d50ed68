"""Allocation in huge pages: tensors in one chunk do not overlap, and live as long as they are referenced."""

from __future__ import annotations

import gc
import threading

import torch

from kernels.cpu.memory import ALIGNED, CHUNK, PAGE, Memory, zeros


def test_tensors_lie_beside_each_other_and_not_on_each_other():
    memory, generator = Memory(), torch.Generator().manual_seed(0)
    tensors = []
    for index in range(300):
        shape = torch.randint(0, 300, (2,), generator=generator).tolist()
        dtype = (torch.float32, torch.bfloat16, torch.int32, torch.uint8)[index % 4]
        tensor = memory.zeros(shape, dtype)
        assert tensor.shape == tuple(shape)
        assert tensor.dtype == dtype
        assert not tensor.any()
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNED == 0
        tensor.fill_(index % 100 + 1)
        tensors.append(tensor)
    assert all(bool((tensor == index % 100 + 1).all()) for index, tensor in enumerate(tensors))


def test_what_does_not_fit_begins_another_chunk_and_what_is_large_has_one_of_its_own():
    memory = Memory()
    first, large, second = (memory.zeros([size], torch.uint8) for size in (CHUNK // 3, CHUNK, CHUNK // 3))
    assert large.data_ptr() % PAGE == first.data_ptr() % PAGE == 0
    assert second.data_ptr() == first.data_ptr() + -(-len(first) // ALIGNED) * ALIGNED
    third = memory.zeros([CHUNK // 2], torch.uint8)
    assert third.data_ptr() % PAGE == 0
    for tensor in (first, large, second, third):
        tensor[-1] = 1


def test_a_tensor_outlives_the_chunk_it_was_cut_from():
    tensor = Memory().zeros([1000], torch.int32).fill_(7)
    gc.collect()
    torch.empty(2**22).fill_(1.0)
    assert bool((tensor == 7).all())


def test_threads_do_not_get_the_same_memory():
    tensors: list[torch.Tensor] = []

    def make(value: int) -> None:
        for _ in range(200):
            tensors.append(zeros([16], torch.int64).fill_(value))

    workers = [threading.Thread(target=make, args=(value,)) for value in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({t.data_ptr() for t in tensors}) == 800
    assert sorted(int(t[0]) for t in tensors if bool((t == t[0]).all())) == sorted([0, 1, 2, 3] * 200)
