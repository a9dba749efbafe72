"""The kernels of 4-bit rows compile without a device into the instructions that they are made for:
copies that run ahead, unpacking by two halves a time, the tensor cores' narrow or wide products."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kernels.backend import HAS_TRITON, traced_for
from kernels.int4 import GROUP_SIZES, Int4Format, empty_int4
from kernels.kernel_call import KernelCall

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Triton on its next version's defaults
]
SHAPE = {"K": 4096, "N": 6144, "STRIDE_X": 4096, "HAS_BIAS": True, "UPCAST": False}
FORM = {"GROUP": 128, "HAS_ZEROS": True, "IN_HALF": True}
SMALL_FORM = Int4Format(32, torch.bfloat16)
POINTERS = {"values_ptr": "*u8", "scales_ptr": "*i32", "zeros_ptr": "*i32", "planes_ptr": "*fp32"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("height", [4096, 28672])
@pytest.mark.parametrize("form", [FORM, {"GROUP": 32, "HAS_ZEROS": False, "IN_HALF": False}])
def test_few_rows_compile(dtype: str, form: dict[str, object], height: int) -> None:
    ptx = few(dtype, form, height)
    check(ptx, dtype)
    starts, waits = (ptx.index(f"griddepcontrol.{half}") for half in ("launch_dependents", "wait"))
    assert starts < waits < min(ptx.index("ld.global"), ptx.index("cp.async"))


@pytest.mark.parametrize("lanes", [16, 32, 64])
def test_more_rows_compile(lanes: int) -> None:
    check(mid("bf16", FORM, lanes), "bf16")


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("form", [Int4Format(128, torch.float16, has_zeros=True), SMALL_FORM])
def test_hopper_has_the_wide_product(form: Int4Format, shares: int, tokens: int) -> None:
    ptx = wide(form, shares, tokens)
    assert f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    assert "fma.rn.bf16x2" in ptx
    assert not re.search(r"cvt\.rn\.b?f16\.[us]8", ptx)
    # A word of the weight is loaded as the fragment that it becomes: no bytes change places.
    assert "ldmatrix" in ptx
    # Triton 3.6 joins halves of words by this instruction, for the numbers to add.
    assert {*re.findall(r"prmt\.b32[^;]*, (\S+);", ptx)} <= {"0x5410U", "0x7632U"}
    assert "shfl.sync" not in ptx.split("wgmma.mma_async")[1]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_warpgroups_that_take_every_other_pair_skip_no_fill_of_a_stage(
    group_size: int, tokens: int
) -> None:
    call = wide_call(Int4Format(group_size, torch.float16), 4, tokens)
    assert int(str(dict(call.options)["STAGES"])) % 2 == 0


def few(dtype: str, form: dict[str, object], height: int = 28672) -> str:
    from kernels.triton_int4_few import TILE, WALKED, _int4_few_kernel

    group, tile = form["GROUP"], TILE
    assert isinstance(group, int)
    constants = (
        SHAPE
        | form
        | {
            "STRIDE_SORTED": 4096,
            "HAS_LORA": True,
            "STRIDE": 8,
            "NUM_SLICES": 3,
            "ROWS": 8,
            "BLOCK_N": tile.block_n,
            "PARTS": tile.num_warps * WALKED // group,
            "BLOCK_K": 512 // tile.num_warps,
            "SPLIT": tile.num_warps,
            "STAGES": tile.stages,
            "OVERLAPPED": True,
        }
    )
    return compiled(_int4_few_kernel, dtype, constants | {"N": height}, tile.num_warps)


def wide(form: Int4Format, shares: int, tokens: int) -> str:
    from kernels.kernel_compiler import compile_call, targeted

    call = wide_call(form, shares, tokens)
    with targeted((9, 0)):
        return str(compile_call(call).asm["ptx"])


def wide_call(form: Int4Format, shares: int, tokens: int) -> KernelCall:
    from kernels.gluon_int4_linear import WideTile, launch_int4_wide
    from kernels.triton_launch import recorded_calls

    device = torch.device("meta")
    with traced_for((9, 0)), recorded_calls() as calls:
        x = torch.empty((tokens, 4096), dtype=torch.bfloat16, device=device)
        weight = empty_int4(6144, 4096, form, device)
        launch_int4_wide(x, weight, None, WideTile(shares, 1))
    (call,) = calls
    return call


def mid(dtype: str, form: dict[str, object], lanes: int) -> str:
    from kernels.triton_int4_mid import _int4_mid_kernel, tile_for

    tile, splits = tile_for(on_hopper=True), 1
    constants = (
        SHAPE
        | form
        | {
            "TILE": lanes,
            "ROWS": tile.rows,
            "WARPS": tile.num_warps,
            "SPLITS": splits,
            "PART": 16 // splits,
            "STEP": min(int(str(form["GROUP"])), tile.step),
            "STAGES": tile.stages,
            "OVERLAPPED": True,
        }
    )
    return compiled(_int4_mid_kernel, dtype, constants, tile.num_warps)


def check(ptx: str, dtype: str) -> None:
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    assert f"fma.rn.{kind}" in ptx
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype.replace('fp', 'f')}" in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert "wgmma" not in ptx  # with its left side in registers ptxas compiles it wrongly
    assert not re.search(r"cvt\.rn\.b?f16\.[us]8", ptx)  # no nibble is converted


def compiled(kernel: object, dtype: str, constants: dict[str, object], num_warps: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            of_table = name in ("header_ptr", "units_ptr")
            kind = "*i32" if of_table else "*i64" if name == "entries_ptr" else f"*{dtype}"
            return POINTERS.get(name, kind)
        return "i32"

    names = kernel.arg_names  # type: ignore[attr-defined]
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")
    }
    signature = {name: type_of(name) for name in names}
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", 90, 32)
    built = triton.compile(source, target=target, options={"num_warps": num_warps})
    return str(built.asm["ptx"])
