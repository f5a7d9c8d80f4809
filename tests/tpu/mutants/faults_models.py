"""Faults of the rooms video and bridge, of the *_flax.py files and of upstream's patched files."""

from table import MODELS, TPU, in_file


VAE, NNX, BRIDGE, LINEAR = "test_wan_vae.py", "test_wan_vae_nnx.py", "test_bridge.py", "test_linear.py"
HUNYUAN_VAE, HUNYUAN_NNX = "test_hunyuan_video15_vae.py", "test_hunyuan_video15_vae_nnx.py"
HUNYUAN, SCHEDULERS, DISPATCHER = (
    "test_patched_hunyuan15.py",
    "test_patched_schedulers.py",
    "test_patched_dispatcher.py",
)
FLAX = MODELS + "autoencoders/autoencoder_kl_wan_"
FEW_CHIPS, MORE_CHIPS = (
    f"{VAE}::test_equals_upstream[2.1-degrees0-1-3-3-5]",
    f"{VAE}::test_equals_upstream[2.1-degrees1-2-2-4-9]",
)
NNX_CHIPS = f"{NNX}::test_equals_upstream[2.1-mesh1-2-2-1-9]"
HUNYUAN_NNX_CHIPS = f"{HUNYUAN_NNX}::test_equals_upstream[mesh1-2-5-2-9]"
IN_FLOAT32 = "R, b = (part if part.dtype == torch.float64 else part.float() for part in (R, b))\n"

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "video/chunks.py",
        ("chunks-dropped", "dropped = outs.shape[axis + 1] - 1", "dropped = outs.shape[axis + 1] - 2",
         "one frame too many is kept of the first chunk", FEW_CHIPS),
        ("chunks-padding", "[(size - 1, 0) if a == axis", "[(0, size - 1) if a == axis",
         "zeros follow the first frame in place of coming before it", FEW_CHIPS),
    ),
    *in_file(
        MODELS + "autoencoders/autoencoder_kl_hunyuanvideo15_flax.py",
        ("hunyuan-history", "self.or_first(before, x[:, :, :1])", "before",
         "before the first frame lie zeros, not the frame", f"{HUNYUAN_VAE}::test_equals_upstream"),
        ("hunyuan-first", "return chunk.or_first(rest, first)", "return rest",
         "the first frame is doubled as the others are", f"{HUNYUAN_VAE}::test_equals_upstream"),
    ),
    *in_file(
        MODELS + "transformers/transformer_hunyuan_video_flax.py",
        ("hunyuan-tables", "columns += dim", "columns += 0", "all axes turn by the first one's angles",
         "test_hunyuan_video.py::test_rotation_by_axis_is_upstreams_bit_for_bit"),
        ("hunyuan-fill", "hidden_states.shape[1] - current().fill", "hidden_states.shape[1]",
         "the text's mask is read beside its place", "test_hunyuan_video.py::test_the_transformer_equals_upstreams"),
    ),
    *in_file(
        TPU + "video/slabs.py",
        ("slabs-fill", "jnp.where(place <= last, x, beyond)", "jnp.where(place <= last + 1, x, beyond)",
         "a column beyond the map is read as part of it", (MORE_CHIPS, FEW_CHIPS, NNX_CHIPS)),
        ("slabs-neighbour", "[(i, i + 1) for i in range(self.count - 1)]", "[(i + 1, i) for i in range(self.count - 1)]",
         "the neighbour on the wrong side sends its edge", MORE_CHIPS),
        ("slabs-repeated", "jnp.where(last < local, own, edge)", "edge",
         "beyond the map lie zeros where its edge should be repeated", f"{HUNYUAN_VAE}::test_equals_upstream"),
        ("slabs-frames", "return k, v, np.tile((column < self.columns(local)).reshape(1, 1, 1, -1), frames)",
         "return k, v, np.repeat((column < self.columns(local)).reshape(1, 1, 1, -1), frames)",
         "columns that are not the map's are those of other frames", f"{HUNYUAN_VAE}::test_equals_upstream"),
        ("slabs-keys", "np.tile((column < self.columns(local)).reshape(1, 1, 1, -1), frames)", "None",
         "attention sees keys that are no part of the map", (MORE_CHIPS, FEW_CHIPS)),
    ),
    *in_file(
        TPU + "video/tiles.py",
        ("tiles-faded", "(old * (1 - weight) + new * weight)", "(old * weight + new * (1 - weight))",
         "tiles fade into each other the wrong way", f"{NNX}::test_tiles_equal_upstream"),
        ("tiles-weight", "jnp.arange(overlap, dtype=jnp.float32) / overlap", "jnp.arange(1, overlap + 1, dtype=jnp.float32) / overlap",
         "an off-by-one in how tiles fade", f"{NNX}::test_tiles_equal_upstream"),
    ),
    *in_file(
        TPU + "video/convolution.py",
        ("convolution-product", '"high": ((0, 0), (1, 0), (0, 1)),', '"high": ((0, 0), (1, 0)),',
         "one of three products is left out", f"{VAE}::test_float32_by_products_of_bfloat16"),
        ("convolution-bias", "return y if b is None else y + b", "return y", "the bias is forgotten", FEW_CHIPS),
        ("convolution-tap", "y[:, tap : tap + columns,", "y[:, taps - 1 - tap : taps - 1 - tap + columns,",
         "taps along the width are mirrored", FEW_CHIPS),
    ),
    *in_file(
        TPU + "bridge/layers.py",
        ("layers-again", "return fast_linear(x, w, b, activation, settings, gate, residual)",
         "return fast_linear(x, w, b, activation, current(), gate, residual)",
         "what follows a layer that is whole on every chip runs split", f"{LINEAR}::test_what_is_whole_on_every_chip_stays_so_with_what_follows"),
        ("layers-bias", "result = result if b is None else result + b", "result = result * 1.0",
         "the bias is forgotten", f"{BRIDGE}::test_products_round_once"),
        ("layers-written-padding", "made_by is operator and x.jax() is array", "made_by is operator",
         "what was written to padding, or to a layer's result, is not seen",
         "test_linear.py::test_a_gate_and_a_residual_after_a_layer_are_the_layers"),
        ("layers-scaled", "if kwargs or not (isinstance", "if not (isinstance",
         "alpha is forgotten where a layer's result is added", "test_linear.py::test_a_gate_and_a_residual_after_a_layer_are_the_layers"),
        ("layers-gate-shape", "or gate.shape[1] != 1 or", "or",
         "a gate of each token is taken for one of all", "test_linear.py::test_a_gate_and_a_residual_after_a_layer_are_the_layers"),
    ),
    *in_file(
        TPU + "bridge/operators.py",
        ("operators-dtype", "array = x.jax() if dtype is None else x.jax().astype(mappings.t2j_dtype(dtype))",
         "array = x.jax()", "a sum forgets the dtype asked for", f"{BRIDGE}::test_reductions_in_the_dtype_asked_for"),
        ("operators-gather", "(narrow,) = operands(index, _expand) or (indices,)", "narrow = indices",
         "rows are gathered entry by entry", f"{BRIDGE}::test_gather"),
        ("operators-norm", "x = x - x.mean(axes, keepdims=True)\n", "",
         "a layer norm without its mean", f"{BRIDGE}::test_norms"),
        ("operators-lead", "jnp.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])", "q.shape[:-3]",
         "leading axes of keys are not those of queries",
         f"{BRIDGE}::test_one_batch_of_queries_looks_at_keys_of_several"),
    ),
    *in_file(
        FLAX + "flax.py",
        ("vae-history", "feat_cache[slot] = torch.where(_number.get() > 0, kept, 0)", "feat_cache[slot] = kept",
         "the first frame is history to the frames after it", FEW_CHIPS),
        ("vae-history-end", "[:, :, -HISTORY:]", "[:, :, :HISTORY]", "the oldest frames are kept, not the last", FEW_CHIPS),
        ("vae-multiple", "multiple=vae.spatial_compression_ratio // patch", "multiple=1",
         "slabs are cut where halving does not go", (MORE_CHIPS, FEW_CHIPS)),
        ("vae-overlap", "overlaps=tuple(size // patch - stride // patch", "overlaps=tuple(size // patch - stride // patch - 1",
         "an off-by-one where tiles overlap", f"{VAE}::test_tiles_equal_upstream"),
        ("vae-first-frame", "return torch.where((_number.get() > 0) | _is_last(x.shape[2]), x, 0)", "return x",
         "what is before the first frame is not zero", FEW_CHIPS),
    ),
    *in_file(
        TPU + "video/nnx/layers.py",
        ("nnx-norm", " * x.shape[-1] ** 0.5 * self.gamma[...]", " * self.gamma[...]", "a factor is forgotten", NNX_CHIPS),
        ("nnx-bias", "return (y + b).astype(x.dtype).reshape", "return y.astype(x.dtype).reshape",
         "the bias of strided convolutions is forgotten", NNX_CHIPS,),
        ("nnx-edge", 'mode="edge"', 'mode="constant"',
         "above and below the map lie zeros where its edge should be repeated", HUNYUAN_NNX_CHIPS),
    ),
    *in_file(
        TPU + "video/nnx/weights.py",
        ("nnx-missing", '("missing", sorted(wanted.keys() - tensors.keys())),', "",
         "a missing weight is not named", "test_vae_nnx.py::test_bad_files_are_named"),
    ),
    *in_file(
        FLAX + "nnx_layers_flax.py",
        ("nnx-first-frame", "return jnp.where(self.number > 0, x, 0)", "return x",
         "the first frame is history to the frames after it", NNX_CHIPS),
        ("nnx-average", "[(0, 0), (-x.shape[1] % time, 0), (0, 0), (0, 0), (0, 0)]",
         "[(0, 0), (0, -x.shape[1] % time), (0, 0), (0, 0), (0, 0)]",
         "frames are padded behind, not before", f"{NNX}::test_equals_upstream[2.2-mesh4-2-1-3-2]"),
    ),
    *in_file(
        MODELS + "autoencoders/autoencoder_kl_hunyuanvideo15_nnx_flax.py",
        ("hunyuan-nnx-history", "else self.or_first(kept, first)", "else kept",
         "before the first frame lie zeros, not the frame", HUNYUAN_NNX_CHIPS),
        ("hunyuan-nnx-first", "chunk.or_first(spread(y, 2) + repeated(spread(x, 2), self.features), first)",
         "spread(y, 2) + repeated(spread(x, 2), self.features)",
         "the first frame is doubled as the others are", HUNYUAN_NNX_CHIPS),
        ("hunyuan-nnx-half", "spread(y[:, -1:])[..., : self.features]", "spread(y[:, -1:])[..., self.features :]",
         "of the first frame's channels the other half is taken", HUNYUAN_NNX_CHIPS),
        ("hunyuan-nnx-packed", "x.transpose(0, 1, 3, 5, 2, 4, 6, 7)", "x.transpose(0, 1, 3, 5, 2, 6, 4, 7)",
         "rows and columns of a block change places", HUNYUAN_NNX_CHIPS),
        ("hunyuan-nnx-gaps", "if not 0 < strides[0] or len({*strides, *kept}) > 1:", "if not 0 < strides[0]:",
         "tiles that leave gaps are taken", f"{HUNYUAN_NNX}::test_sizes_and_tiles_that_the_model_cannot_take_are_refused"),
    ),
    *in_file(
        MODELS + "transformers/transformer_wan_flax.py",
        ("wan-norm", "normed_and_rotated(key, attn.norm_k,", "normed_and_rotated(key, attn.norm_q,",
         "keys go through the norm of queries", f"{LINEAR}::test_wans_transformer_by_all_kernels"),
        ("wan-rule", r'(r"attn[12]\.to_out\.0\.weight$", P(STORED, "tp")),', r'(r"attn[12]\.to_out\.0\.weight$", P("tp", STORED)),',
         "a spec with the wrong axis", "test_program.py::test_tensor_parallel_reduces_the_two_sums_it_must"),
        ("wan-carry", 'carry=P("dp", "sp", None),', 'carry=P("dp", None, None),',
         "activations lie whole on every chip", "test_program.py::test_activations_in_the_block_are_split_over_the_sequence"),
    ),
    *in_file(
        MODELS + "transformers/transformer_wan_vace_flax.py",
        ("vace-batched", '(*transformer_wan_flax.PLAN.batched, "control_hidden_states")', "transformer_wan_flax.PLAN.batched",
         "a branch's control is taken for both branches'", "test_wan_pipelines.py::test_video_equals_upstreams[vace-2x4x1-height]"),
    ),
    *in_file(
        MODELS + "transformers/transformer_hunyuan_video15_flax.py",
        ("hunyuan15-decided", "not bool(tensor.any())", "bool(tensor.any())",
         "a swapped branch", "test_pipeline.py::test_video_equals_upstreams[one chip-hunyuan15_i2v]"),
    ),
    *in_file(
        MODELS + "transformers/transformer_hunyuan_video15.py",
        ("patch-0002-is-t2v", "        if is_t2v is None:\n            is_t2v = torch.all(image_embeds == 0)",
         "        is_t2v = torch.all(image_embeds == 0)",
         "the caller's word is not taken", f"{HUNYUAN}::test_hunyuan15_is_t2v_overrules_the_values"),
        ("patch-0003-zeroed",
         "encoder_hidden_states_2 = encoder_hidden_states_2.masked_fill(~encoder_attention_mask_2.unsqueeze(-1), 0.0)",
         "encoder_hidden_states_2 = encoder_hidden_states_2 * 1",
         "padding that is not a number goes on", f"{HUNYUAN}::test_hunyuan15_padding_that_is_not_a_number_is_zeroed"),
        ("patch-0003-order", "[encoder_hidden_states_3, encoder_hidden_states_2, encoder_hidden_states], dim=1",
         "[encoder_hidden_states_2, encoder_hidden_states_3, encoder_hidden_states], dim=1",
         "tokens in another order than their mask", f"{HUNYUAN}::test_hunyuan15_equals_upstream"),
    ),
    *in_file(
        "src/diffusers/schedulers/scheduling_unipc_multistep.py",
        ("patch-0004-corrector", f"        {IN_FLOAT32}\n        if len(D1s) > 0:\n            D1s = torch.stack(D1s, dim=1)\n",
         "\n        if len(D1s) > 0:\n            D1s = torch.stack(D1s, dim=1)\n",
         "a dropped conversion: the corrector solves in bfloat16", f"{SCHEDULERS}::test_bfloat16_sigmas_are_solved_in_float32"),
    ),
    *in_file(
        "src/diffusers/schedulers/scheduling_helios.py",
        ("patch-0005-corrector", f"        {IN_FLOAT32}\n        if len(D1s) > 0:\n            D1s = torch.stack(D1s, dim=1)\n",
         "\n        if len(D1s) > 0:\n            D1s = torch.stack(D1s, dim=1)\n",
         "a dropped conversion: the corrector solves in bfloat16", f"{SCHEDULERS}::test_bfloat16_sigmas_are_solved_in_float32"),
    ),
    *in_file(
        MODELS + "attention_dispatch.py",
        ("patch-0001-kernel", 'kernel=_backend.value.removeprefix("tpu").removeprefix("_") or None,', "kernel=None,",
         "a kernel asked for by name is not the one that runs", f"{DISPATCHER}::test_every_argument_reaches_the_tpu"),
    ),
]
