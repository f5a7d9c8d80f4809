"""Wan's VAE in pure JAX: Flax NNX, channels last, from the files of upstream's `AutoencoderKLWan`, with its results.

    vae = FlaxAutoencoderKLWan.from_pretrained("Wan-AI/Wan2.1-T2V-14B-Diffusers", subfolder="vae", dtype=jnp.bfloat16)
    latents = vae.encode(video).mode()      # video [B, F, H, W, 3] in [-1, 1]
    video = vae.decode(latents)

One program per shape and settings: the loop over frames is one scan, each chip computes a slab of the width with its
neighbours' edge columns, prompts lie over `dp`. As with upstream's, latents are the model's own: a caller that needs them
normalised uses `config.latents_mean` and `config.latents_std`.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from ...tpu.config import TPUConfig, parse_mesh, read_environment
from ...tpu.devices import find_target, generation_of, jax_devices, keep_compiled_programs
from ...tpu.mesh import AXES, make_mesh, plan_degrees
from ...tpu.settings import Settings, using
from ...tpu.sharding import default_spec, fit, named
from ...tpu.video.chunks import scan_chunks
from ...tpu.video.slabs import over_width
from ...tpu.video.tiles import in_tiles
from .autoencoder_kl_wan import AutoencoderKLWan
from .autoencoder_kl_wan_flax import FRAMES, decode_tiling, encode_tiling
from .autoencoder_kl_wan_nnx_layers_flax import Chunk, Conv, Decoder, Encoder
from .autoencoder_kl_wan_nnx_weights_flax import load_weights, open_files, open_module, whole_config


Video = Float[Array, "B F H W 3"]
Latents = Float[Array, "B f h w C"]

DTYPES = ("float32", "bfloat16")
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
LOGVAR_RANGE = (-30.0, 20.0)  # upstream's


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiagonalGaussian:
    """What a video is encoded to: `parameters` [B, f, h, w, 2 C], means and then logarithms of variances."""

    parameters: jax.Array

    @property
    def mean(self) -> Latents:
        return jnp.split(self.parameters, 2, -1)[0]

    @property
    def logvar(self) -> Latents:
        return jnp.clip(jnp.split(self.parameters, 2, -1)[1], *LOGVAR_RANGE)

    @property
    def std(self) -> Latents:
        return jnp.exp(0.5 * self.logvar)

    def mode(self) -> Latents:
        return self.mean

    def sample(self, key: jax.Array) -> Latents:
        """`key`: of `jax.random`."""
        return self.mean + self.std * jax.random.normal(key, self.mean.shape, self.mean.dtype)


class FlaxAutoencoderKLWan(nnx.Module):
    """Both generations of Wan's VAE: 2.1, and 2.2 with its residual blocks and patches.

    Args:
        config: as in upstream's config.json; what is left out is upstream's default.
        dtype: of weights and activations, float32 or bfloat16. Sums of products are float32.
        mesh: of chips, with the axes dp, sp, tp, or these three degrees. None: all chips of the TPU path (those of
            `DIFFUSERS_TPU_MESH`), else JAX's first device.
        convolution_precision: as `TPUConfig`'s.
        rngs: for weights from scratch; see `from_pretrained` and `from_torch` for those there are.

    Raises ValueError for a config, dtype, mesh or precision that cannot be.
    """

    def __init__(
        self,
        config: dict,
        *,
        dtype=jnp.float32,
        mesh: Mesh | tuple[int, int, int] | None = None,
        convolution_precision: str = TPUConfig.convolution_precision,
        rngs: nnx.Rngs,
    ):
        self.dtype = jnp.dtype(dtype)
        if self.dtype.name not in DTYPES:
            raise ValueError(f"expected a dtype among {', '.join(DTYPES)}, got {self.dtype.name}")
        self.config = whole_config(config)
        self.mesh = _mesh_of(mesh)
        self.convolution_precision = TPUConfig(convolution_precision=convolution_precision).convolution_precision
        self.spatial_compression_ratio = self.config.scale_factor_spatial
        self.use_slicing = self.use_tiling = False
        self.tile_sample_min_height = self.tile_sample_min_width = 256  # upstream's
        self.tile_sample_stride_height = self.tile_sample_stride_width = 192
        how, channels = {"dtype": self.dtype, "rngs": rngs}, self.config.z_dim
        self.encoder = Encoder(self.config, **how)
        self.quant_conv = Conv(2 * channels, 2 * channels, (1, 1, 1), **how)
        self.post_quant_conv = Conv(channels, channels, (1, 1, 1), **how)
        self.decoder = Decoder(self.config, **how)

    # Where the weights come from

    @classmethod
    def abstract(cls, config: dict, **settings) -> "FlaxAutoencoderKLWan":
        """The module with shapes in place of weights, as they would lie on the mesh. `settings` as for the class."""
        vae = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **settings))

        def placed(weight):
            sharding = named(vae.mesh, default_spec(weight.shape, vae.mesh))
            return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)

        nnx.update(vae, jax.tree.map(placed, nnx.state(vae)))
        return vae

    @classmethod
    def from_pretrained(
        cls,
        path_or_id,
        subfolder: str | None = None,
        *,
        dtype=jnp.float32,
        mesh=None,
        variant: str | None = None,
        **others,
    ) -> "FlaxAutoencoderKLWan":
        """The VAE of a directory or a hub's repository in diffusers layout, sharded files included.

        Args:
            dtype, mesh, and of `others` convolution_precision: as for the class.
            variant: of the files' names, as upstream's.
            others: for the hub, as upstream's: those of `HUB`.

        Raises:
            ValueError: a config of another model; weights that are missing, not known or of other shapes; a broken file.
            OSError: no such directory, repository or file.
            TypeError: an argument that is not known.
        """
        hub = {name: others.pop(name) for name in HUB if name in others}
        if unknown := others.keys() - {"convolution_precision"}:
            raise TypeError(
                f"expected of arguments dtype, mesh, convolution_precision, {', '.join(HUB)}, got {unknown}"
            )
        config, tensors = open_files(path_or_id, subfolder, variant, hub)
        vae = cls.abstract(config, dtype=dtype, mesh=mesh, **others)
        return load_weights(vae, tensors, str(path_or_id))

    @classmethod
    def from_torch(cls, vae: AutoencoderKLWan, **settings) -> "FlaxAutoencoderKLWan":
        """The VAE with the weights of upstream's. `settings` as for `from_pretrained`."""
        return load_weights(cls.abstract(dict(vae.config), **settings), open_module(vae), type(vae).__name__)

    # Tiles and slices

    def enable_tiling(
        self,
        tile_sample_min_height: int | None = None,
        tile_sample_min_width: int | None = None,
        tile_sample_stride_height: int | None = None,
        tile_sample_stride_width: int | None = None,
    ):
        """Larger maps go in overlapping tiles, which the chips share; sizes and strides in pixels, None: as they are.

        Raises ValueError for a stride that is less than a latent or more than its tile.
        """
        height = tile_sample_min_height or self.tile_sample_min_height
        width = tile_sample_min_width or self.tile_sample_min_width
        strides = (
            tile_sample_stride_height or self.tile_sample_stride_height,
            tile_sample_stride_width or self.tile_sample_stride_width,
        )
        for size, stride in zip((height, width), strides):
            if not self.spatial_compression_ratio <= stride <= size:
                raise ValueError(
                    f"expected strides of {self.spatial_compression_ratio} pixels at least, and of a tile at most, got"
                    f" strides {strides} of tiles {(height, width)}"
                )
        self.use_tiling = True
        self.tile_sample_min_height, self.tile_sample_min_width = height, width
        self.tile_sample_stride_height, self.tile_sample_stride_width = strides

    def disable_tiling(self):
        self.use_tiling = False

    def enable_slicing(self):
        """The videos of a batch go one after another."""
        self.use_slicing = True

    def disable_slicing(self):
        self.use_slicing = False

    # Encoding and decoding

    def encode(self, video: Video) -> DiagonalGaussian:
        """The latents' distribution of videos in [-1, 1]. Frames after the last whole four are left out, as upstream does.

        Raises ValueError for a shape, or tiles, that the model cannot take.
        """
        self._check("video", video, self.config.in_channels // (self.config.patch_size or 1) ** 2)
        ratio = self.spatial_compression_ratio
        height, width = video.shape[2:4]
        if min(height, width) < ratio or (self.config.is_residual and (height % ratio or width % ratio)):
            multiples = "multiples of" if self.config.is_residual else "at least"
            raise ValueError(f"expected a height and width of {multiples} {ratio}, got {height} x {width}")
        return DiagonalGaussian(self._run("_encode", video))

    def decode(self, latents: Latents) -> Video:
        """Videos in [-1, 1] of latents: 4 f - 3 frames.

        Raises ValueError for a shape that the model cannot take.
        """
        self._check("latents", latents, self.config.z_dim)
        return self._run("_decode", latents)

    def lower(self, entry: str, shape: tuple[int, ...]) -> jax.stages.Lowered:
        """The program of `entry`, "encode" or "decode", for an input of this shape; an abstract module will do."""
        graphdef, state = nnx.split(self)
        x = jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._spread(shape))
        return _program.lower(graphdef, state, x, f"_{entry}")

    def _check(self, name: str, x, channels: int):
        if x.ndim != 5 or x.shape[-1] != channels or 0 in x.shape:
            raise ValueError(
                f"expected {name} [batch, frames, height, width, {channels}], channels last, got {list(x.shape)}"
            )

    def _run(self, entry: str, x) -> jax.Array:
        graphdef, state = nnx.split(self)
        parts = [x[n : n + 1] for n in range(len(x))] if self.use_slicing else [x]
        parts = [part if isinstance(part, jax.Array) else np.asarray(part) for part in parts]
        parts = [jax.device_put(part.astype(self.dtype), self._spread(part.shape)) for part in parts]
        outs = [_program(graphdef, state, part, entry) for part in parts]
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs)

    def _spread(self, shape: tuple[int, ...]):
        """An input's width over all chips where they divide it."""
        return named(self.mesh, fit(PartitionSpec(None, None, None, AXES, None), shape, self.mesh))

    def _decode(self, z: Latents) -> Video:
        tiling = decode_tiling(self, *z.shape[2:4])
        if self.use_tiling and _exceeds(z.shape[2:4], tiling):
            x = in_tiles(self._decode_map, z, tiling, axis=3)
        else:
            x = over_width(self._decode_map, z, axis=3)
        return jnp.clip(_from_patches(x, self.config.patch_size or 1), -1, 1)

    def _encode(self, x: Video) -> Latents:
        height, width = x.shape[2:4]
        patch = self.config.patch_size or 1
        patches = _to_patches(x, patch)
        tiling = encode_tiling(self, *patches.shape[2:4])
        if self.use_tiling and _exceeds((height, width), tiling):
            self._check_tiles(patches.shape[2:4], tiling, patch)
            return in_tiles(self._encode_map, patches, tiling, axis=3)
        return over_width(self._encode_map, patches, self.spatial_compression_ratio // patch, axis=3)

    def _check_tiles(self, size: tuple[int, int], tiling, patch: int):
        """The last tiles of a video are what its strides leave."""
        ratio = self.spatial_compression_ratio // patch
        rests = [(length - 1) % stride + 1 for length, stride in zip(size, tiling.strides)]
        if min(rests) < ratio or (self.config.is_residual and any(n % ratio for n in (*rests, *tiling.sizes))):
            multiples = "multiples of" if self.config.is_residual else "at least"
            raise ValueError(
                f"expected tiles of {multiples} {ratio * patch} pixels, got tiles of {[n * patch for n in tiling.sizes]} and"
                f" {[n * patch for n in rests]}, which the strides leave: enable_tiling(...) takes others"
            )

    def _decode_map(self, z: Latents) -> jax.Array:
        return scan_chunks(_step(self.decoder), self.post_quant_conv(z), 1, [])

    def _encode_map(self, x: jax.Array) -> Latents:
        whole = 1 + (x.shape[1] - 1) // FRAMES * FRAMES
        return self.quant_conv(scan_chunks(_step(self.encoder), x[:, :whole], FRAMES, []))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _program(graphdef, state, x: jax.Array, entry: str) -> jax.Array:
    """What is compiled, once for modules that are alike."""
    vae = nnx.merge(graphdef, state)
    device = vae.mesh.devices.flat[0]
    settings = Settings(
        mesh=vae.mesh,
        sequence=False,
        platform=device.platform,
        generation=generation_of(device),
        convolutions=vae.convolution_precision,
    )
    with using(settings):
        return getattr(vae, entry)(x)


def _step(layers):
    def step(frames, kept, number):
        chunk = Chunk(number, kept)
        return layers(frames, chunk), chunk.keeps

    return step


def _exceeds(size: tuple[int, int], tiling) -> bool:
    return any(length > tile for length, tile in zip(size, tiling.sizes))


def _to_patches(x: Video, patch: int) -> jax.Array:
    """[B, F, H, W, C] -> [B, F, H / p, W / p, C p p]: of each channel's patch column by column, upstream's order."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height // patch, patch, width // patch, patch, channels)
    return x.transpose(0, 1, 2, 4, 6, 5, 3).reshape(batch, frames, height // patch, width // patch, -1)


def _from_patches(x: jax.Array, patch: int) -> Video:
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height, width, -1, patch, patch).transpose(0, 1, 2, 6, 3, 5, 4)
    return x.reshape(batch, frames, height * patch, width * patch, -1)


def _mesh_of(mesh: Mesh | tuple[int, int, int] | None) -> Mesh:
    if isinstance(mesh, Mesh):
        if mesh.axis_names != AXES:
            raise ValueError(f"expected a mesh with the axes {', '.join(AXES)}, got {mesh.axis_names}")
        return mesh
    environment = read_environment()
    target = find_target(environment)
    if target is not None:
        devices = jax_devices(target)
        keep_compiled_programs(environment.cache_dir)
    else:
        devices = tuple(jax.devices() if mesh is not None else jax.devices()[:1])
    wanted = environment.mesh if mesh is None else parse_mesh(mesh)
    return make_mesh(devices, plan_degrees(len(devices), wanted, paired=False))
