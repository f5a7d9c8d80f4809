"""Shared by VAEs on TPU: maps are sharded over their width, or computed in upstream's tiles.

A whole map is sharded over the chips, with halos of their neighbours' columns (`tracing.shard_width`). With tiling on, the equal
tiles of a larger map are one mapped program, which chips share (`tracing.in_tiles`).
"""

import functools
import inspect
import types
from collections.abc import Callable

from ...tpu.chips.sharding import ModelPlan
from ...tpu.kernels.video.tiles import Tiling
from .vae import DecoderOutput


def tracing() -> types.ModuleType:
    """`compile.tracing.video`, imported where a map is traced: it brings torchax, without which forms in plain JAX do."""
    from ...tpu.compile.tracing import video

    return video


class Maps:
    """Replaces upstream's `_decode`, `_encode` and their tiled forms. A model's subclass computes a map and defines its tiles.

    `decode` and `encode` get a map [B, C, (T,) H, W], or a shard or tile of one: latents, or a video in its patches.
    """

    tiled_encode = "tiled_encode"  # upstream's name of that method

    def decode(self, vae, z):
        raise NotImplementedError

    def encode(self, vae, x):
        raise NotImplementedError

    def tiling(self, vae, height: int, width: int, encode: bool = False) -> Tiling:
        """Upstream's tiles for latents of this size; to `encode`, for a video of this size in its patches."""
        raise NotImplementedError

    def ratio(self, vae) -> int:
        """Columns of the video, in its patches, per column of the latents."""
        return spatial_ratio(vae)

    def takes(self, vae, x, encode: bool) -> bool:
        """Whether these methods replace upstream's for this module and map."""
        return True

    def patched(self, vae, x):
        """A video in its patches."""
        return x

    def output(self, vae, sample, tiled: bool, return_dict: bool = True):
        """What upstream returns for a decoded video, given in its patches."""
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def plan(self, vae: type, methods: dict = {}, **more) -> ModelPlan:
        """The plan of a class. `methods`: of its layers; `more`: other fields of `ModelPlan`."""
        own = {
            "_decode": self._method("_decode", self._decode),
            "_encode": self._method("_encode", self._encode),
            "tiled_decode": self._method("tiled_decode", self._tiled_decode),
            self.tiled_encode: self._method(self.tiled_encode, self._tiled_encode),
        }
        methods = {(vae, name): method for name, method in own.items()} | methods
        return ModelPlan(
            parallel=True, entries=("forward", "encode", "decode"), methods=methods, **{"axes": 5, **more}
        )

    def _method(self, name: str, run: Callable) -> Callable:
        def method(vae, *args, **kwargs):
            theirs = getattr(type(vae), name)
            _, (_, x), *wanted = inspect.signature(theirs).bind(vae, *args, **kwargs).arguments.items()
            if self.takes(vae, x, "encode" in name):
                return run(vae, x, **dict(wanted))
            return theirs(vae, *args, **kwargs)

        return method

    def _decode(self, vae, z, **wanted):
        if vae.use_tiling and self.tiling(vae, *z.shape[-2:]).cuts(*z.shape[-2:]):
            return vae.tiled_decode(z, **wanted)
        return self.output(vae, tracing().shard_width(functools.partial(self.decode, vae), z), tiled=False, **wanted)

    def _encode(self, vae, x):
        x = self.patched(vae, x)
        if vae.use_tiling and self.tiling(vae, *x.shape[-2:], encode=True).cuts(*x.shape[-2:]):
            return getattr(vae, self.tiled_encode)(x)
        return tracing().shard_width(functools.partial(self.encode, vae), x, multiple=self.ratio(vae))

    def _tiled_decode(self, vae, z, **wanted):
        sample = tracing().in_tiles(functools.partial(self.decode, vae), z, self.tiling(vae, *z.shape[-2:]))
        return self.output(vae, sample, tiled=True, **wanted)

    def _tiled_encode(self, vae, x):
        return tracing().in_tiles(functools.partial(self.encode, vae), x, self.tiling(vae, *x.shape[-2:], encode=True))


def spatial_ratio(vae) -> int:
    """Pixels per latent, of a VAE in which each level but the last halves the map."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def overlapping_tiles(vae, factors: tuple[float, float], ratio: int, height: int, width: int, encode: bool) -> Tiling:
    """As `Maps.tiling`, of a VAE whose tiles overlap by the shares `factors`. `ratio`: pixels per latent."""
    video = vae.tile_sample_min_height, vae.tile_sample_min_width
    latents = vae.tile_latent_min_height, vae.tile_latent_min_width
    if encode:
        return Tiling.overlapping(video, latents, factors, (-(-height // ratio), -(-width // ratio)))
    return Tiling.overlapping(latents, video, factors, (height * ratio, width * ratio))
