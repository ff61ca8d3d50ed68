"""Tiles, warps and grids follow from the device; the order in which products are summed does not."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import triton

from kernels.triton.attention_tiles import blocking, merges_itself, split_programs
from kernels.triton.linear import tile_for
from tests.kernels.triton.compiled import A100, DEVICES, HOPPER, L40S, compile_in_new_process, most_spilled

MODULE = "tests.kernels.triton.device_launches"
SPILLED = {100: 96, 120: 16}  # bytes of a thread that Blackwell's compiler spills at most, in some kernels
ROWS = [*range(1, 130), 200, 256, 300, 512, 4096]
BF16 = torch.bfloat16
compiles = pytest.mark.sources(
    "kernels", *(f"tests/kernels/triton/{name}.py" for name in ("compiled", "device_launches", "launches"))
)


@pytest.fixture(scope="module", params=DEVICES)
def compiled(request):
    return request.param, compile_in_new_process(MODULE, request.param)


@compiles
def test_nothing_spills_and_the_devices_shared_memory_suffices(compiled):
    capability, launches = compiled
    limit = DEVICES[capability].shared_memory
    kernels = [(case, kernel) for case, launched in launches.items() for kernel in launched]
    most = SPILLED.get(capability, 0) + most_spilled()
    assert [(case, k["kernel"], k["spilled"], k["registers"]) for case, k in kernels if k["spilled"] > most] == []
    assert [(case, k["kernel"], k["shared"]) for case, k in kernels if k["shared"] > limit] == []
    assert [(case, k["kernel"]) for case, k in kernels if k["registers"] < 10] == [], "kernels that compute nothing"


@compiles
def test_products_of_a_linear_layer_are_summed_in_one_order_for_any_number_of_rows(compiled):
    """K ascends by steps of 16 in one kind of instruction, each output in one accumulator."""
    capability, launches = compiled
    chains = set()
    for case, launched in launches.items():
        for kernel in launched:
            if kernel["kernel"] != "linear_kernel":
                continue
            options, products = kernel["options"], kernel["products"]
            n, m, k = (options[name] for name in ("BLOCK_N", "BLOCK_M", "BLOCK_K"))
            steps = k // 16  # of one tile
            if capability == 100:  # one thread issues all products of a program, in order
                assert (kernel["tcgen05.mma"], kernel["mma.sync"]) == (True, False), case
            elif capability == 90:  # a warpgroup has 64 lines, and all its sums in registers from one on
                assert {(name, into) for name, into, _ in products} == {(f"HGMMA.64x{m}x16.F32.BF16", products[0][1])}
                assert [added == "RZ" for _, _, added in products] == [False] * steps
                assert n == 16 * options["num_warps"]
            else:
                assert {name for name, _, _ in products} == {"HMMA.16816.F32.BF16"}
                assert len(products) * options["num_warps"] * 16 * 8 == n * m * steps
            chains.add((k, steps))
    assert len(chains) == 1, chains


@compiles
def test_products_of_weights_in_blocks_are_summed_in_one_order(compiled):
    """Steps of 16 columns in one kind of instruction; in formats with offsets as many with ones."""
    capability, launches = compiled
    kernels = [kernel for launched in launches.values() for kernel in launched]
    for kernel in (kernel for kernel in kernels if kernel["kernel"] == "ggml_linear_kernel"):
        options, products = kernel["options"], kernel["products"]
        n, m, steps = options["BLOCK_N"], options["BLOCK_M"], 128 // 16 * (2 if options["OFFSET"] else 1)
        if capability == 100:
            assert (kernel["tcgen05.mma"], kernel["mma.sync"]) == (True, False)
        elif capability == 90:
            assert [name for name, _, _ in products] == steps * [f"HGMMA.64x{m}x16.F32.BF16"]
        else:
            assert {name for name, _, _ in products} == {"HMMA.16816.F32.BF16"}
            assert len(products) * options["num_warps"] * 16 * 8 == n * m * steps


@compiles
def test_products_of_attention_are_summed_in_one_order_for_any_number_of_warps(compiled):
    """Scores along D and values along a tile ascend by steps of 16 as well, merging splits or not."""
    capability, launches = compiled
    for case, launched in launches.items():
        for kernel in launched:
            if kernel["kernel"] not in ("attend", "branch"):
                continue
            if capability == 100:
                assert (kernel["tcgen05.mma"], kernel["mma.sync"]) == (True, False), case
            elif capability == 90:
                assert {re.sub("64x.*x16", "64xNx16", name) for name, _, _ in kernel["products"]} == {
                    "HGMMA.64xNx16.F32.BF16"
                }
                chains = itertools.groupby(into for _, into, _ in kernel["products"])
                lengths = {len(list(chain)) for _, chain in chains}
                assert lengths == {kernel["options"]["D_PADDED"] // 16, kernel["options"]["TILE"] // 16}, case
            else:
                assert {name for name, _, _ in kernel["products"]} == {"HMMA.16816.F32.BF16"}


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: f"sm_{device.capability}")
@pytest.mark.parametrize("outputs", [576, 4096, 6144, 28672, 128256])
def test_a_tile_fits_and_k_does_not_depend_on_rows(device, outputs):
    tiles = [tile_for(rows, outputs, BF16, device) for rows in ROWS]
    assert len({tile.k for tile in tiles}) == 1
    for rows, tile in zip(ROWS, tiles, strict=True):
        stage = (tile.n + tile.m) * tile.k * 2
        assert 2 <= tile.stages <= 12
        assert tile.stages * stage <= device.shared_memory
        assert tile.m >= min(rows, 64)
        assert tile.n * tile.m <= 128 * 32 * tile.warps  # registers for the sums


def test_bytes_under_way_for_few_outputs():
    """4096 outputs have 64 programs: each holds as many weights as 4.8 TB/s need in 0.7 µs; up to 128 rows they share
    what they read.
    """
    for rows in (1, 16, 32, 64, 65, 128):
        tile = tile_for(rows, 4096, BF16, HOPPER)
        assert triton.cdiv(rows, tile.m) * triton.cdiv(4096, tile.n) == (64 if rows <= 64 else 128)
        assert 64 * (tile.stages - 1) * tile.n * tile.k * 2 >= 4.8e12 * 0.7e-6


@pytest.mark.parametrize(
    ("rows", "outputs", "tile"),
    [
        (128, 4096, (64, 64, 64, 4, 12)),  # 128 programs
        (128, 6144, (128, 64, 64, 8, 6)),  # 96 programs; tiles of 64 lines would be 192
        (256, 28672, (128, 256, 64, 8, 4)),  # 224 programs keep 132 multiprocessors busy for 85 % of two rounds
        (512, 6144, (128, 128, 64, 8, 3)),  # 96 of the largest tiles would leave a quarter idle
        (1024, 4096, (128, 256, 64, 8, 4)),
    ],
)
def test_tiles_that_were_fastest_on_an_h100(rows, outputs, tile):
    assert tile_for(rows, outputs, BF16, HOPPER) == tile


def test_two_programs_share_a_multiprocessor_where_there_are_more_programs_than_multiprocessors():
    for rows in (16, 32, 64, 128):
        tile = tile_for(rows, 28672, BF16, HOPPER)
        assert 2 * (tile.stages * (tile.n + tile.m) * tile.k * 2 + 1024) <= 228 * 1024


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: f"sm_{device.capability}")
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_keys_are_read_in_the_same_tiles_and_splits_on_every_device(device, dim):
    assert blocking(dim, BF16, 4, device)[1:3] == blocking(dim, BF16, 4, HOPPER)[1:3]
    assert blocking(dim, BF16, 64, device).lines == 64


def test_programs_merge_their_splits_if_every_multiprocessor_has_one():
    for device in (A100, L40S, HOPPER):
        count = device.multiprocessors
        assert merges_itself(count, 128, BF16, True, device)
        assert not merges_itself(count - 1, 128, BF16, False, device)


def test_splits_are_divided_among_as_many_programs_as_the_device_runs_at_once():
    assert split_programs(8, 64, HOPPER) == 33  # one request: 264 programs, not 512
    assert split_programs(8, 4, HOPPER) == 4
    assert split_programs(131, 64, HOPPER) == 3
