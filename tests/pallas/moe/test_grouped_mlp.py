"""The MLP of experts, against the same in NumPy, for kernels and reference implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_layers import layer, one_after_another, regrouped

from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.moe import operands
from jspec.pallas.moe.grouped_mlp import grouped_mlp_kernel, grouped_mlp_reference
from jspec.pallas.moe.router_reference import Routed
from jspec.pallas.moe.tiles import ExpertTiling
from jspec.quantization.weight import Weight

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def dequantize_mxfp4(weight, scale, inputs: int):
    """A weight in MXFP4 in float64, number by number."""
    weight, scale = np.asarray(weight).astype(int), np.asarray(scale)
    numbers = np.empty((*weight.shape[1:-1], inputs))
    for i in range(inputs):
        pair, group, word, place = i // 64, i // 32 % 2, i % 32 // 4, i % 4
        at = 4 * word + 2 * (place % 2)
        half = weight[pair, ..., at] | weight[pair, ..., at + 1] << 8
        magnitude, sign = [[(6, 15), (3, 12)], [(0, 14), (9, 13)]][group][place // 2]
        code = half >> magnitude & 7 | (half >> sign & 1) << 3
        number = np.where(code < 8, 1, -1) * MAGNITUDES[code % 8]
        factor = (scale[pair] >> 16 * group & 0xFFFF) << 16
        numbers[..., i] = number * factor.view(np.float32).astype(np.float64) * 2.0**-126
    return numbers


def by_token(x, routed: Routed, gate_up, down, clamp: float | None = None, activation: str = "silu"):
    """``grouped_mlp`` of one token after another, in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(routed.weight, np.float64)
    X = routed.sizes.shape[0]
    up_bias, down_bias = (
        np.zeros((X, weights.weight.shape[1])) if weights.bias is None else np.asarray(weights.bias, np.float64)
        for weights in (gate_up, down)
    )
    gate_up, down = dequantize(gate_up.weight), dequantize(down.weight)
    out = np.zeros(x.shape)
    for m, experts in enumerate(np.asarray(routed.expert)):
        for c, e in enumerate(experts):
            gate, up = np.split(gate_up[e] @ x[m] + up_bias[e], 2)
            if activation == "gelu_tanh":
                hidden = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
            elif clamp is None:
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
                hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[m] += weight[m, c] * (down[e] @ hidden + down_bias[e])
    return out


def dequantize(weight: Weight):
    if weight.in_pairs:
        return dequantize_mxfp4(weight.numbers, weight.scale, weight.inputs)
    return np.asarray(weight.dequantize(), np.float64)


KINDS_OF_CODES = (
    "int4",
    "int4_64_float16_zeros",
    "int4_32_float32",
    "nvfp4",
    "mxfp4",
    "int8_32_float16_zeros",
    "mxfp8",
    "nf4_64",
    # As blocks of GGUF are kept: Q4_1, Q5_0, Q6_K, Q4_K, Q5_K, Q2_K, IQ4_XS and IQ2_XS.
    "int4_32_float16_offsets",
    "int5_32_float16",
    "int6_16_levels",
    "int4_32_levels_offsets",
    "int5_32_levels_offsets",
    "int4_16_levels_offsets",
    "iq4_32_levels",
    "int8_16_levels",
)
TILINGS = [None, ExpertTiling(16, 16, 16, 4, 2), ExpertTiling(32, 64, 64, 4, 2, outputs_first=True, joined=True)]


class TestGroupedMLP:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def made(tiling, **how):
            return implementation(
                functools.partial(grouped_mlp_reference, **how),
                functools.partial(grouped_mlp_kernel, **how, up_tiling=tiling, down_tiling=tiling),
            )

        def sums(tiling, **how):
            outputs = made(tiling, **how)
            return lambda x, *args: PartialSums(outputs(x, *args)).total(x.dtype)

        self.made, self.experts = made, sums

    def assert_agrees(self, tilings, args):
        wanted = by_token(*args)
        atol = (3e-2 if args[0].dtype == jnp.bfloat16 else 1e-5) * np.abs(wanted).max()
        for tiling in tilings:
            np.testing.assert_allclose(np.asarray(self.experts(tiling)(*args), np.float64), wanted, atol=atol)

    @pytest.mark.parametrize("tiling", TILINGS, ids=str)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [(1, 64, 48, 8, 2), (5, 72, 40, 16, 4), (33, 32, 16, 3, 2)], ids=str)
    def test_agrees_with_float64(self, shape, dtype, tiling):
        args = layer(*shape, dtype=dtype)
        actual = np.asarray(self.experts(tiling)(*args), np.float64)
        np.testing.assert_allclose(actual, by_token(*args), atol=5e-2 if dtype == "bfloat16" else 2e-5)

    @pytest.mark.parametrize("quantization", [None, "mxfp4_pairs"])
    @pytest.mark.parametrize(("M", "Y"), [(1, 2), (1, 6), (7, 2), (33, 2)])
    @pytest.mark.parametrize("tiling", TILINGS[1:], ids=str)
    def test_experts_that_are_elsewhere_add_zeros(self, tiling, M, Y, quantization):
        """Each of two devices has half of the experts, which may be none of those that are chosen, and fewer than a token
        chooses."""
        x, routed, *stacked = layer(M, 64, 64, 8, Y, "float32", quantization)
        whole = self.made(tiling)(x, routed, *stacked)
        expert, halves = np.asarray(routed.expert), []
        for first in (0, 4):
            axis = 1 if quantization else 0
            own = jax.tree.map(lambda a: jnp.take(a, jnp.arange(first, first + 4), axis), stacked)  # noqa: B023
            halves.append(np.asarray(self.made(tiling)(x, routed, *own, jnp.array([first], jnp.int32))))
            assert np.all(halves[-1][(expert < first) | (expert >= first + 4)] == 0)
        np.testing.assert_allclose(halves[0] + halves[1], whole, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("quantization", ["int8", "fp8"])
    def test_quantised_weights_agree_with_float64(self, quantization):
        args = layer(5, 72, 40, 16, 4, "float32", quantization)
        actual = self.experts(TILINGS[1])(*args)
        np.testing.assert_allclose(actual, by_token(*args), atol=2e-5)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(("D", "F"), [(256, 128), (200, 72), (72, 300)])
    def test_blocks_of_fp8_agree_with_float64(self, D, F, dtype):
        tilings = TILINGS[0], TILINGS[2], ExpertTiling(64, 32, 128, 4, 2)
        self.assert_agrees(tilings, layer(5, D, F, 8, 3, dtype, "fp8_block"))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("kind", KINDS_OF_CODES)
    @pytest.mark.parametrize(("D", "F"), [(256, 128), (200, 72)])
    def test_codes_agree_with_float64(self, D, F, kind, dtype):
        self.assert_agrees((TILINGS[0], ExpertTiling(64, 32, 128, 4, 2)), layer(5, D, F, 8, 3, dtype, kind))

    @pytest.mark.parametrize(
        "kinds", [("int4", None), ("nvfp4", "int8"), ("fp8", "mxfp4"), ("int8_32_float16_zeros", "int4")]
    )
    @pytest.mark.parametrize(("D", "F"), [(256, 128), (200, 72)])
    def test_maps_of_two_formats_agree_with_float64(self, D, F, kinds):
        """Of which one reads its inputs in the order of codes and the other does not."""
        (x, routed, gate_up, _), (*_, down) = (layer(5, D, F, 8, 3, "float32", kind) for kind in kinds)
        self.assert_agrees((TILINGS[0], ExpertTiling(64, 32, 128, 4, 2)), (x, routed, gate_up, down))

    @pytest.mark.parametrize("tiling", TILINGS, ids=str)
    @pytest.mark.parametrize(("D", "F"), [(128, 64), (96, 32), (64, 160)])
    def test_mxfp4_weights_agree_with_float64(self, D, F, tiling):
        args = layer(5, D, F, 8, 3, "float32", "mxfp4_pairs")
        wanted = by_token(*args)
        np.testing.assert_allclose(self.experts(tiling)(*args), wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())

    @pytest.mark.parametrize("quantization", [None, "fp8", "mxfp4_pairs"])
    def test_biases_and_the_clamped_activation_agree_with_float64(self, quantization):
        x, *args = layer(5, 64, 96, 8, 3, "float32", quantization, bias=True)
        x = x / 4
        actual = self.experts(None, clamp=0.5)(x, *args)
        np.testing.assert_allclose(actual, by_token(x, *args, clamp=0.5), rtol=1e-5, atol=1e-5)

    def test_the_activation_of_gemma_agrees_with_float64(self):
        x, *args = layer(5, 64, 96, 8, 3, "float32")
        wanted = by_token(x / 4, *args, activation="gelu_tanh")
        actual = self.experts(None, activation="gelu_tanh")(x / 4, *args)
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
        assert np.abs(wanted - by_token(x / 4, *args)).max() > 1e-3  # of silu

    def test_a_token_does_not_depend_on_its_neighbours(self):
        x, routed, gate_up, down = layer(9, 64, 48, 8, 2, "float32")
        experts = self.experts(None)
        actual = experts(x, routed, gate_up, down)
        other, elsewhere, *_ = layer(10, 64, 48, 8, 2, "float32")
        for place in (0, 4, 8):
            mixed = regrouped(*(b[:9].at[place].set(a[0]) for a, b in zip(routed[:2], elsewhere[:2], strict=True)), X=8)
            beside = experts(other[:9].at[place].set(x[0]), mixed, gate_up, down)
            np.testing.assert_array_equal(beside[place], actual[0])

    def test_a_token_that_is_not_finite_leaves_the_others_alone(self):
        x, routed, gate_up, down = layer(5, 64, 48, 8, 2, "float32")
        experts = self.experts(None)
        clean = experts(x, routed, gate_up, down)
        actual = experts(x.at[2, 3].set(jnp.nan), routed, gate_up, down)
        assert jnp.isnan(actual[2]).all()
        others = jnp.array([0, 1, 3, 4])
        np.testing.assert_array_equal(actual[others], clean[others])

    def test_all_tokens_may_go_to_one_expert(self):
        x, routed, gate_up, down = layer(40, 32, 16, 8, 1, "float32")
        routed = regrouped(jnp.full_like(routed.expert, 7), routed.weight, X=8)
        actual = self.experts(TILINGS[1])(x, routed, gate_up, down)
        np.testing.assert_allclose(actual, by_token(x, routed, gate_up, down), atol=2e-5)


@pytest.mark.parametrize(
    "kind",
    [
        *("int4", "int4_32_float32", "nf4_64", "nvfp4", "mxfp8", "fp8_block", "int8_32_float16_zeros"),
        *("int6_16_levels", "int4_32_levels_offsets", "iq4_32_levels"),
    ],
)
def test_a_sum_has_one_order_in_every_tile(monkeypatch, kind):
    """Numbers of a tile come in one order, of which tensor cores add one after the other."""
    monkeypatch.setattr(operands, "dot", one_after_another)
    few, many = ExpertTiling(16, 128, 128, 4, 2), ExpertTiling(64, 128, 128, 4, 2)
    args = layer(3, 128, 128, 2, 1, "bfloat16", kind)
    first, *others = [
        grouped_mlp_kernel.__wrapped__(*args, up_tiling=tiling, down_tiling=tiling, interpret=True)
        for tiling in (few, many, dataclasses.replace(few, outputs=64, joined=True))
    ]
    for other in others:
        np.testing.assert_array_equal(other, first)
