"""The kernel that copies pieces of pages: it compiles for every target, and stays in its bounds."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest

from tiercache.tiers.cuda_source import MOST_PAIRS, SOURCE, PagePairs

SHIM = r"""
// A grid of threads, one after the other, on the host.
#include <cstdio>
#include <cstdlib>
#include <vector>
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim, gridDim;
#define __global__
@SOURCE@
int main() {
    int count, blocks, threads;
    long long page_bytes, begin, size, target_pages, source_pages;
    if (scanf("%d %d %d %lld %lld %lld %lld %lld", &count, &blocks, &threads, &page_bytes, &begin,
              &size, &target_pages, &source_pages) != 8) return 2;
    PagePairs pairs = {};
    for (int i = 0; i < count; i++)
        if (scanf("%d %d", &pairs.target[i], &pairs.source[i]) != 2) return 2;
    // On the heap, exactly as large as the pools are: one byte beyond is found.
    char *target = (char *)calloc(target_pages, page_bytes);
    char *source = (char *)malloc(source_pages * page_bytes);
    for (long long i = 0; i < source_pages * page_bytes; i++) source[i] = (char)(i * 31 + i / 256);
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            copy_pages(target, source, pairs, count, page_bytes, begin, size);
    fwrite(target, 1, target_pages * page_bytes, stdout);
    free(target);
    free(source);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    (folder / "copy.cpp").write_text(SHIM.replace("@SOURCE@", SOURCE))
    subprocess.run(
        ["g++", "-O1", "-g", "-fsanitize=address,undefined", "-o", "copy", "copy.cpp"],
        cwd=folder,
        check=True,
    )
    return folder / "copy"


def run(
    program: Path, pairs: list[tuple[int, int]], grid: tuple[int, int], piece: tuple[int, int, int]
) -> subprocess.CompletedProcess[bytes]:
    """pairs are (target, source) slots in pools of 40 and 50 pages."""
    numbers = [len(pairs), *grid, *piece, 40, 50, *(slot for pair in pairs for slot in pair)]
    return subprocess.run(
        [program], input=" ".join(map(str, numbers)).encode(), capture_output=True
    )


@pytest.mark.parametrize(
    ("grid", "piece"),
    [
        ((1, 32), (64, 0, 64)),
        ((64, 256), (4096, 0, 4096)),
        ((3, 7), (1040, 16, 1008)),
        ((2, 32), (368640 // 30, 3 * 16, 16)),
        ((1, 1), (96, 80, 16)),
        ((5, 64), (2048, 512, 1536)),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 33])
def test_exactly_the_asked_for_bytes_of_the_asked_for_pages_are_copied(
    program: Path, count: int, grid: tuple[int, int], piece: tuple[int, int, int]
) -> None:
    page_bytes, begin, size = piece
    rng = np.random.default_rng(count)
    targets, sources = rng.permutation(40)[:count].tolist(), rng.integers(0, 50, count).tolist()
    done = run(program, list(zip(targets, sources, strict=True)), grid, piece)
    assert done.returncode == 0, done.stderr.decode()
    index = np.arange(50 * page_bytes)
    source = (index * 31 + index // 256).astype(np.uint8).reshape(50, page_bytes)
    expected = np.zeros((40, page_bytes), np.uint8)
    for to, of in zip(targets, sources, strict=True):
        expected[to, begin : begin + size] = source[of, begin : begin + size]
    assert (np.frombuffer(done.stdout, np.uint8).reshape(40, page_bytes) == expected).all()


@pytest.mark.parametrize("pair", [(40, 0), (0, 50), (-1, 0)])
def test_a_slot_outside_its_pool_would_be_noticed(program: Path, pair: tuple[int, int]) -> None:
    done = run(program, [pair], (1, 32), (1024, 0, 1024))
    assert done.returncode != 0
    assert b"AddressSanitizer" in done.stderr


def test_the_slots_of_a_launch_fit_its_arguments() -> None:
    """CUDA passes at most 4 KiB by value; the struct is the one the kernel declares."""
    assert ctypes.sizeof(PagePairs) == 8 * MOST_PAIRS < 4096 - 64
    assert f"int target[{MOST_PAIRS}]; int source[{MOST_PAIRS}];" in SOURCE
    pairs = PagePairs.of(np.array([7, 9], np.int32), np.array([1, 2], np.int32))
    assert (list(pairs.target[:3]), list(pairs.source[:3])) == ([7, 9, 0], [1, 2, 0])


def nvrtc() -> ctypes.CDLL:
    files = distribution("nvidia-cuda-nvrtc").files or ()
    (path,) = (file for file in files if file.name.startswith("libnvrtc.so"))
    return ctypes.CDLL(str(path.locate()))


@contextmanager
def compiled(library: ctypes.CDLL, target: int) -> Iterator[str]:
    program = ctypes.c_void_p()
    assert not library.nvrtcCreateProgram(
        ctypes.byref(program), SOURCE.encode(), b"copy.cu", 0, None, None
    )
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=compute_{target}".encode())
    result = library.nvrtcCompileProgram(program, 1, options)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not result, log.value.decode()
    assert not library.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    assert not library.nvrtcGetPTX(program, ptx)
    yield ptx.value.decode()
    library.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.parametrize("target", [80, 90, 100])
def test_it_compiles_for_every_target_and_moves_sixteen_bytes_at_a_time(target: int) -> None:
    with compiled(nvrtc(), target) as ptx:
        assert f".target sm_{target}" in ptx
        assert ptx.count("ld.global.v4.u32") + ptx.count("ld.global.v4.b32") >= 1
        assert ptx.count("st.global.v4.u32") + ptx.count("st.global.v4.b32") >= 1
