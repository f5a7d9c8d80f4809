"""Tiny stand-ins for the models that upstream's fast tests ask the hub for, in the layout of the hub's own cache.

    python tests/tpu/upstream/standins.py DIR

Most of those tests want a tokenizer or a tiny random text encoder only. Vocabularies and weights are others than the real ones': a test
that compares with recorded numbers may fail with plain upstream too, and is then none of those that it passes. What a stand-in keeps is
what tests count on: sizes, special tokens at their ids, about one token a word of a prompt's template.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


INTERNAL = "hf-internal-testing"
PRINTABLE = [chr(code) for code in range(33, 127)]
# Pipelines that prepend a template drop a fixed number of its tokens.
TEMPLATE = """system user assistant Describe the image by detailing color quantity text shape size texture spatial relationships of
objects and background key features input then explain how should alter or modify Generate a new that meets requirements while
maintaining consistency with original where appropriate You are promt engineer prompt for video generation high quality full style main
subject environment camera actions lighting content event temporal angle movement transitions used in to instruction as location behavior
changes following aspects structured detailed description captions helpful models an is it this over time based on user's picture create
better visual composition motion action events elements aesthetic""".split()
QWENS = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|>
<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' or 'image' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 5, "num_attention_heads": 4}


class Hub:
    """The folder of a hub's cache."""

    def __init__(self, folder: Path):
        self.folder = folder

    def snapshot(self, name: str) -> Path:
        """The empty folder of a repository's only commit."""
        repository, commit = self.folder / f"models--{name.replace('/', '--')}", "0" * 39 + "1"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        return snapshot


def byte_symbols() -> list[str]:
    """How byte-level BPE writes each byte: itself where it is printable, else a letter from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [chr(byte) for byte in sorted(shown)] + [chr(256 + n) for n in range(256 - len(shown))]


def numbered(tokens) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def write(folder: Path, name: str, content: dict):
    (folder / name).write_text(json.dumps(content))


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs).eval()


def t5(hub: Hub):
    """Characters, 1,103 tokens."""
    tokens = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    tokens += [(c, -3.0) for c in PRINTABLE] + [(f"▁{c}", -4.0) for c in PRINTABLE]
    tokens += [(f"⁂{n}", -50.0) for n in range(1003 - len(tokens))]
    tokens += [(f"<extra_id_{n}>", 0.0) for n in range(99, -1, -1)]
    sizes = {
        "vocab_size": 1103, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 5, "num_decoder_layers": 5, "num_heads": 4,
        "relative_attention_num_buckets": 8, "dropout_rate": 0.1, "initializer_factor": 0.002, "feed_forward_proj": "relu",
        "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    for name, config, model in (
        ("tiny-random-t5", tf.T5Config, tf.T5ForConditionalGeneration),
        ("tiny-random-T5Model", tf.T5Config, tf.T5Model),
        ("tiny-random-umt5", tf.UMT5Config, tf.UMT5ForConditionalGeneration),
    ):
        folder = hub.snapshot(f"{INTERNAL}/{name}")
        seeded(model, config(**sizes)).save_pretrained(folder)
        tf.T5Tokenizer(vocab=tokens, extra_ids=100, model_max_length=512).save_pretrained(folder)


def clip(hub: Hub):
    """Byte-level characters, the last two tokens begin and end a text."""
    symbols = byte_symbols()
    vocabulary = numbered([*symbols, *(f"{c}</w>" for c in symbols), "<|startoftext|>", "<|endoftext|>"])
    folder = hub.snapshot(f"{INTERNAL}/tiny-random-clip")
    tf.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77).save_pretrained(folder)
    sizes = {**SMALL, "projection_dim": 64}
    text = {"vocab_size": 1000, "max_position_embeddings": 77, "bos_token_id": 512, "eos_token_id": 513}
    config = tf.CLIPConfig(
        text_config={**sizes, **text}, vision_config={**sizes, "image_size": 30, "patch_size": 2}, projection_dim=64
    )
    seeded(tf.CLIPModel, config).save_pretrained(folder)


def words_as_tokens(words: list[str]) -> tuple[dict, list]:
    """Vocabulary and merges of a byte-level BPE in which each word is one token, alone and after a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=20000, min_frequency=1, show_progress=False, special_tokens=[], initial_alphabet=byte_symbols()
    )
    tokenizer.train_from_iterator([text for word in words for text in (word, f" {word}")], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [
        tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]
    ]


def qwen(hub: Hub):
    """The words of templates, special tokens at the ids of Qwen2-VL."""
    vocabulary, merges = words_as_tokens(sorted(set(TEMPLATE)))
    vocabulary |= {token: 151643 + n for n, token in enumerate(QWENS)}
    folder = hub.snapshot(f"{INTERNAL}/tiny-random-Qwen2VLForConditionalGeneration")
    tf.Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        additional_special_tokens=QWENS[1:],
        model_max_length=32768,
        chat_template=QWEN_CHAT,
    ).save_pretrained(folder)
    write(folder, "config.json", {"model_type": "qwen2"})
    write(folder, "preprocessor_config.json", {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 12845056, "min_pixels": 3136, "merge_size": 2, "patch_size": 14,
        "temporal_patch_size": 2, "resample": 3, "rescale_factor": 1 / 255, "size": {"longest_edge": 12845056, "shortest_edge": 3136},
    })  # fmt: skip


def gemma(hub: Hub):
    """Eight tokens, as many as the tests' encoders have."""
    folder = hub.snapshot(f"{INTERNAL}/dummy-gemma")
    vocabulary = numbered(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "a", "b"])
    tf.GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=512).save_pretrained(folder)
    write(folder, "config.json", {"model_type": "gemma2"})


def llama(hub: Hub):
    """Characters."""
    more = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"]
    tokens = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *PRINTABLE, *more]
    config = tf.LlamaConfig(
        vocab_size=1000, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        pad_token_id=3,
    )  # fmt: skip
    for name, inner in (
        ("finetrainers/dummy-hunyaunvideo", "tokenizer"),
        (f"{INTERNAL}/llama-tokenizer", ""),
        (f"{INTERNAL}/tiny-random-LlamaForCausalLM", ""),
    ):
        folder = hub.snapshot(name)
        tokenizer = tf.LlamaTokenizer(
            vocab=numbered(tokens), merges=[], pad_token="<pad>", model_max_length=2048, additional_special_tokens=more
        )
        tokenizer.save_pretrained(folder / inner)
        if not inner:
            seeded(tf.LlamaForCausalLM, config).save_pretrained(folder)


def siglip(hub: Hub):
    """A vision model, pictures of 30 pixels."""
    folder = hub.snapshot(f"{INTERNAL}/tiny-random-SiglipVisionModel")
    sizes = {**SMALL, "num_hidden_layers": 2, "image_size": 30, "patch_size": 2}
    seeded(tf.SiglipVisionModel, tf.SiglipVisionConfig(**sizes)).save_pretrained(folder)
    write(folder, "preprocessor_config.json", {
        "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "image_processor_type": "SiglipImageProcessor", "resample": 3, "rescale_factor": 1 / 255, "size": {"height": 30, "width": 30},
    })  # fmt: skip


def bert(hub: Hub):
    """Characters."""
    folder = hub.snapshot(f"{INTERNAL}/tiny-random-BertModel")
    seeded(tf.BertModel, tf.BertConfig(vocab_size=1124, **SMALL)).save_pretrained(folder)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(t for c in PRINTABLE for t in (c, f"##{c}"))]
    tf.BertTokenizer(vocab=numbered(tokens), model_max_length=512).save_pretrained(folder)


def check(hub: Hub):
    """Tokenizers that find nothing in their folder come back empty, without an error."""

    def tokens(make, name: str, text: str) -> list[int]:
        (folder,) = (hub.folder / f"models--{INTERNAL}--{name}" / "snapshots").iterdir()
        return make.from_pretrained(folder)(text)["input_ids"]

    begin, *_, end = tokens(tf.CLIPTokenizer, "tiny-random-clip", "ab")
    words = "<|im_start|>system\nDescribe the image<|image_pad|>"
    qwens = tokens(tf.Qwen2Tokenizer, "tiny-random-Qwen2VLForConditionalGeneration", words)
    if (begin, end, qwens[0], qwens[-1], len(qwens)) != (512, 513, 151644, 151655, 7):
        raise ValueError(
            f"expected CLIP's 512 ... 513 and seven tokens 151644 ... 151655, got {begin} ... {end} and {qwens}"
        )


def main(folder: str):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tf.logging.disable_progress_bar()
    hub = Hub(Path(folder))
    for make in (t5, clip, qwen, gemma, llama, siglip, bert, check):
        make(hub)


if __name__ == "__main__":
    main(sys.argv[1])
