"""The command line, `diffusers-tpu`: the only room that prints.

Exit status: 0 done; 1 something failed; 2 bad input, said in one line; 130 interrupted.
"""

import argparse
import os
import sys

from ...chips import hosts
from ...config import ATTENTIONS
from ...errors import Failure
from .choices import (
    BENCH_FILTERS,
    BENCHES,
    COMMON_ARGUMENTS,
    DEVICES,
    DTYPES,
    FORMS,
    PLAN_ARGUMENTS,
    SERVE_LIMITS,
    STAGES,
)
from .errors import BadInput


class Parser(argparse.ArgumentParser):
    """argparse, with errors as BadInput in place of the whole usage and an exit."""

    def error(self, message):
        raise BadInput(f"{message}. {self.prog} --help lists what there is.")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `diffusers-tpu`; each command's module is imported when it runs."""
    parser = Parser(
        prog="diffusers-tpu", description="diffusers on TPU: run pipelines, and check them against upstream."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_compare(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_compile(commands)
    _add_serve(commands)
    _add_profile(commands)
    env = commands.add_parser("env", help="versions, chips and settings", allow_abbrev=False)
    env.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _add_generate(commands):
    generate = commands.add_parser(
        "generate",
        help="run a pipeline and write its video or images",
        description="Runs any diffusers pipeline and writes an mp4 with a contact sheet beside it, or png images.",
        epilog="Without a TPU: DIFFUSERS_TPU=cpu (or --device simulated) runs the same path on simulated chips.",
        allow_abbrev=False,
    )
    _add_model(generate)
    generate.add_argument("--device", choices=DEVICES, default="auto", help="auto: as DIFFUSERS_TPU says, else a TPU")
    generate.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as from_pretrained)")
    generate.add_argument("--mesh", metavar="DP,SP,TP", help="degrees: guidance branches, sequence, heads")
    generate.add_argument(
        "--attention", choices=ATTENTIONS, default="auto", help="see TPUConfig; kernels are interpreted without a TPU"
    )
    generate.add_argument(
        "--stage", choices=STAGES, help="one of three runs that give what one gives (Wan, HunyuanVideo-1.5)"
    )
    generate.add_argument("--input", metavar="FILE", help="what the stage before wrote; all settings are in it")
    generate.add_argument(
        "--output",
        metavar="FILE",
        help="out/NAME.mp4 or .png, of the first stages .safetensors (default: out/, named after the prompt)",
    )
    generate.add_argument("--fps", type=int, help="frames per second of the mp4 (default 16)")
    generate.add_argument("--seed", type=int, help="of the noise (default: drawn, and printed)")
    generate.add_argument("--image", metavar="FILE", help="first frame or reference, for pipelines that take one")
    _add_bulk(generate)
    generate.add_argument(
        "--debug-nans",
        action="store_true",
        help="stop at the first submodule that gives NaN or an infinity, and name it",
    )
    generate.add_argument(
        "--profile", metavar="DIR", help="trace some steps into this folder, for diffusers-tpu profile"
    )
    generate.add_argument("--profile-steps", metavar="FIRST:END", help="which, counted from 0 (default 2:4)")
    _add_pipeline_arguments(generate)


def _add_bulk(generate):
    group = generate.add_argument_group(
        "many prompts", "One output each, resumable; several processes may share the directory."
    )
    group.add_argument(
        "--prompts", metavar="FILE", help=".txt, a prompt a line, or .jsonl, an object with prompt a line"
    )
    group.add_argument("--batch", type=int, default=1, metavar="N", help="prompts of equal arguments in one call")
    group.add_argument("--retry", action="store_true", help="make again what failed before")
    group.add_argument("--ray", type=int, metavar="N", help="by N actors of Ray Data, one a slice")
    group.add_argument("--ray-resources", action="append", metavar="NAME=COUNT", help="of one actor, such as TPU=8")


def _add_compare(commands):
    compare = commands.add_parser(
        "compare",
        help="ours against upstream, module by module; what keeps a model from being compiled",
        description="Runs upstream's modules and ours in one process on the same weights and inputs; exit status 1 if any row"
        " fails. With --component it goes through one component submodule by submodule and names the first that parts; with"
        " --trace it lists what stops components from being compiled, without weights.",
        allow_abbrev=False,
    )
    compare.add_argument(
        "model",
        metavar="MODEL",
        help="a directory in diffusers layout, or a hub id; --trace: also a short name as of plan",
    )
    compare.add_argument(
        "--mesh",
        metavar="DP,SP,TP",
        action="append",
        help="again for more (default: one chip and four meshes of up to eight; of a component one chip)",
    )
    compare.add_argument(
        "--dtype", choices=DTYPES[:2], action="append", help="again for more (default: both; of a component float32)"
    )
    compare.add_argument("--seed", type=int, help="of prompt and noise (default: drawn, and printed)")
    compare.add_argument("--json", action="store_true", help="rows as JSON")
    group = compare.add_argument_group("one component, submodule by submodule")
    group.add_argument("--component", metavar="NAME", help="such as transformer or vae; --trace: only this one")
    group.add_argument("--entry", choices=("forward", "encode", "decode"), help="default: all that a run calls")
    group.add_argument("--form", choices=FORMS, help="how ours runs (default scanned)")
    group.add_argument("--attention", choices=ATTENTIONS, help="see TPUConfig")
    group.add_argument("--against", choices=FORMS, help="the oracle (default upstream)")
    group.add_argument("--against-dtype", choices=DTYPES[:2], help="of the oracle (default float32)")
    group.add_argument("--against-mesh", metavar="DP,SP,TP", help="of the oracle (default 1,1,1)")
    group.add_argument("--against-attention", choices=ATTENTIONS, help="of the oracle")
    group.add_argument("--depth", type=int, help="of names in the table (default 2); what parts stands there always")
    group.add_argument("--report", metavar="FILE.html", help="every submodule as a page with a plot")
    group.add_argument(
        "--debug-nans", action="store_true", help="name the first submodule that gives NaN or an infinity"
    )
    group.add_argument(
        "--debug-sharding", action="store_true", help="shape, spec and chips of every submodule's value"
    )
    group = compare.add_argument_group("what cannot be compiled")
    group.add_argument(
        "--trace", action="store_true", help="list what stops a trace of each component, with file and line"
    )
    group.add_argument("--planned", action="store_true", help="trace what a run does, not upstream's forward as it is")
    _add_pipeline_arguments(compare)


def _add_plan(commands):
    plan = commands.add_parser(
        "plan",
        help="does a model fit a slice, how fast is a step, and why: no TPU, no weights, no network",
        description="Compiles the model's denoiser for a TPU that is not here and reads the program. Exit status 1 if it fits nowhere.",
        epilog="Published models need no files; a directory or the hub's cache is used if there.",
        allow_abbrev=False,
    )
    plan.add_argument("model", metavar="MODEL", help="a directory, a hub id, or a short name such as wan2.1-t2v-14b")
    plan.add_argument(
        "--topology",
        metavar="SLICE",
        action="append",
        required=True,
        help="such as v6e-8; several: again, or with commas",
    )
    plan.add_argument(
        "--mesh", metavar="auto|DP,SP,TP", help="auto: rank all, compile the best few (default: the pipeline's own)"
    )
    plan.add_argument(
        "--dtype", choices=DTYPES[:2][::-1], default="bfloat16", help="of the weights (default bfloat16)"
    )
    plan.add_argument("--attention", choices=ATTENTIONS, default="auto", help="see TPUConfig (default: auto)")
    plan.add_argument("--batch", type=int, default=1, help="prompts at once (default 1)")
    plan.add_argument(
        "--everything", action="store_true", help="compile text encoders and VAE too (minutes), not only the denoiser"
    )
    plan.add_argument(
        "--tiling",
        action=argparse.BooleanOptionalAction,
        help="the VAE works in tiles, or does not (default: as the card)",
    )
    plan.add_argument("--json", metavar="FILE", nargs="?", const="-", help="the answer as JSON, to FILE or the output")
    plan.add_argument("--report", metavar="FILE.html", help="the answer as a page with pictures")
    plan.add_argument("--time-limit", type=float, default=900, metavar="SECONDS", help="for one slice (default 900)")
    group = plan.add_argument_group(
        "arguments of the pipeline", "Default: the model card's; any other one is taken too."
    )
    for name in (argument.replace("_", "-") for argument in PLAN_ARGUMENTS):
        group.add_argument(f"--{name}", action="append", metavar="VALUE", help=COMMON_ARGUMENTS[name])


def _add_compile(commands):
    compile_ = commands.add_parser(
        "compile",
        help="a run's executables made before it, on any machine: no TPU, no weights",
        description="Compiles every model of a run for a slice and keeps the executables where a run finds them: it then neither"
        " traces nor compiles. Exit status 1 if some cannot be kept.",
        epilog="On the TPU host: the same versions, and DIFFUSERS_TPU_CACHE=DIR, or DIR/executables copied into its own cache.",
        allow_abbrev=False,
    )
    compile_.add_argument(
        "model", metavar="MODEL", help="a directory, a hub id, or a short name such as wan2.1-t2v-14b"
    )
    compile_.add_argument(
        "--topology", metavar="SLICE", required=True, help="such as v6e-8; or simulated, this machine's chips"
    )
    compile_.add_argument("--mesh", metavar="DP,SP,TP", help="degrees (default: the pipeline's own)")
    compile_.add_argument(
        "--dtype", choices=DTYPES[:2][::-1], default="bfloat16", help="of the weights (default bfloat16)"
    )
    compile_.add_argument("--attention", choices=ATTENTIONS, default="auto", help="see TPUConfig (default: auto)")
    compile_.add_argument("--batch", type=int, default=1, help="prompts at once (default 1)")
    compile_.add_argument(
        "--tiling",
        action=argparse.BooleanOptionalAction,
        help="the VAE works in tiles, or does not (default: as the card)",
    )
    compile_.add_argument("--output", metavar="DIR", help="default: the cache of this machine, DIFFUSERS_TPU_CACHE")
    compile_.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="what was made as JSON, to FILE or the output"
    )
    group = compile_.add_argument_group(
        "arguments of the pipeline", "Default: the model card's; any other one is taken too."
    )
    for name in (argument.replace("_", "-") for argument in PLAN_ARGUMENTS):
        group.add_argument(f"--{name}", action="append", metavar="VALUE", help=COMMON_ARGUMENTS[name])


def _add_bench(commands):
    bench = commands.add_parser(
        "bench",
        help="what the TPU compiler says of our kernels and steps, beside what others use",
        description="Every row is compiled for a TPU that is not here, or read from the cache; only `check`, `cache`, `host`, `ready` and"
        " `load` are measured, here.",
        allow_abbrev=False,
    )
    bench.add_argument(
        "kind",
        choices=BENCHES,
        help="what to compile; calibration: beside measurements of others; check: what a call costs the host before it runs;"
        " cache: quality and speed of upstream's caches, measured on the shipped model; host: what a step costs the host; ready:"
        " from a process's start to its first step; compile: executables made ahead; load: weights from disk, beside dd",
    )
    bench.add_argument("--json", metavar="FILE", nargs="?", const="-", help="the rows as JSON, to FILE or the output")
    bench.add_argument(
        "--tune",
        action="store_true",
        help="attention: compile several sizes of blocks and keep the best in tuned.json",
    )
    for name in BENCH_FILTERS:
        bench.add_argument(f"--{name}", metavar="VALUE", help="only rows with this value")


def _add_serve(commands):
    serve = commands.add_parser(
        "serve",
        help="a pipeline behind HTTP: OpenAI's endpoints of videos and images, and a page",
        description="Compiles the sizes that it will serve, then takes requests until SIGTERM or ctrl-C.",
        allow_abbrev=False,
    )
    _add_model(serve)
    serve.add_argument("--device", choices=DEVICES, default="auto", help="auto: as DIFFUSERS_TPU says, else a TPU")
    serve.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as from_pretrained)")
    serve.add_argument("--mesh", metavar="DP,SP,TP", help="degrees: guidance branches, sequence, heads")
    serve.add_argument("--attention", choices=ATTENTIONS, default="auto", help="see TPUConfig")
    serve.add_argument("--name", help="of the model, for clients (default: the directory's)")
    serve.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; elsewhere a token is needed")
    serve.add_argument("--port", type=int, default=8000, help="default 8000; 0: any that is free")
    serve.add_argument("--token", help="what clients show (default: DIFFUSERS_TPU_TOKEN)")
    serve.add_argument(
        "--sizes",
        action="append",
        metavar="WxHxF,...",
        help="width, height, frames of what is served (default: the pipeline's)",
    )
    serve.add_argument(
        "--any-size", action="store_true", help="take other sizes too; each compiles when it first comes"
    )
    serve.add_argument("--max-batch", type=int, default=1, metavar="N", help="jobs that are alike in one call")
    serve.add_argument("--fps", type=int, default=16, help="frames per second of videos (default 16)")
    serve.add_argument("--grace", type=float, default=30.0, metavar="SECONDS", help="of a running job at the end")
    serve.add_argument("--page", action=argparse.BooleanOptionalAction, default=True, help="a page at / (default)")
    group = serve.add_argument_group("limits", "Default: as the page on serving says.")
    for name in SERVE_LIMITS:
        group.add_argument(f"--{name}", type=int, metavar="N", dest=name.replace("-", "_"))
    _add_pipeline_arguments(serve)


def _add_profile(commands):
    profile = commands.add_parser(
        "profile",
        help="what a traced run took, by upstream's modules, beside a plan's seconds",
        description="Reads what `generate --profile DIR` has written; with --plan it sets the planner's seconds beside.",
        allow_abbrev=False,
    )
    profile.add_argument("folder", metavar="DIR", help="of generate --profile")
    profile.add_argument("--plan", metavar="FILE", help="of plan --json FILE, of one slice")
    profile.add_argument("--json", metavar="FILE", nargs="?", const="-", help="as JSON, to FILE or the output")


def _add_model(parser):
    parser.add_argument("model", metavar="MODEL", help="a directory in diffusers layout, or a hub id")


def _add_pipeline_arguments(parser):
    group = parser.add_argument_group(
        "arguments of the pipeline", "Upstream's names and defaults; any other one is taken too."
    )
    for name, text in COMMON_ARGUMENTS.items():
        group.add_argument(f"--{name}", action="append", metavar="VALUE", help=text)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    try:
        options, rest = make_parser().parse_known_args(argv)
        if options.command == "env":
            from . import environment as command
        elif options.command == "compare" and options.trace:
            from . import compare_trace as command
        elif options.command == "compare" and options.component:
            from . import compare_modules as command
        elif options.command == "compare":
            from . import compare as command
        elif options.command == "plan":
            from . import plan as command
        elif options.command == "bench":
            from . import bench as command
        elif options.command == "compile":
            from . import compile as command
        elif options.command == "serve":
            from . import serve as command
        elif options.command == "profile":
            from . import profile as command
        elif options.prompts is not None:
            from . import bulk as command
        elif options.stage is not None:
            from . import staged as command
        else:
            from . import generate as command
        return command.run(options, rest)
    except BadInput as error:
        print(f"diffusers-tpu: {error}", file=sys.stderr)
        hosts.failed(str(error), 2)
        return 2
    except Failure as error:
        print(f"diffusers-tpu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("diffusers-tpu: interrupted", file=sys.stderr)
        hosts.failed("interrupted", 130)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:  # argparse's --help
        return stop.code or 0
