"""A run in three stages with files between them: text (all encoding), denoise, decode. Bit for bit the result of one run.

Each stage is upstream's own `__call__` with the same arguments, ended where it would use a component of a later stage:

    text      up to the first call of the denoiser   text encoder, image encoder, VAE where pixels are encoded
    denoise   up to `vae.decode`                     transformers, scheduler; encoded inputs come from the file of text
    decode    `vae.decode` and what follows          VAE
"""

from .file import Settings, pack, read, save, unpack
from .loading import STAGED, STAGES, fingerprint, load
from .running import LATENTS, run_decode, run_denoise, run_text
