"""Planted faults of values: kernels, masks, layers, models, the bridge and patches."""

from table import MODELS, TPU, in_file


# fmt: off
MUTANTS = [
    *in_file(
        TPU + "kernels/attention/parallel.py",
        ("ring-merge", "out_h * jnp.exp(lse_h[..., None] - base), both",
         "out_h * jnp.exp(lse[..., None] - base), both", "a part of the keys is weighed by another part's sum",
         "test_attention_parallel.py::test_every_mask_over_every_split"),
        ("ring-first-row", "first_row=place * q.shape[2]", "first_row=0",
         "every chip thinks that its queries are the first",
         "test_attention_parallel.py::test_every_mask_over_every_split"),
        ("heads-unsplit-mask", "in_specs=(spec, spec, spec, _mask_specs(mask, on_dp, axes, None)),",
         "in_specs=(spec, spec, spec, _mask_specs(mask, on_dp, None, None)),",
         "a mask by head is not split with the heads",
         "test_attention_parallel.py::test_a_kernel_is_split_by_heads_where_nobody_lays_out"),
    ),
    *in_file(
        TPU + "kernels/attention/exchange_kernels.py",
        ("exchange-chip", "w * whole + jnp.minimum(i, whole - 1)", "jnp.minimum(i, whole - 1)",
         "every chip is sent the first one's rows",
         "test_attention_parallel.py::test_kernels_around_the_exchange"),
    ),
    *in_file(
        TPU + "kernels/attention/key_bounds.py",
        ("bounds-maximum", "highest = functools.partial(lax.pmax, axis_name=axis) if axis else lambda x: x",
         "highest = lambda x: x", "a chip's own keys are taken for all",
         "test_attention_parallel.py::test_bounds_taken_before_the_exchange_are_those_of_the_keys_that_come"),
    ),
    *in_file(
        TPU + "kernels/attention/reference.py",
        ("reference-nan", "v_j = jnp.where(seen[..., None], v_j, 0.0)", "v_j = v_j * 1.0",
         "what masked keys hold reaches the sum as 0 * NaN",
         "test_attention_reference.py::test_what_masked_keys_hold_changes_nothing"),
        ("reference-band", "allowed & (ahead >= -left)", "allowed & (ahead > -left)",
         "a window is one token too narrow", "test_attention_reference.py::test_equals_the_formula"),
    ),
    *in_file(
        TPU + "kernels/attention/provenance/parts.py",
        ("lineage-sign", "sums.get(axis, 0) + times * factor", "sums.get(axis, 0) + factor",
         "a difference of indices is read as their sum",
         "test_attention_masks.py::test_traced_masks_by_their_lineage"),
    ),
    *in_file(
        TPU + "kernels/attention/kernel_body.py",
        ("kernel-end", "jnp.where(key < call.kv_len, v, jnp.zeros_like(v))", "v",
         "values beyond the last key, which may be NaN, are summed",
         "test_attention_kernel.py::test_every_mask_of_every_shape"),
        ("kernel-bound", "largest * r.reach[kv] <= SMALLEST", "largest * r.reach[kv] <= 4 * SMALLEST",
         "nothing is subtracted from scores that overflow",
         "test_attention_kernel.py::test_the_largest_bound_and_the_smallest_weights"),
    ),
    *in_file(
        TPU + "kernels/attention/kernel_tiles.py",
        ("kernel-rescale", "rescale = jnp.exp2(m - top)", "rescale = jnp.exp2(top - m)",
         "sums grow where the running maximum does", "test_attention_kernel.py::test_every_mask_of_every_shape"),
        ("kernel-unit", "s + dense * LOG2_E", "s + dense", "a bias in units of e is added to exponents of 2",
         "test_attention_kernel.py::test_every_mask_of_every_shape"),
    ),
    *in_file(
        TPU + "kernels/attention/joint.py",
        ("joint-heads", 'lax.axis_index("ulysses") * heads, heads, 1)\n\n    return Text',
         "0, heads, 1)\n\n    return Text", "every chip has the text of the first heads",
         "test_attention_joint.py::test_any_mesh_gives_what_the_concatenation_gives"),
    ),
    *in_file(
        TPU + "kernels/attention/api.py",
        ("latents-fill", "tokens = k.shape[2] - settings.fill", "tokens = k.shape[2]",
         "latents see those that are none", "test_two_streams.py::test_the_transformer_equals_upstreams"),
    ),
    *in_file(
        TPU + "kernels/linear.py",
        ("linear-gate-sample", 'lambda n, i, m: (i, 0, n))\n        operands["gate"]',
         'lambda n, i, m: (0, 0, n))\n        operands["gate"]', "all samples have the first one's gate",
         "test_linear.py::test_a_gate_and_a_residual_after_a_layer_are_the_layers"),
    ),
    *in_file(
        TPU + "kernels/rotary.py",
        ("rotary-table", "table = P(found.spec[1], None)", "table = P(None, None)",
         "every chip rotates by the first positions", "test_linear.py::test_norm_and_rotation"),
    ),
    *in_file(
        TPU + "video/chunks.py",
        ("chunks-padding", "[(size - 1, 0) if a == axis", "[(0, size - 1) if a == axis",
         "zeros follow the first frame in place of coming before it",
         "test_wan_vae.py::test_equals_upstream[2.1-degrees0-1-3-3-5]"),
    ),
    *in_file(
        TPU + "video/norm.py",
        ("norm-chips", "return whole, everyone(around) / total", "return whole, around * split.count / total",
         "each chip has the variance of its own slab", "test_cogvideox_vae.py::test_equals_upstream"),
    ),
    *in_file(
        TPU + "video/slabs.py",
        ("slabs-neighbour", "[(i, i + 1) for i in range(self.count - 1)]",
         "[(i + 1, i) for i in range(self.count - 1)]", "the neighbour on the wrong side sends its edge",
         "test_wan_vae.py::test_equals_upstream[2.1-degrees1-2-2-4-9]"),
        ("slabs-keys", "np.tile((column < self.columns(local)).reshape(1, 1, 1, -1), frames)", "None",
         "attention sees keys that are no part of the map",
         ("test_wan_vae.py::test_equals_upstream[2.1-degrees1-2-2-4-9]", "test_wan_vae.py::test_equals_upstream[2.1-degrees0-1-3-3-5]")),
    ),
    *in_file(
        TPU + "video/tiles.py",
        ("vae-overlap", "overlaps=tuple(size // patch - stride // patch",
         "overlaps=tuple(size // patch - stride // patch - 1", "an off-by-one where tiles overlap",
         "test_wan_vae.py::test_tiles_equal_upstream"),
    ),
    *in_file(
        TPU + "kernels/convolution.py",
        ("windows-edge", "(column >= edge - j) & (column < width + edge - j)", "column >= edge - j",
         "beside the last column of a map lies the first of its next row", "test_convolution.py::test_any_map"),
    ),
    *in_file(
        MODELS + "autoencoders/autoencoder_kl_wan_flax.py",
        ("vae-history", "feat_cache[slot] = torch.where(_number.get() > 0, kept, 0)", "feat_cache[slot] = kept",
         "the first frame is history to the frames after it",
         "test_wan_vae.py::test_equals_upstream[2.1-degrees0-1-3-3-5]"),
    ),
    *in_file(
        MODELS + "transformers/transformer_hunyuan_video_flax.py",
        ("hunyuan-tables", "columns += dim", "columns += 0", "all axes turn by the first one's angles",
         "test_hunyuan_video.py::test_rotation_by_axis_is_upstreams_bit_for_bit"),
    ),
    *in_file(
        MODELS + "transformers/two_streams_flax.py",
        ("streams-gate", "modulation[-1] * block.proj_out(wide)", "modulation[0] * block.proj_out(wide)",
         "the gate of a single block is its shift", "test_two_streams.py::test_the_transformer_equals_upstreams"),
    ),
    *in_file(
        TPU + "bridge/layers.py",
        ("layers-written-padding", "made_by is operator and x.jax() is array", "made_by is operator",
         "what was written to padding, or to a layer's result, is not seen",
         "test_linear.py::test_a_gate_and_a_residual_after_a_layer_are_the_layers"),
    ),
    *in_file(
        TPU + "bridge/operators.py",
        ("operators-mask",
         "    while value.ndim > len(entry) and value.shape[0] == 1:\n        value = value[0]\n", "",
         "what is written where a mask holds is the first entry's",
         "test_bridge.py::test_what_is_written_where_a_mask_holds"),
    ),
    *in_file(
        TPU + "bridge/host_values.py",
        ("known-writes", "    return of_array(t.jax())\n",
         "    return vars(t).setdefault('_first', of_array(t.jax()))\n",
         "a written tensor has the value that it had", "test_bridge.py::test_values_that_the_host_knows"),
    ),
    *in_file(
        MODELS + "transformers/transformer_hunyuan_video15.py",
        ("patch-0003-order", "[encoder_hidden_states_3, encoder_hidden_states_2, encoder_hidden_states], dim=1",
         "[encoder_hidden_states_2, encoder_hidden_states_3, encoder_hidden_states], dim=1",
         "tokens in another order than their mask", "test_patched_hunyuan15.py::test_hunyuan15_equals_upstream"),
    ),
    *in_file(
        "src/diffusers/schedulers/scheduling_unipc_multistep.py",
        ("patch-0004-corrector",
         "        R, b = (part if part.dtype == torch.float64 else part.float() for part in (R, b))\n\n        if len(D1s) > 0:\n            D1s = torch.stack(D1s, dim=1)\n",
         "\n        if len(D1s) > 0:\n            D1s = torch.stack(D1s, dim=1)\n",
         "a dropped conversion: the corrector solves in bfloat16",
         "test_patched_schedulers.py::test_bfloat16_sigmas_are_solved_in_float32"),
    ),
]
# fmt: on
