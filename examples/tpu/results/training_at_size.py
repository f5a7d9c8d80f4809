"""Training at published size on an NVIDIA GPU: loops on the TPU path, by JAX on CUDA, compared with upstream's on CUDA.

    python training_at_size.py OUT.jsonl [CASE ...] [--small]
    python training_at_size.py OUT.jsonl --record      copies the results in OUT.jsonl to training-at-size.json

A loop is that of upstream's scripts: a prediction of noise, `clip_grad_norm_`, AdamW with a schedule of learning rates, and gradient
checkpointing, in float32 without TF32. Both sides have the same random weights, the call of the published pipeline, and the same random
hidden states in each step. Errors are those of the losses of all steps and of the change of the weights: |x - o| / |o|, o: upstream's.
Seconds are those of a step, the median of the second half. `host`: gradients are kept on the host, where torch's optimizers run.
`--small`: as in `values_at_size.py`.
"""

import functools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from value_inputs import Case, drawn, floating, placed, recorded
from value_runs import TRUE_FLOAT32, begin, enter_path, main, where


RECORD = Path(__file__).with_name("training-at-size.json")
ON_HOST = 8  # steps with gradients there


@dataclass(frozen=True)
class Training:
    """A training loop. `rank` is that of adapters; 0 trains all weights."""

    what: str
    case: Case
    steps: int
    rate: float
    rank: int = 0


CASES = {
    "pixart-full": Training(
        "PixArt-Sigma, all weights, 1024, two images", Case("pixart-sigma", "transformer", call={"use_resolution_binning": False}, small={"num_layers": 2}), 50, 1e-5
    ),
    "wan-1.3b-lora": Training(
        "Wan 2.1 1.3B, adapters of rank 16, 480 x 832 x 5",
        Case("wan2.1-t2v-1.3b", "transformer", call={"num_frames": 5}, small={"num_layers": 2}), 100, 1e-3, rank=16,
    ),
}  # fmt: skip


def run(name: str, case: Training, out: Path, small: bool):
    """Appends a line of JSON to `out` for each stage."""
    on_gpu, say = begin(name, out, small)
    steps = 4 if small else case.steps
    _, args, kwargs, narrow, model = recorded(case.case, "cuda" if on_gpu else "cpu", small)
    _made_trainable(model, case.rank)
    loop = functools.partial(_loop, model, case, args, kwargs, narrow)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {name: p.detach().cpu().clone() for name, p in trained.items()}
    parameters, of_trained = (sum(p.numel() for p in some) for some in (model.parameters(), trained.values()))
    say(stage="built", parameters=parameters, trained=of_trained)
    losses, seconds = loop(steps)
    changes = {name: p.detach().cpu() - first[name] for name, p in trained.items()}
    say(stage="upstream", losses=losses, seconds=seconds)
    model.zero_grad()
    enter_path(model, on_gpu)
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
        own, seconds = loop(steps if kept else min(steps, ON_HOST))
        found = {"losses": own, "seconds": seconds, "error": max(abs(x - o) / o for x, o in zip(own, losses))}
        if kept:
            wrong = sum(
                (p.detach() - first[name] - changes[name]).double().square().sum().item()
                for name, p in trained.items()
            )
            found["changed"] = (wrong / sum(x.double().square().sum().item() for x in changes.values())) ** 0.5
            found["eager"] = str(tpu.report(model)["eager"])
        say(stage="ours" if kept else "host", **found, **where())


def _made_trainable(model, rank: int):
    model.requires_grad_(not rank)
    if rank:
        from peft import LoraConfig

        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets))
    model.train()
    model.enable_gradient_checkpointing()


def _loop(model, training: Training, args, kwargs, narrow: list, steps: int) -> tuple[list[float], float]:
    """Returns the losses of all steps, and the median seconds of a step in the second half."""
    import torch

    asked = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(asked, lr=training.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * training.steps))
    device, losses, seconds = asked[0].device, [], []
    for step in range(steps):
        began = time.perf_counter()
        torch.manual_seed(step)
        given = placed(drawn((args, kwargs), "", False), device, narrow, torch.float32)
        (guess,) = floating(model(*given[0], **given[1]))
        loss = torch.nn.functional.mse_loss(
            guess, torch.randn(guess.shape, generator=torch.Generator().manual_seed(0)).to(device)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(asked, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return losses, statistics.median(seconds[steps // 2 :])


def record(out: Path):
    """Copies the results in `out` to the record, without losses and without cases of `--small`."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": []}
    rows = {row["case"]: row for row in kept["rows"]}
    for said in map(json.loads, out.read_text().splitlines()):
        if (case := CASES.get(said["case"])) is not None:
            row = rows.setdefault(said["case"], {"case": said["case"], "what": case.what, "steps": case.steps})
            row |= {
                key: said[key]
                for key in ("trained", "error", "changed", "device")
                if key in said and said["stage"] != "host"
            }
            row |= {f"{said['stage']}_seconds": said["seconds"]} if "seconds" in said else {}
    kept["rows"] = [*rows.values()]
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, CASES, run, record, RECORD, seconds=300))
