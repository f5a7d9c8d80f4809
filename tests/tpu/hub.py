"""A hub cache of tiny random models under published names, so that scripts' own `from_pretrained` finds them offline.

It is laid out as huggingface_hub keeps what it downloaded (`models--ORG--NAME/{refs,snapshots}`). `hub.json` says which
entry of `tiny.json`, or which writer of files here, stands for which names; it is made once for all of them.
"""

from pathlib import Path

import torch
from huggingface_hub.file_download import repo_folder_name
from peft import LoraConfig, get_peft_model_state_dict

import tiny
from conftest import draws_of, table
from diffusers import StableDiffusionXLPipeline, WanPipeline


MAKERS = {repo: kind for kind, repos in table("hub").items() for repo in repos}
COMMIT = "0" * 40
HALVES = ("stabilityai/stable-diffusion-xl-base-1.0", "stabilityai/stable-video-diffusion-img2vid-xt")


def lora(pipeline: type, model: torch.nn.Module, *targets: str):
    """A writer of a LoRA of this model."""

    def write(folder: Path, name: str):
        model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=[*targets]))
        pipeline.save_lora_weights(folder, get_peft_model_state_dict(model), weight_name=name)

    return write


def concept(folder: Path, token: str):
    """A textual inversion: one learned word."""
    torch.save({token: 0.1 * torch.randn(tiny.WIDTH)}, folder / "learned_embeds.bin")


WRITERS = {
    "lora_xl": lambda: lora(StableDiffusionXLPipeline, tiny.unet_xl(), "to_q", "to_k", "to_v", "to_out.0"),
    "lora_wan": lambda: lora(WanPipeline, tiny.wan_transformer(), "to_q", "to_v", "net.2"),
    "concept": lambda: concept,
}


class Hub:
    """The cache in `folder`, of the names that `lay` was called with."""

    def __init__(self, folder: Path):
        self.cache, self.made = folder / "hub", folder / "made"

    def lay(self, repo: str):
        """Put what the repository `repo` stands for into the cache. Raises KeyError for a name that stands for nothing."""
        made = self._make(MAKERS[repo], halves=repo in HALVES)
        home = self.cache / repo_folder_name(repo_id=repo, repo_type="model")
        if not home.exists():
            (home / "snapshots").mkdir(parents=True)
            (home / "snapshots" / COMMIT).symlink_to(made)
            (home / "refs").mkdir()
            (home / "refs" / "main").write_text(COMMIT)

    def _make(self, kind: str, halves: bool) -> Path:
        """The folder of a pipeline, a model, components by name, or what a writer writes."""
        folder = self.made / kind
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        writer, _, name = kind.partition(" ")
        if name:
            with draws_of(kind):
                WRITERS[writer]()(folder, name)
            return folder
        made = tiny.make(kind)
        for name, part in made.items() if isinstance(made, dict) else [(".", made)]:
            part.save_pretrained(folder / name)
        if halves:
            made.to(torch.float16).save_pretrained(folder, variant="fp16")
        return folder
