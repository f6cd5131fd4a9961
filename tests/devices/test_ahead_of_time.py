"""What is run on a GPU compiles here, for cards of three generations, and reads memory widely."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SIXTEEN_BYTES = "0x10"
MOST_SHARED_BYTES = 163 << 10
"""What a program may take on the oldest of the targets."""


def test_attention_compiles_for_every_target_and_reads_pages_sixteen_bytes_at_a_time(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.ahead_of_time"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(one["kernel"], one["target"], one["head_dim"]) for one in found} == {
        (kernel, target, head_dim)
        for kernel in ("decode", "prompt", "write", "merge")
        for target, head_dim in ((80, 128), (90, 128), (100, 128), (80, 256))
    }
    for one in found:
        assert one["shared"] <= MOST_SHARED_BYTES, one
        narrow = [kind for kind in one["loads"] if kind in ("b8", "b16")]
        assert not narrow, f"numbers are read one by one: {one}"
        if one["kernel"] in ("decode", "prompt"):
            assert set(one["copies"]) == {SIXTEEN_BYTES}, one
            assert one["copies"][SIXTEEN_BYTES] > 0
            assert "v4.b32" in one["loads"], "queries"
            assert "v4.b32" in one["stores"], "sums"
        of_the_model = {name for name in one["specialised"] if name.endswith("stride")}
        assert set(one["specialised"]) - of_the_model <= {"scale_log2"}, (
            "a number of the batch would have it compiled anew"
        )
        assert "table_stride" not in of_the_model, "how wide a page table is, the batch decides"
