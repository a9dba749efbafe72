"""The Hopper kernels on a machine without a GPU: Triton's interpreter does not know Gluon, but its
compiler needs no device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.backend import HAS_TRITON

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Triton on its next version's defaults
]
SHAPE = {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128}
POINTERS = {"q_ptr": "*bf16", "out_ptr": "*bf16"} | dict.fromkeys(
    ("partial_ptr", "lse_ptr", "sinks_ptr"), "*fp32"
)
PLAIN: dict[str, object] = {"WINDOW": 0, "SOFT_CAP": 0.0, "sinks_ptr": None}
# Of decodes alone: queries of a draft.
QUERIES: dict[str, dict[str, object]] = {
    "queries": {"HAS_QUERIES": True},
    "e4m3, queries": {"E4M3": True, "HAS_QUERIES": True},
    "queries, all else, small heads": {
        "HAS_QUERIES": True,
        "SOFT_CAP": 43.0,
        "sinks": True,
        "HEAD_DIM": 64,
    },
}
VARIANTS: dict[str, dict[str, object]] = {
    "a window": {"WINDOW": 1000},
    "a soft cap": {"SOFT_CAP": 43.0},
    "all at once, small heads": {"WINDOW": 128, "SOFT_CAP": 43.0, "sinks": True, "HEAD_DIM": 64},
}


# A cache in e4m3.
E4M3: dict[str, dict[str, object]] = {
    "e4m3": {"E4M3": True},
    "e4m3, a window, small heads": {"E4M3": True, "WINDOW": 128, "HEAD_DIM": 64},
}
# Bytes of shared memory of a multiprocessor for programs, each of which has 1 KB more.
SHARED = 228 * 1024


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def decode(variant: dict[str, object]) -> str:
    from kernels.gluon_decode_attention import BLOCK_N, _decode_kernel

    heads = 128 // int(str(variant.get("HEAD_DIM", 128)))
    sizes = {"BLOCK_N": BLOCK_N, "STAGES": 3, "STAGED": 0, "MAX_SPLITS": 16, "HAS_QUERIES": False}
    sizes |= variant
    if sizes.pop("E4M3", False):
        sizes |= {"STAGES": 2 * heads, "STAGED": 3 * heads}
    if not variant["WINDOW"] and not sizes["HAS_QUERIES"]:
        sizes["kv_lens_ptr"] = None
    return compiled(_decode_kernel, 64, BLOCK_N, sizes, most_shared=SHARED // 2, maxnreg=128)


def prefill(variant: dict[str, object]) -> str:
    from kernels.gluon_prefill_attention import BLOCK_N, STAGES, _prefill_kernel

    sizes = {"BLOCK_N": BLOCK_N, "STAGES": STAGES, "STAGED": 0, "TILE_ROWS": 128, **variant}
    if sizes.pop("E4M3", False):
        sizes["STAGED"] = 1
    return compiled(_prefill_kernel, 16, BLOCK_N, sizes, most_shared=SHARED)


def test_decode_compiles() -> None:
    ptx = decode(PLAIN)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    starts, waits = (ptx.index(f"griddepcontrol.{half}") for half in ("launch_dependents", "wait"))
    assert starts < waits < min(ptx.index("ld.global"), ptx.index("cp.async.bulk.tensor"))


def test_prefill_compiles() -> None:
    ptx = prefill(PLAIN)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [(kernel, changes) for kernel in (decode, prefill) for changes in (VARIANTS | E4M3).values()]
    + [(decode, changes) for changes in QUERIES.values()],
    ids=[f"{kernel}-{name}" for kernel in ("decode", "prefill") for name in VARIANTS | E4M3]
    + [f"decode-{name}" for name in QUERIES],
)
def test_variants_of_families_compile(
    kernel: Callable[[dict[str, object]], str], changes: dict[str, object]
) -> None:
    variant = PLAIN | changes
    if variant.pop("sinks", False):
        del variant["sinks_ptr"]  # a pointer like others
    ptx = kernel(variant)
    assert "wgmma.mma_async" in ptx
    # The quotient of a cap's tanh; the window needs none.
    assert (ptx.count("div.full.f32") > 32) == bool(variant["SOFT_CAP"])
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == bool(variant.get("E4M3"))


def compiled(
    kernel: object,
    page: int,
    block_n: int,
    sizes: dict[str, object],
    *,
    most_shared: int,  # bytes
    **options: int,
) -> str:
    """Compiles a kernel that fits the shared memory of a multiprocessor as often as it has to."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    constants: dict[str, object] = {**SHAPE, "PAGE": page, **sizes}
    kind, name = (gl.float8e4nv, "fp8e4nv") if sizes["STAGED"] else (gl.bfloat16, "bf16")
    columns = constants["HEAD_DIM"] if sizes["STAGED"] else 64
    layout = gl.NVMMASharedLayout.get_default_for([block_n, columns], kind)
    descriptor = f"tensordesc<{name}[{min(page, block_n)}, {columns}],{layout!r}>"

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_desc"):
            return descriptor
        if name.endswith("_ptr"):
            return POINTERS.get(name, "*i32")
        return "fp32" if name == "scale" else "i32"

    signature = {name: type_of(name) for name in kernel.arg_names}  # type: ignore[attr-defined]
    source = GluonASTSource(kernel, signature, constants)
    built = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options}
    )
    assert built.metadata.shared + 1024 <= most_shared
    return str(built.asm["ptx"])
