"""GGUF files: there and back, beside llama.cpp, with tokenizers; and errors for damage and for what it lacks."""

import importlib.util
import json
import random
import re
import struct
import sys

import pytest
import torch
from _helpers import llama_cpp
from _helpers.programs import run_script

from mamba_ssm import CheckpointError, MambaLMHeadModel, quantize
from mamba_ssm.gguf import __main__ as command
from mamba_ssm.gguf import export_folder, export_model, import_file, load_model, load_tokenizer
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.quantized import QuantizedLinear

LAYERS = {"mamba": {"layer": "Mamba1", "d_state": 16}, "mamba2": {"layer": "Mamba2", "headdim": 16, "ngroups": 2}}
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.int8}
needs_writer = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf")


def model_of(architecture="mamba2", dtype=torch.float32, **options):
    """Whose tensors are all random: a start of zeros or ones would hide an exchange."""
    torch.manual_seed(0)
    config = {"d_model": 64, "n_layer": 2, "vocab_size": 61, "ssm_cfg": LAYERS[architecture], **options}
    model = MambaLMHeadModel(MambaConfig(**config), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens_of(model, count=20):
    return torch.randint(model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens).logits[0, -1]


@needs_writer
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("architecture", LAYERS)
def test_there_and_back(tmp_path, architecture, type, tied):
    quantized = type == "q8_0"
    model = model_of(architecture, torch.float32 if quantized else TYPES[type], tie_embeddings=tied)
    model = quantize(model) if quantized else model
    file = tmp_path / "model.gguf"
    assert export_model(model, file) == type
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    found = load_model(file)
    assert (found.config.vocab_size, found.config.pad_vocab_size_multiple) == (61, 8)
    assert found.config.tie_embeddings == tied
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        if "A_log" in name:  # which the file holds as -exp(A_log), rounded to float32
            torch.testing.assert_close(tensor, expected[name])
        else:
            assert torch.equal(tensor, expected[name]), name
    export_model(found, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()


@needs_writer
@pytest.mark.parametrize("architecture", LAYERS)
def test_llama_cpp_answers_the_same(tmp_path, architecture):
    model = model_of(architecture)
    tokens, file = tokens_of(model), tmp_path / "model.gguf"
    export_model(model, file)
    with llama_cpp.Model(file) as theirs:
        found = torch.tensor(theirs.logits(tokens[0].tolist(), model.vocab_size))
    torch.testing.assert_close(found, logits_of(model, tokens), rtol=0, atol=1e-5)


@needs_writer
@pytest.mark.parametrize("architecture", LAYERS)
def test_llama_cpp_reads_q8_0(tmp_path, architecture):
    """It rounds the activations of each product to 8 bits too: an error of the size that the weights' rounding has."""
    model = model_of(architecture)
    tokens, file = tokens_of(model), tmp_path / "model.gguf"
    exact = logits_of(model, tokens)
    export_model(model, file, type="q8_0")
    ours = logits_of(load_model(file), tokens)
    with llama_cpp.Model(file) as theirs:
        found = torch.tensor(theirs.logits(tokens[0].tolist(), model.vocab_size))
    # A comes back from -exp(A_log) by a logarithm, rounded as this processor's torch rounds it
    torch.testing.assert_close(ours, logits_of(quantize(model), tokens), rtol=0, atol=1e-5)
    assert (found - ours).norm() < 3 * (ours - exact).norm()


@needs_writer
def test_types_and_dtypes(tmp_path):
    model, file = model_of(), tmp_path / "model.gguf"
    assert export_model(model, file, type="q8_0") == "q8_0"
    found = load_model(file, dtype="bfloat16")
    assert isinstance(found.lm_head, QuantizedLinear) and found.backbone.norm_f.weight.dtype == torch.bfloat16
    assert found.lm_head.scales is found.backbone.embedding.scales
    wide = tmp_path / "wide.gguf"
    assert export_model(found, wide, type="f32") == "f32"  # dequantised
    assert torch.equal(load_model(wide).lm_head.weight, found.lm_head.dequantize(torch.float32))
    with pytest.raises(ValueError, match="type must be one of f32, f16, bf16, q8_0, got 'q4_0'"):
        export_model(model, file, type="q4_0")
    with pytest.raises(ValueError, match="dtype must be one of"):
        load_model(file, dtype="int8")


# ---- what llama.cpp cannot express -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options,words",
    [
        ({"d_intermediate": 64}, "an MLP behind each mixer"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4}}, "attention layers"),
        ({"rms_norm": False}, "LayerNorm"),
        ({"ssm_cfg": {"layer": "Mamba3", "headdim": 16, "d_state": 16}}, "layers of Mamba3"),
        ({"ssm_cfg": {"layer": "Mamba1", "bimamba_type": "v2"}}, "bimamba_type='v2'"),
        ({"ssm_cfg": {"layer": "Mamba1", "bias": True}}, "biases of in_proj and out_proj"),
        ({"ssm_cfg": {"layer": "Mamba1", "conv_bias": False}}, "a convolution without bias"),
        ({"ssm_cfg": {"layer": "Mamba1", "expand": 1}}, "expand=1"),
        ({"ssm_cfg": {"layer": "Mamba1", "init_layer_scale": 0.1}}, "gamma"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_ssm": 64}}, "d_ssm=64"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 16, "rmsnorm": False}}, "rmsnorm=False"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 16, "norm_before_gate": True}}, "norm_before_gate=True"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 16, "D_has_hdim": True}}, "D_has_hdim=True"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 16, "dt_limit": (0.1, 1.0)}}, "dt_limit"),
    ],
)
def test_options_that_llama_cpp_lacks(tmp_path, options, words):
    with pytest.raises(ValueError, match=f"llama.cpp's mamba and mamba2 have no .*{words}"):
        export_model(model_of(**options), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


@needs_writer
def test_other_models(tmp_path):
    with pytest.raises(TypeError, match="must be a MambaLMHeadModel, got Linear"):
        export_model(torch.nn.Linear(2, 2), tmp_path / "model.gguf")
    model = model_of()
    model.extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"no others .*got extra"):
        export_model(model, tmp_path / "model.gguf")
    narrow = model_of(d_model=48, ssm_cfg={"layer": "Mamba1"})
    with pytest.raises(ValueError, match="q8_0 needs a d_model that is a multiple of 32, got 48"):
        export_model(narrow, tmp_path / "model.gguf", type="q8_0")
    assert not list(tmp_path.iterdir())


# ---- files that are damaged, or of another kind ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The bytes of a file."""
    pytest.importorskip("gguf")
    file = tmp_path_factory.mktemp("good") / "model.gguf"
    export_model(model_of("mamba"), file, type="q8_0")
    return file.read_bytes()


def error_of(folder, data):
    file = folder / "bad.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"bad\.gguf") as caught:
        load_model(file)
    return str(caught.value)


def set_value(key, value, layout="<I"):
    """A function that sets the number of a key."""

    def change(data):
        start = data.index(key.encode()) + len(key) + 4
        return data[:start] + struct.pack(layout, value) + data[start + 4 :]

    return change


def overlapping(data):
    """All tensors at the beginning of what is left of a file."""
    changed = bytearray(data)
    for name in re.finditer(rb"(?:token_embd|output_norm|blk\.\d\.\w+)(?:\.weight|\.bias)?(?=[\1\2]\0\0\0)", data):
        (dims,) = struct.unpack_from("<I", data, name.end())
        struct.pack_into("<Q", changed, name.end() + 4 + 8 * dims + 4, 0)
    return bytes(changed[: len(data) * 4 // 5])


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_model(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda data: b"", "does not begin with the letters GGUF"),
        (lambda data: b"PK\x03\x04" + data, "does not begin with the letters GGUF"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "has version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is big endian"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], f"promises {2**60} tensors"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], f"promises {2**60} metadata fields"),
        (lambda data: data[:24] + struct.pack("<Q", 2**63) + data[32:], f"promises {2**63} more than it has"),
        (lambda data: data[:-1], "is cut off: blk.1.ssm_out.weight"),
        (overlapping, "so some overlap"),
        (
            lambda data: data.replace(b"\x00mamba", b"\x00llama", 1),
            "has the architecture 'llama', and mamba and mamba2",
        ),
        (lambda data: data.replace(b"blk.1.ssm_d", b"blk.0.ssm_d"), "has two tensors blk.0.ssm_d"),
        (
            lambda data: data.replace(b"blk.1.ssm_d", b"blk.9.ssm_d"),
            "missing: .*blk.1.ssm_d.* unexpected: .*blk.9.ssm_d",
        ),
        (set_value("mamba.ssm.state_size", 8), r"of another shape: blk.0.ssm_x.weight"),
        (set_value("mamba.block_count", 2**31), "mamba.block_count must be an integer"),
        (set_value("mamba.block_count", 10**6), "block_count is 1000000, and the file has"),
        (set_value("mamba.embedding_length", 32), "inner_size must be 2 times embedding_length"),
        (set_value("mamba_ssm.vocab_size", 7), "mamba_ssm.vocab_size .* are 7 and 8"),
        (set_value("mamba.attention.layer_norm_rms_epsilon", 1e-6, "<f"), "layer_norm_rms_epsilon must be 1e-05"),
    ],
)
def test_damaged_files(good, tmp_path, change, words):
    changed = change(good)
    assert changed != good
    found = error_of(tmp_path, changed)
    assert re.search(words, found), found


def test_types_that_are_not_read(good, tmp_path):
    name = b"token_embd.weight"
    at = good.index(name) + len(name) + 4 + 2 * 8  # behind its dimensions
    changed = good[:at] + struct.pack("<I", 12) + good[at + 4 :]
    assert "token_embd.weight has the type Q4_K, and F32, F16, BF16, Q8_0 are read" in error_of(tmp_path, changed)


def test_any_cut_and_any_changed_byte_of_the_header(good, tmp_path):
    """An error of ours, never another exception, and quick. What follows the header is cut, so that none is a model."""
    random_numbers = random.Random(0)
    header = good.index(b"output_norm.weight") + 200
    for _ in range(300):
        at = random_numbers.randrange(header)
        error_of(tmp_path, good[:at])
        changed = bytearray(good[: header + 4000])
        changed[at] ^= 1 << random_numbers.randrange(8)
        error_of(tmp_path, changed)


def test_positive_A(good, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(good)
    from mamba_ssm.gguf._format import GGUFFile

    tensor = GGUFFile(file).tensors["blk.0.ssm_a"]
    changed = good[: tensor.offset] + struct.pack("<f", 1.0) + good[tensor.offset + 4 :]
    assert "blk.0.ssm_a must be negative throughout" in error_of(tmp_path, changed)


# ---- folders, the command and tokenizers -----------------------------------------------------------------------------


@pytest.fixture
def tokenizer_json():
    """A small byte-level BPE tokenizer, with a token of its own."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "initial_alphabet": letters, "special_tokens": ["<|endoftext|>"]}
    made.train_from_iterator(
        ["the old boat near the river waits, the boats wait"] * 9, tokenizers.trainers.BpeTrainer(**options)
    )
    return made.to_str()


@needs_writer
def test_a_folder_with_a_tokenizer(tmp_path, tokenizer_json):
    from tokenizers import Tokenizer

    folder, file, text = tmp_path / "folder", tmp_path / "model.gguf", "the old boats, near\n the rivér <|endoftext|>"
    model = model_of("mamba", vocab_size=Tokenizer.from_str(tokenizer_json).get_vocab_size())
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    command.main(["export", str(folder), str(file), "--type", "f16"])
    expected = Tokenizer.from_str(tokenizer_json).encode(text).ids
    assert Tokenizer.from_str(load_tokenizer(file)).encode(text).ids == expected
    command.main(["import", str(file), str(tmp_path / "back")])
    back = Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    assert back.encode(text).ids == expected and back.decode(expected) == text.removesuffix("<|endoftext|>")
    found = MambaLMHeadModel.from_pretrained(tmp_path / "back")
    torch.testing.assert_close(found.lm_head.weight, model.lm_head.weight.half().float())
    with llama_cpp.Model(file) as theirs:
        assert theirs.tokenize(text) == expected


@needs_writer
def test_a_folder_without_one_keeps_its_dtype(tmp_path):
    model_of().bfloat16().save_pretrained(tmp_path)
    said = export_folder(tmp_path, tmp_path / "model.gguf")
    assert said.endswith(f"model.gguf: bf16, no tokenizer ({tmp_path} has no tokenizer.json)")
    assert load_tokenizer(tmp_path / "model.gguf") is None
    assert import_file(tmp_path / "model.gguf", tmp_path / "back").endswith("config.json, weights and no tokenizer")
    quantize(model_of()).save_pretrained(tmp_path)
    assert "model.gguf: q8_0" in export_folder(tmp_path, tmp_path / "model.gguf")


@needs_writer
@pytest.mark.parametrize(
    "change,words",
    [
        ({"model": {"type": "Unigram"}}, "no tokenizer .*a model of type 'Unigram', not BPE"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "no tokenizer .*splits text by 'Metaspace'"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "no tokenizer .*puts a space before"),
        ({"model": {"type": "BPE", "vocab": {"a": 9000}, "merges": []}}, "token 'a' has the number 9000"),
        ({"model": []}, "tokenizer.json is damaged"),
    ],
)
def test_other_tokenizers(tmp_path, change, words):
    model_of().save_pretrained(tmp_path)
    contents = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    contents["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**contents, **change}))
    try:
        said = export_folder(tmp_path, tmp_path / "model.gguf")
    except ValueError as error:
        said = str(error)
    assert re.search(words, said), said


def test_the_command_says_what_is_wrong(tmp_path):
    done = run_script(command.__file__, "import", tmp_path / "none.gguf", tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: there is no file")


def test_without_the_package_gguf(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "mamba_ssm\[gguf\]"'):
        export_model(model_of(), tmp_path / "model.gguf")
