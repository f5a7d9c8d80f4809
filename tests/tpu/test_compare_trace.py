"""What keeps a model from being compiled. Oracle: the lines that our patches replace, read from them; a module of known sins."""

import re

import pytest
import torch

import tiny
from conftest import slow
from diffusers.models.transformers import transformer_hunyuan_video15
from diffusers.tpu.apps.cli import main
from submodules.obstacles import assuming
from submodules.trace import list_obstacles


HUNYUAN = "diffusers.models.transformers.transformer_hunyuan_video15"
FILE = HUNYUAN.replace(".", "/") + ".py"


def replaced_lines(root, number: str) -> set[str]:
    """Lines of upstream's that this patch takes out."""
    (patch,) = root.glob(f"patches/{number}-*.patch")
    return {line[1:].strip() for line in patch.read_text().splitlines() if re.match(r"-(?!-)", line)} - {""}


LEAST = {"num_frames": 1, "num_inference_steps": 1}


def test_unpatched_hunyuanvideo15_stops_at_the_lines_that_our_patches_replace(root, upstream, pristine):
    pipe = tiny.hunyuan15_i2v()
    theirs = upstream(HUNYUAN)
    for module in pipe.transformer.modules():
        if type(module).__module__ == transformer_hunyuan_video15.__name__:
            module.__class__ = getattr(theirs, type(module).__name__)
    (traced,) = list_obstacles(pipe, arguments=LEAST, only=["transformer"])
    assert traced.kind == "HunyuanVideo15Transformer3DModel" and traced.entries == ["forward"] and not traced.stopped
    lines = pristine[FILE].decode().splitlines()
    code = [lines[one.line - 1].strip() for one in traced.obstacles]
    assert all(one.file == f"upstream {HUNYUAN}" for one in traced.obstacles)
    assert code[0] == "if is_t2v:" and lines[traced.obstacles[0].line - 2].strip() in replaced_lines(root, "0002")
    indices = [
        line.split("#")[0].strip() for line in replaced_lines(root, "0003") if re.search(r"\[~?\w*mask\w*\]", line)
    ]
    assert sorted(line.split("#")[0].strip() for line in code[1:]) == sorted(indices) and len(indices) == 12
    assert {one.what for one in traced.obstacles[1:]} == {"a boolean index"}


def test_the_patched_one_is_stopped_by_nothing_as_a_run_traces_it():
    pipe = tiny.hunyuan15_i2v()
    (planned,) = list_obstacles(pipe, arguments=LEAST, planned=True, only=["transformer"])
    assert not planned.obstacles and not planned.stopped


STOPS = {
    "mochi": ({}, "attention_processor.py", "torch.nonzero(mask.flatten(), as_tuple=False)"),
    "hunyuan_framepack": (
        {"latent_window_size": 1}, "framepack.py", "encoder_hidden_states[:, : effective_condition_sequence_length[0]]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [slow("mochi"), "hunyuan_framepack"])
def test_what_stops_video_models(name):
    """One line of each transformer, nothing else."""
    arguments, file, code = STOPS[name]
    found = {traced.component: traced for traced in list_obstacles(getattr(tiny, name)(), arguments=arguments)}
    assert {"transformer", "vae"} <= found.keys()
    (one,) = found.pop("transformer").obstacles
    assert one.file.endswith(file) and code in one.code and one.function.endswith(("__call__", "forward"))
    assert not any(traced.obstacles or traced.stopped for traced in found.values())


class Sins(torch.nn.Module):
    def forward(self, x, mask):
        if x.sum() > 0:  # 1
            x = x + x.max().item()  # 2
        else:
            x = x * float(x.min())  # 3
        part = x[:, : mask.sum(1)[0]]  # 4
        kept = x[mask]  # 5
        places = torch.nonzero(mask)  # 6
        chosen = x.masked_select(mask)  # 7
        different = torch.unique(x)  # 8
        host = x.cpu()  # 9
        listed = x.tolist()  # 10
        noise = torch.randn(x.shape, device=x.device)  # 11
        for _ in range(int(mask.sum())):  # 12
            x = x + 1
        while x.sum() > 0:  # 13
            x = x - 1
        waves = torch.special.airy_ai(x)  # 14
        listed += [f"{x.sum():.1f}"]  # 15
        listed += [str(x)]  # 16
        listed += [*x.numpy()]  # 17
        x[0] = part.sum() + kept.sum() + places.sum() + chosen.sum() + different.sum() + host.sum() + len(listed)
        return x + noise + waves


def test_every_sin_is_named_with_its_line(attach):
    runner = attach(Sins(), 1, 1, 1)
    call = runner.flatten_call("forward", (torch.ones(4, 6), torch.ones(4, 6) > 0), {})
    found = {}
    for answer in (False, True):
        with assuming(answer) as obstacles:
            (shape,) = [aval.shape for aval in runner.trace(call).avals]
        assert shape == (4, 6)
        found |= obstacles.found
    runner.detach()
    marked = {int(one.code.rpartition("# ")[2]): one.what for one in found}
    words = "truth value/number//bound of a slice/boolean index/nonzero/masked_select//host/tolist/random//truth value"
    words = f"{words}/torchax lacks/in a text/a text/numpy".split("/")
    assert sorted(marked) == [*range(1, 18)] and all(w in marked[n] for n, w in enumerate(words, 1)), marked
    with assuming(False) as obstacles:  # another trace begins with none
        pass
    assert not obstacles.found


@pytest.mark.slow
def test_the_command_lists_them_of_a_published_model(capsys):
    for words, status, said in (
        ("hunyuanvideo-1.5-480p-t2v --component transformer", 1, rf"^  {FILE}:\d+: a truth value of a tensor"),
        ("ltx-video --component transformer --json", 0, r'"obstacles": \[\]'),
        ("no-such-model", 2, "one of the published models"),
        ("ltx-video --component unet", 2, "expected components of LTXPipeline"),
    ):
        assert main(["compare", "--trace", *words.split()]) == status
        assert re.search(said, "".join(capsys.readouterr()), re.M), words
