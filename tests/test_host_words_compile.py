"""The loads and stores of the kernel of `host_words`, compiled on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.backend import HAS_TRITON

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Triton on its next version's defaults
]


@pytest.mark.parametrize("to_host", [False, True])
def test_words_cross_in_16_bytes_and_from_no_cache(
    to_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.triton_host_words import _BLOCK, _copy_words_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"device_ptr": "*i32", "host_ptr": "*i32", "count": "i32"}
    source = ASTSource(
        _copy_words_kernel,
        types | {"TO_HOST": "constexpr", "BLOCK": "constexpr"},
        {"TO_HOST": to_host, "BLOCK": _BLOCK},
        {(i,): [["tt.divisibility", 16]] for i in range(2)},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = str(built.asm["ptx"])
    load = "ld.global" if to_host else "ld.volatile.global"
    assert ptx.count(f"{load}.v4.b32") == ptx.count("st.global.v4.b32") == 2
    assert ptx.count(f"{load}.b32") == ptx.count("st.global.b32") == 1
