"""The class of video VAEs in Flax NNX, `VideoAutoencoder`: from upstream's config and files, with its results.

One program per shape and settings: each chip computes a shard of the width with a halo of its neighbours' columns, and prompts
are sharded over `dp`. Latents are not normalised, as upstream's; the config has the figures for that.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ...tpu.chips.devices import find_target, jax_devices, keep_compiled_programs
from ...tpu.chips.figures import generation_of
from ...tpu.chips.mesh import AXES, make_mesh, plan_degrees
from ...tpu.chips.sharding import default_spec, fit
from ...tpu.common.config import TPUConfig, parse_mesh, read_environment
from ...tpu.kernels.settings import Settings, using
from ...tpu.kernels.video.halo import shard_width
from ...tpu.kernels.video.tiles import Tiling, in_tiles
from .vae_nnx_weights_flax import load_weights, open_files, whole_config


Video = Float[Array, "B F H W 3"]
Latents = Float[Array, "B f h w C"]

DTYPES = ("float32", "bfloat16")
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiagonalGaussian:
    """The latents' distribution of a video: `parameters` [B, f, h, w, 2 C], means and then logarithms of variances."""

    parameters: jax.Array

    @property
    def mean(self) -> Latents:
        return jnp.split(self.parameters, 2, -1)[0]

    @property
    def logvar(self) -> Latents:
        return jnp.clip(jnp.split(self.parameters, 2, -1)[1], -30.0, 20.0)  # upstream's

    @property
    def std(self) -> Latents:
        return jnp.exp(0.5 * self.logvar)

    def mode(self) -> Latents:
        return self.mean

    def sample(self, key: jax.Array) -> Latents:
        """`key`: of `jax.random`."""
        return self.mean + self.std * jax.random.normal(key, self.mean.shape, self.mean.dtype)


class VideoAutoencoder(nnx.Module):
    """A VAE of videos. A model's subclass makes `encoder` and `decoder`; its `_encode_map` and `_decode_map` compute a map,
    its `_check_tiling` gets all arguments of upstream's `enable_tiling`.

    Args:
        config: as in upstream's config.json; keys that it lacks have upstream's default.
        dtype: of weights and activations, float32 or bfloat16. Sums of products are float32.
        mesh: of chips, with the axes dp, sp, tp, or these three degrees. None: all chips of the TPU path, else JAX's first device.
        convolution_precision: as `TPUConfig`'s.
        rngs: of a model's subclass, for random weights.

    Attributes:
        upstream: the class whose config and weights it takes.
        names: from a weight's path to its name in upstream's files, as `torch_name` takes them.
        spatial_compression_ratio, temporal_compression_ratio: pixels and, after the first, frames per latent.
        in_multiples: heights and widths of a video, and of its tiles, are multiples of the ratio.
        tiling: (the VAE, height, width, encode) -> `Tiling`, of latents of this size; to `encode`, of a video in its patches.
        patch: pixels of a patch's side.

    Raises ValueError for a config, dtype, mesh or precision that is not supported.
    """

    upstream: ClassVar[type]
    names: ClassVar[tuple[tuple[str, str], ...]]
    tiling: ClassVar[Callable]
    patch: int = 1

    def __init__(
        self,
        config: dict,
        *,
        dtype=jnp.float32,
        mesh: Mesh | tuple[int, int, int] | None = None,
        convolution_precision: str = TPUConfig.convolution_precision,
    ):
        self.dtype = jnp.dtype(dtype)
        if self.dtype.name not in DTYPES:
            raise ValueError(f"expected a dtype among {', '.join(DTYPES)}, got {self.dtype.name}")
        self.config = whole_config(self.upstream, config)
        self.mesh = _mesh_of(mesh)
        self.convolution_precision = TPUConfig(convolution_precision=convolution_precision).convolution_precision
        self.use_slicing = self.use_tiling = False
        self.tile_sample_min_height = self.tile_sample_min_width = 256  # upstream's

    @classmethod
    def abstract(cls, config: dict, **settings) -> Self:
        """The module with shapes in place of weights, with their shardings on the mesh. `settings` as for the class."""
        vae = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **settings))

        def placed(weight):
            sharding = NamedSharding(vae.mesh, default_spec(weight.shape, vae.mesh))
            return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)

        nnx.update(vae, jax.tree.map(placed, nnx.state(vae)))
        return vae

    @classmethod
    def from_pretrained(
        cls, path_or_id, subfolder: str | None = None, *, dtype=jnp.float32, mesh=None, variant=None, **others
    ) -> Self:
        """The VAE of a directory or a hub's repository in diffusers layout, sharded files included.

        Args:
            dtype, mesh, and of `others` convolution_precision: as for the class.
            variant, and of `others` those of `HUB`: as upstream's.

        Raises:
            ValueError: a config of another model; weights that are missing, unknown or of other shapes; a broken file.
            OSError: no such directory, repository or file.
            TypeError: an unknown argument.
        """
        hub = {name: others.pop(name) for name in HUB if name in others}
        if unknown := others.keys() - {"convolution_precision"}:
            known = ", ".join(("dtype", "mesh", "convolution_precision", *HUB))
            raise TypeError(f"expected of arguments {known}, got {unknown}")
        config, tensors = open_files(cls.upstream, path_or_id, subfolder, variant, hub)
        vae = cls.abstract(config, dtype=dtype, mesh=mesh, **others)
        return load_weights(vae, cls.names, tensors, str(path_or_id))

    @classmethod
    def from_torch(cls, vae: torch.nn.Module, **settings) -> Self:
        """The VAE with the weights of upstream's. `settings` as for `from_pretrained`."""
        ours = cls.abstract(dict(vae.config), **settings)
        return load_weights(ours, cls.names, vae.state_dict(), type(vae).__name__)

    def enable_tiling(self, *args, **kwargs):
        """Larger maps are computed in overlapping tiles, which the chips share. Arguments: those of upstream's; None: unchanged.

        Raises ValueError for tiles that the model does not support.
        """
        takes = inspect.signature(self.upstream.enable_tiling)
        given = takes.bind(self, *args, **kwargs).arguments
        tiles = {name: given.get(name) or getattr(self, name) for name in [*takes.parameters][1:]}
        self._check_tiling(*tiles.values())
        self.use_tiling = True
        for name, size in tiles.items():
            setattr(self, name, size)

    def disable_tiling(self):
        self.use_tiling = False

    def enable_slicing(self):
        """Compute the videos of a batch one after another."""
        self.use_slicing = True

    def disable_slicing(self):
        self.use_slicing = False

    def encode(self, video: Video) -> DiagonalGaussian:
        """The latents' distribution of videos in [-1, 1]. Raises ValueError for a shape or tiles that are not supported."""
        self._check("video", video, self.video_channels)
        self._check_video(*video.shape[1:4])
        return DiagonalGaussian(self._run("_encode", video))

    def decode(self, latents: Latents) -> Video:
        """Videos of latents: the first latent frame gives one frame, each other one several. Raises ValueError as `encode`."""
        self._check("latents", latents, self.latent_channels)
        return self._run("_decode", latents)

    def lower(self, entry: str, shape: tuple[int, ...]) -> jax.stages.Lowered:
        """The program of `entry`, "encode" or "decode", for an input of this shape; an abstract module suffices."""
        graphdef, state = nnx.split(self)
        x = jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._spread(shape))
        return _program.lower(graphdef, state, x, f"_{entry}")

    def traceable(self, entry: str) -> tuple[nnx.State, Callable[[nnx.State, jax.Array], jax.Array]]:
        """(the weights, a function of weights and input that traces the program of `entry` anew)."""
        graphdef, state = nnx.split(self)
        return state, lambda state, x: _program.__wrapped__(graphdef, state, x, f"_{entry}")

    def _check(self, name: str, x, channels: int):
        if x.ndim != 5 or x.shape[-1] != channels or 0 in x.shape:
            wanted = f"[batch, frames, height, width, {channels}], channels last"
            raise ValueError(f"expected {name} {wanted}, got {list(x.shape)}")

    def _check_video(self, frames: int, height: int, width: int):
        """Raises ValueError for a size that the model does not support."""
        ratio = self.spatial_compression_ratio
        if min(height, width) < ratio or (self.in_multiples and (height % ratio or width % ratio)):
            multiples = "multiples of" if self.in_multiples else "at least"
            raise ValueError(f"expected a height and width of {multiples} {ratio}, got {height} x {width}")

    def _run(self, entry: str, x) -> jax.Array:
        graphdef, state = nnx.split(self)
        parts = [x[n : n + 1] for n in range(len(x))] if self.use_slicing else [x]
        parts = [part if isinstance(part, jax.Array) else np.asarray(part) for part in parts]
        parts = [jax.device_put(part.astype(self.dtype), self._spread(part.shape)) for part in parts]
        outs = [_program(graphdef, state, part, entry) for part in parts]
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs)

    def _spread(self, shape: tuple[int, ...]):
        """The sharding of an input: its width over all chips if they divide it."""
        return NamedSharding(self.mesh, fit(PartitionSpec(None, None, None, AXES, None), shape, self.mesh))

    def _decode(self, z: Latents) -> jax.Array:
        """Decodes latents in tiles if tiling is on and they are larger than a tile, else one shard per chip."""
        tiling = self.tiling(*z.shape[2:4])
        if self.use_tiling and tiling.cuts(*z.shape[2:4]):
            return in_tiles(self._decode_map, z, tiling, axis=3)
        return shard_width(self._decode_map, z, axis=3)

    def _encode(self, x: jax.Array) -> Latents:
        """As `_decode`, of a video in its patches."""
        tiling = self.tiling(*x.shape[2:4], encode=True)
        if self.use_tiling and tiling.cuts(*x.shape[2:4]):
            self._check_tiles(x.shape[2:4], tiling)
            return in_tiles(self._encode_map, x, tiling, axis=3)
        return shard_width(self._encode_map, x, self.spatial_compression_ratio // self.patch, axis=3)

    def _check_tiles(self, size: tuple[int, int], tiling: Tiling):
        """Raises ValueError for tiles that the model does not support, also the last ones, which may be smaller."""
        patch, ratio = self.patch, self.spatial_compression_ratio // self.patch
        rests = [(length - 1) % stride + 1 for length, stride in zip(size, tiling.strides)]
        if min(rests) < ratio or (self.in_multiples and any(n % ratio for n in (*rests, *tiling.sizes))):
            multiples = "multiples of" if self.in_multiples else "at least"
            raise ValueError(
                f"expected tiles of {multiples} {ratio * patch} pixels, got tiles of {[n * patch for n in tiling.sizes]} and"
                f" {[n * patch for n in rests]}, which the strides leave: enable_tiling(...) takes others"
            )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _program(graphdef, state, x: jax.Array, entry: str) -> jax.Array:
    """The compiled function; equal modules share a program."""
    vae = nnx.merge(graphdef, state)
    device = vae.mesh.devices.flat[0]
    chip = {"platform": device.platform, "generation": generation_of(device)}
    with using(Settings(mesh=vae.mesh, sequence=False, convolutions=vae.convolution_precision, **chip)):
        return getattr(vae, entry)(x)


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
    return make_mesh(devices, plan_degrees(len(devices), wanted))
