"""What the command line offers, in words: known without importing what they choose."""

DEVICES = ("auto", "tpu", "simulated", "upstream")
STAGES = ("text", "denoise", "decode")
BENCHES = (
    "attention",
    "sweep",
    "step",
    "run",
    "vae",
    "calibration",
    "check",
    "cache",
    "host",
    "ready",
    "compile",
    "load",
)
BENCH_FILTERS = tuple("chip shape path model scheduler topology variant way name dtype mask chips".split())
PLAN_ARGUMENTS = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "max_sequence_length")
FORMS = ("upstream", "torchax", "scanned", "nnx")
DTYPES = ("float32", "bfloat16", "float16")
SERVE_LIMITS = ("queue", "prompt-characters", "body-bytes", "images", "steps", "side", "frames")
SERVE_LIMITS += ("kept-seconds", "kept-bytes", "kept-jobs", "connections")

# Arguments of most pipelines, for the help; any other name of a pipeline's __call__ is taken too.
COMMON_ARGUMENTS = {
    "prompt": "what to generate; give it again for more prompts in one batch",
    "negative-prompt": "what to keep away from",
    "height": "in pixels",
    "width": "in pixels",
    "num-frames": "4k+1 for most video models",
    "num-inference-steps": "denoising steps",
    "guidance-scale": "weight of the prompt",
    "num-videos-per-prompt": "videos for each prompt",
    "max-sequence-length": "tokens of text",
}
