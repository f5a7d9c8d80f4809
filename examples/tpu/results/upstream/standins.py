"""Writes tiny stand-ins for the models that upstream's fast tests load from the hub, in the layout of the hub's cache.

    python examples/tpu/results/upstream/standins.py DIR

Most of those tests need only a tokenizer or a tiny random text encoder. Vocabularies and weights differ from the real ones: a test that
compares with recorded numbers may fail with plain upstream too, and is then not among those that it passes. A stand-in has what tests
depend on: sizes, ids of special tokens, about one token per word of a prompt's template. `standins.json` has the models' configurations,
other files, and the words.
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
QWEN = f"{INTERNAL}/tiny-random-Qwen2VLForConditionalGeneration"
TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PRINTABLE = [chr(code) for code in range(33, 127)]


def snapshot(hub: Path, name: str) -> Path:
    """Returns the folder of a repository's only commit."""
    repository, commit = hub / f"models--{name.replace('/', '--')}", "0" * 39 + "1"
    folder = repository / "snapshots" / commit
    if not folder.exists():
        folder.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    return folder


def numbered(tokens) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def words_as_tokens(words: list[str]) -> tuple[dict, list]:
    """Returns vocabulary and merges of a byte-level BPE in which each word is one token, also after a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=20000, min_frequency=1, show_progress=False, special_tokens=[], initial_alphabet=BYTES
    )
    tokenizer.train_from_iterator([text for word in words for text in (word, f" {word}")], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]


def t5():
    """Returns a T5 tokenizer of characters, with 1,103 tokens."""
    tokens = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    tokens += [(c, -3.0) for c in PRINTABLE] + [(f"▁{c}", -4.0) for c in PRINTABLE]
    tokens += [(f"⁂{n}", -50.0) for n in range(1003 - len(tokens))]
    tokens += [(f"<extra_id_{n}>", 0.0) for n in range(99, -1, -1)]
    return tf.T5Tokenizer(vocab=tokens, extra_ids=100, model_max_length=512)


def clip():
    """Returns a CLIP tokenizer of bytes, whose last two tokens begin and end a text."""
    vocabulary = numbered([*BYTES, *(f"{c}</w>" for c in BYTES), "<|startoftext|>", "<|endoftext|>"])
    return tf.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def qwen():
    """Returns a Qwen2 tokenizer with special tokens at Qwen2-VL's ids, and one token per word of the templates.

    Pipelines that prepend a template drop a fixed number of its tokens.
    """
    vocabulary, merges = words_as_tokens(sorted({*TABLE["template"].split()}))
    specials = TABLE["qwen_tokens"].split()
    vocabulary |= {token: 151643 + n for n, token in enumerate(specials)}
    more = {"additional_special_tokens": specials[1:], "chat_template": TABLE["qwen_chat"]}
    return tf.Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=32768, **more)


def gemma():
    """Returns a Gemma tokenizer of eight tokens, as many as the tests' encoders have."""
    vocabulary = numbered(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "a", "b"])
    return tf.GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=512)


def llama():
    """Returns a Llama tokenizer of characters."""
    more = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"]
    tokens = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *PRINTABLE, *more]
    return tf.LlamaTokenizer(
        vocab=numbered(tokens), merges=[], pad_token="<pad>", model_max_length=2048, additional_special_tokens=more
    )


def bert():
    """Returns a BERT tokenizer of characters."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(t for c in PRINTABLE for t in (c, f"##{c}"))]
    return tf.BertTokenizer(vocab=numbered(tokens), model_max_length=512)


TOKENIZERS = {  # the folder in the repository is behind a colon
    **{f"{INTERNAL}/tiny-random-{name}": t5 for name in ("t5", "T5Model", "umt5")},
    f"{INTERNAL}/tiny-random-clip": clip,
    QWEN: qwen,
    f"{INTERNAL}/dummy-gemma": gemma,
    "finetrainers/dummy-hunyaunvideo:tokenizer": llama,
    **{f"{INTERNAL}/{name}": llama for name in ("llama-tokenizer", "tiny-random-LlamaForCausalLM")},
    f"{INTERNAL}/tiny-random-BertModel": bert,
}


def check(hub: Path):
    """Raises ValueError for tokenizers that load as empty, which they do without an error if files are missing."""

    def tokens(make, name: str, text: str) -> list[int]:
        return make.from_pretrained(snapshot(hub, name))(text)["input_ids"]

    begin, *_, end = tokens(tf.CLIPTokenizer, f"{INTERNAL}/tiny-random-clip", "ab")
    qwens = tokens(tf.Qwen2Tokenizer, QWEN, "<|im_start|>system\nDescribe the image<|image_pad|>")
    if (begin, end, qwens[0], qwens[-1], len(qwens)) != (512, 513, 151644, 151655, 7):
        ours = f"{begin} ... {end} and {qwens}"
        raise ValueError(f"expected CLIP's 512 ... 513 and seven tokens 151644 ... 151655, got {ours}")


def main(hub: Path):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tf.logging.disable_progress_bar()
    for name, (cls, config) in TABLE["models"].items():
        torch.manual_seed(0)
        cls = getattr(tf, cls)
        cls(cls.config_class(**config)).eval().save_pretrained(snapshot(hub, name))
    for place, make in TOKENIZERS.items():
        name, _, inner = place.partition(":")
        make().save_pretrained(snapshot(hub, name) / inner)
    for name, files in TABLE["files"].items():
        for file, content in files.items():
            (snapshot(hub, name) / file).write_text(json.dumps(content))
    check(hub)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
