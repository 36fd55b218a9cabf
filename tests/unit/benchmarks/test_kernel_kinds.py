"""Kernels of a profile by what they do: names as torch's profiler gives them on an H200."""

from __future__ import annotations

import pytest

from benchmarks.kernel_kinds import by_kind, kind_of


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("product", "nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_bias_TNT"),
        ("attention", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false>>"),
        ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1"),
        (
            "attention",
            "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel>",
        ),
        ("convolution", "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x192x64"),
        ("layout", "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>"),
        ("norm", "triton_red_fused_add_native_layer_norm_view_1"),
        ("norm", "triton_poi_fused_add_convolution_native_group_norm_silu_unsqueeze_9"),
        ("pointwise", "triton_poi_fused_convolution_silu_4"),
        ("pointwise", "triton_poi_fused__scaled_dot_product_flash_attention_cat_permute_unbind_view_7"),
        ("copy", "Memcpy DtoD (Device -> Device)"),
        ("copy", "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>"),
        ("pointwise", "triton_poi_fused_gelu_mul_split_view_3"),
        ("other", "void comfy::(anonymous namespace)::rope_kernel<__nv_bfloat16>"),
    ],
)
def test_a_kernel_has_the_kind_of_its_work(kind: str, name: str) -> None:
    assert kind_of(name) == kind


def test_the_largest_kind_comes_first() -> None:
    found = by_kind({"nvjet_a": (2, 3000.0), "nvjet_b": (1, 1000.0), "flash": (70, 5000.0)})
    assert list(found.items()) == [("attention", {"count": 70, "ms": 5.0}), ("product", {"count": 3, "ms": 4.0})]
