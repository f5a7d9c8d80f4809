"""A run in three, with files between: text (everything that is encoded), denoise, decode; bit for bit what one run gives.

Each stage is upstream's own `__call__` with the same arguments, cut where it would use a component of a later stage:

    text      up to the first call of the denoiser   text encoder, image encoder, VAE where pixels are encoded
    denoise   up to `vae.decode`                     transformers, scheduler; what text encoded comes from its file
    decode    `vae.decode` and what follows          VAE
"""

from .file import Settings, pack, read, save, unpack
from .loading import STAGED, STAGES, fingerprint, load
from .running import LATENTS, run_decode, run_denoise, run_text
