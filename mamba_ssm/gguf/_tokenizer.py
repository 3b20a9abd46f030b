"""tokenizer.json as llama.cpp's tokenizer.ggml.* keys, and back: byte-level BPE, which Mamba's checkpoints use."""

import json
import typing
from pathlib import Path

from mamba_ssm._arguments import shown
from mamba_ssm.gguf._format import GGUFFile

_FILE = "tokenizer.json"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's types of a token
_END = "<|endoftext|>"


class Tokenizer(typing.NamedTuple):
    """tokens: by number, one for each row of the embedding. types: llama.cpp's. merges: pairs with a space between."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def add_to(self, writer: typing.Any) -> None:
        """To a gguf.GGUFWriter."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        if _END in self.tokens:
            end = self.tokens.index(_END)
            writer.add_bos_token_id(end)
            writer.add_eos_token_id(end)
        writer.add_add_bos_token(False)

    def as_json(self) -> str:
        """The contents of a tokenizer.json."""
        kinds = list(zip(self.tokens, self.types, strict=True))
        added = [
            {"id": i, "content": token, "special": kind == _CONTROL, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False}
            for i, (token, kind) in enumerate(kinds)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        bytes_of: dict[str, typing.Any] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        }
        vocabulary = {token: i for i, (token, kind) in enumerate(kinds) if kind != _UNUSED}
        model: dict[str, typing.Any] = {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": self.merges,
            "dropout": None,
            "unk_token": None,
        }
        model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False}
        whole: dict[str, typing.Any] = {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": bytes_of,
        }
        whole |= {"post_processor": None, "decoder": bytes_of, "model": model, "truncation": None, "padding": None}
        return json.dumps(whole, ensure_ascii=False)


def tokenizer_of_folder(folder: Path, rows: int) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a folder for an embedding of so many rows, or None; and what was found, in words."""
    path = folder / _FILE
    if not path.is_file():
        return None, f"no tokenizer ({folder} has no {_FILE})"
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        problem = _problem(contents)
        if problem is None:
            return _tokenizer(contents, rows), f"tokenizer of {path}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no {_FILE} of the package tokenizers: {error}") from error
    return None, f"no tokenizer ({path} {problem}, which this command does not translate)"


def _problem(contents: typing.Any) -> str | None:
    """What is not GPT-2's way to split and merge."""
    model, before = contents["model"], contents.get("pre_tokenizer") or {}
    if model.get("type") != "BPE":
        return f"has a model of type {shown(model.get('type'))}, not BPE"
    if before.get("type") != "ByteLevel" or not before.get("use_regex", True):
        return f"splits text by {shown(before.get('type'))}, not by ByteLevel with its own pattern"
    if before.get("add_prefix_space"):
        return "puts a space before the text"
    return None


def _tokenizer(contents: typing.Any, rows: int) -> Tokenizer:
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [_UNUSED] * rows
    added = {
        token["content"]: (token["id"], _CONTROL if token.get("special") else _USER_DEFINED)
        for token in contents["added_tokens"]
    }
    known = {token: (i, _NORMAL) for token, i in contents["model"]["vocab"].items()} | added
    for token, (i, kind) in known.items():
        if not isinstance(i, int) or not 0 <= i < rows:
            raise ValueError(f"token {shown(token)} has the number {shown(i)}, and the embedding {rows} rows")
        tokens[i], types[i] = token, kind
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in contents["model"]["merges"]]
    return Tokenizer(tokens, types, merges)


def tokenizer_of_file(file: GGUFFile) -> Tokenizer | None:
    """The byte-level BPE tokenizer that a file holds, or None where it holds none or one of another kind."""
    get = file.metadata.get
    if get("tokenizer.ggml.model") != "gpt2":
        return None
    tokens: typing.Any = get("tokenizer.ggml.tokens")
    types: typing.Any = get("tokenizer.ggml.token_type")
    merges: typing.Any = get("tokenizer.ggml.merges")
    if types is None and isinstance(tokens, list):
        types = [_NORMAL] * len(tokens)
    types = list(types) if isinstance(types, memoryview) else types
    for name, items, kind in (("tokens", tokens, str), ("token_type", types, int), ("merges", merges, str)):
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise file.error(f"is damaged: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    if len(tokens) != len(types):
        raise file.error(f"is damaged: tokenizer.ggml has {len(tokens)} tokens and types of {len(types)}")
    return Tokenizer(tokens, types, merges)
