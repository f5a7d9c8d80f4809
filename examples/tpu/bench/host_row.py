"""Host time of a step outside of the model's program, measured on this machine's processor with simulated chips.

The Wan pipeline's transformer is one tiny block, so that a step is almost all host time: upstream's loop with the check of the model, its
call, guidance and the scheduler. The schedule is one that was run before; a scheduler's steps are traced in the first run.
"""

import json
import statistics
import sys
import time

from . import run_module, versions


SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
CHIPS = (1, 8)
STEPS, RUNS = 30, 60
CALL = {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 2.0, "output_type": "latent"}


def answer(scheduler: str, chips: int) -> dict:
    """Returns `step_milliseconds` of a whole step, `program_milliseconds` of the model's program until it has finished, and
    `host_milliseconds`, their difference. Each is the median of a run's steps, from the quickest of `RUNS` runs.

    `first_milliseconds`: a step of the first run, which traces the scheduler's steps; `scheduler_programs`: their executables.
    """
    return {**run_module("host_row", scheduler, DIFFUSERS_TPU_DEVICES=str(chips)), "versions": versions()}


def tiny_pipeline(scheduler: str):
    """Returns a Wan pipeline with one block and no text encoder; prompts are embeddings."""
    import diffusers

    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=1,
        rope_max_seq_len=64,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(base_dim=6, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    steps = getattr(diffusers, scheduler)(**(flow if scheduler.startswith("UniPC") else {}))
    return diffusers.WanPipeline(None, None, vae, steps, transformer)


def main(scheduler: str):
    """Measures and prints a row; run in its own process, as each has its number of chips."""
    import jax
    import torch

    from diffusers.tpu import install
    from diffusers.tpu.compile.numbers import jitted_by_text

    torch.set_num_threads(1)
    pipe = install(tiny_pipeline(scheduler))
    pipe.set_progress_bar_config(disable=True)
    text = {name: torch.randn(1, 8, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}

    def step_seconds() -> float:
        ends: list[float] = []
        pipe(
            **text, **CALL, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(0),
            callback_on_step_end=lambda *_: ends.append(time.perf_counter()) or {}, callback_on_step_end_tensor_inputs=[],
        )  # fmt: skip
        return statistics.median(after - before for before, after in zip(ends, ends[1:]))

    first = step_seconds()
    step_seconds()
    step = min(step_seconds() for _ in range(RUNS))
    (program,) = pipe.transformer._tpu_runner.programs.values()
    spent: list[float] = []
    run = program.run

    def waited_for(calls):
        jax.block_until_ready([call.values.inputs for call in calls])
        start = time.perf_counter()
        outputs = jax.block_until_ready(run(calls))
        spent.append(time.perf_counter() - start)
        return outputs

    program.run = waited_for
    for _ in range(RUNS):
        step_seconds()
    alone = min(statistics.median(spent[n : n + STEPS]) for n in range(0, len(spent) - STEPS + 1, STEPS))
    row = {
        "step_milliseconds": 1e3 * step,
        "program_milliseconds": 1e3 * alone,
        "host_milliseconds": 1e3 * (step - alone),
        "first_milliseconds": 1e3 * first,
        "scheduler_programs": len(jitted_by_text),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1])
