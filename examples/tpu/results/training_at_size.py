"""Training at published size on an NVIDIA GPU: loops on the TPU path, by JAX on CUDA, beside upstream's own on CUDA.

    python training_at_size.py OUT.jsonl [CASE ...] [--small]
    python training_at_size.py OUT.jsonl --record      what OUT.jsonl says goes into training-at-size.json

A loop is that of upstream's scripts: noise on latents, the model's guess of it, `clip_grad_norm_`, AdamW and a learning rate that
changes, gradient checkpointing, in float32 without TF32. Same weights, random, and the same draws in each step. Compared are the losses
of all steps, and what the steps have changed of the weights: |x - o| / |o|, o: upstream's. Seconds are a step's, the median of the later
half's; `host`: with gradients on the host, as torch's optimizers take them. `--small`: as `values_at_size.py`.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from value_runs import TRUE_FLOAT32, _enter_path, _fill, _say, _where


RECORD = Path(__file__).with_name("training-at-size.json")
ON_HOST = 8  # steps with gradients there


@dataclass(frozen=True)
class Case:
    what: str
    model: str
    size: int  # pixels
    batch: int
    steps: int
    rate: float
    rank: int = 0  # of adapters; 0: all weights are trained
    small: dict = field(default_factory=dict)


CASES = {
    "sd1.5-full": Case(
        "Stable Diffusion 1.5's UNet, all weights, 512, batch 4", "stable-diffusion-v1-5/stable-diffusion-v1-5", 512, 4, 50, 1e-5,
        small={"block_out_channels": [32, 64, 64, 64]},
    ),
    "sdxl-lora": Case(
        "SDXL's UNet, adapters of rank 16, 512, batch 2", "stabilityai/stable-diffusion-xl-base-1.0", 512, 2, 100, 1e-3, rank=16,
        small={"block_out_channels": [64, 64, 128], "attention_head_dim": [1, 2, 4], "transformer_layers_per_block": [1, 1, 1]},
    ),
}  # fmt: skip


def run(name: str, out: Path, small: bool):
    """Append to `out` what is found, a line of JSON for each stage."""
    case = CASES[name]
    os.environ["DIFFUSERS_TPU"], os.environ["DIFFUSERS_TPU_CACHE"] = "off", "off"  # upstream's torch, till it is done
    import torch

    on_gpu, began = torch.cuda.is_available(), time.perf_counter()
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if on_gpu else "cpu"
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    say = functools.partial(_say, out, case=name + "-small" * small, started=began)
    steps = 4 if small else case.steps
    model = _built(case, "cuda" if on_gpu else "cpu", small)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {name: p.detach().cpu().clone() for name, p in trained.items()}
    say(stage="built", parameters=sum(p.numel() for p in model.parameters()), trained=sum(p.numel() for p in trained.values()))
    losses, seconds = _loop(model, case, steps, small)
    changes = {name: p.detach().cpu() - first[name] for name, p in trained.items()}
    say(stage="upstream", losses=losses, seconds=seconds)
    model.to("cpu").zero_grad()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()

    _enter_path(on_gpu)
    from diffusers import tpu
    from diffusers.tpu import idioms
    from diffusers.tpu.compile import gradients

    tpu.install(model, tpu.TPUConfig(**TRUE_FLOAT32))
    idioms.on()
    for kept in (True, False):
        for name, p in trained.items():
            p.data = first[name].clone()
        if not kept:
            gradients._kept = lambda *_: False
        own, seconds = _loop(model, case, steps if kept else min(steps, ON_HOST), small)
        found = {"losses": own, "seconds": seconds, "error": max(abs(x - o) / o for x, o in zip(own, losses))}
        if kept:
            wrong = sum((p.detach() - first[name] - changes[name]).double().square().sum().item() for name, p in trained.items())
            found["changed"] = (wrong / sum(x.double().square().sum().item() for x in changes.values())) ** 0.5
            found["eager"] = str(tpu.report(model)["eager"])
        say(stage="ours" if kept else "host", **found, **_where())


def _built(case: Case, device: str, small: bool):
    """The model, random, as a script has it that trains it."""
    import torch
    from accelerate import init_empty_weights

    from diffusers.tpu.planner import building

    module = building.build(building.configuration_of(case.model), torch.float32, tiled=False).unet
    with init_empty_weights():
        config = {name: x for name, x in module.config.items() if name != "_use_default_values"}  # those are not taken
        module = type(module).from_config(config | (case.small if small else {}))
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            owner._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, device=device), requires_grad=not case.rank)
    with torch.no_grad():
        _fill(module.to(device))
    if case.rank:
        from peft import LoraConfig

        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        module.add_adapter(LoraConfig(r=case.rank, lora_alpha=case.rank, init_lora_weights="gaussian", target_modules=targets))
    module.train()
    module.enable_gradient_checkpointing()
    return module


def _loop(model, case: Case, steps: int, small: bool) -> tuple[list[float], float]:
    """Losses of all steps, and the median of seconds of the later half's."""
    import torch

    asked = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(asked, lr=case.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * case.steps))
    device, side, losses, seconds = asked[0].device, 8 if small else case.size // 8, [], []
    for step in range(steps):
        began, draw = time.perf_counter(), torch.Generator().manual_seed(step)
        latents, noise = torch.randn(2, case.batch, 4, side, side, generator=draw).to(device)
        part = torch.rand(case.batch, generator=draw).to(device)
        given = {"encoder_hidden_states": torch.randn(case.batch, 77, model.config.cross_attention_dim, generator=draw).to(device)}
        if model.config.addition_embed_type == "text_time":
            width = model.config.projection_class_embeddings_input_dim - 6 * model.config.addition_time_embed_dim
            sizes = torch.tensor([[case.size, case.size, 0, 0, case.size, case.size]] * case.batch).to(device)
            texts = torch.randn(case.batch, width, generator=draw).to(device)
            given["added_cond_kwargs"] = {"text_embeds": texts, "time_ids": sizes}
        share = part.view(-1, 1, 1, 1)
        guess = model(latents * (1 - share).sqrt() + noise * share.sqrt(), 1000 * part, **given, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(guess, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(asked, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return losses, statistics.median(seconds[steps // 2 :])


def record(out: Path):
    """Put what the file says into the record, without the losses; of cases with `--small` nothing."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": []}
    rows = {row["case"]: row for row in kept["rows"]}
    for said in map(json.loads, out.read_text().splitlines()):
        if (case := CASES.get(said["case"])) is not None:
            row = rows.setdefault(said["case"], {"case": said["case"], "what": case.what, "steps": case.steps})
            row |= {key: said[key] for key in ("trained", "error", "changed", "device") if key in said and said["stage"] != "host"}
            row |= {f"{said['stage']}_seconds": said["seconds"]} if "seconds" in said else {}
    kept["rows"] = [*rows.values()]
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--each", type=float, default=300, help="seconds that a case may take")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", action="store_true", help="this case, in this process")
    parser.add_argument("--record", action="store_true", help="put what OUT.jsonl says into training-at-size.json")
    given = parser.parse_intermixed_args()
    if given.record:
        return record(given.out)
    if given.one:
        return run(given.cases[0], given.out, given.small)
    failed, variables = [], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    for name in given.cases or CASES:
        words = [sys.executable, __file__, str(given.out), name, "--one"] + ["--small"] * given.small
        try:
            subprocess.run(words, env=variables, timeout=given.each, check=True)
        except subprocess.SubprocessError as error:
            failed.append(f"{name}: {error}")
    return "\n".join(failed) or None


if __name__ == "__main__":
    sys.exit(main())
