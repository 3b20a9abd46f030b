"""Saving and loading: both formats, dtypes, the hub, and errors that name the file and the cure."""

import json
import sys
import types

import pytest
import torch

from mamba_ssm import CheckpointError
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.utils import hf

CONFIG = {"d_model": 16, "n_layer": 2, "vocab_size": 21}


def make(**options):
    return MambaLMHeadModel(MambaConfig(**{**CONFIG, **options}))


@pytest.fixture
def saved(tmp_path):
    """A folder with a model, and the model."""
    model = make()
    model.save_pretrained(tmp_path)
    return tmp_path, model


def assert_same_model(found, expected):
    assert found.config == expected.config
    for (name, ours), (other, theirs) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        assert name == other and torch.equal(ours, theirs), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_round_trip(tmp_path, safe, tied):
    if safe:
        pytest.importorskip("safetensors")
    model = make(tie_embeddings=tied, ssm_cfg={"d_state": 4}, residual_in_fp32=False)
    folder = tmp_path / "made" / "here"
    model.save_pretrained(folder, safe_serialization=safe)
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", weights]
    found = MambaLMHeadModel.from_pretrained(folder)
    assert_same_model(found, model)
    assert (found.lm_head.weight is found.backbone.embedding.weight) == tied
    assert_same_model(MambaLMHeadModel.from_pretrained(str(folder), device="cpu"), model)


def test_the_folder_holds_one_model(tmp_path):
    pytest.importorskip("safetensors")
    first, second = make(), make()
    first.save_pretrained(tmp_path, safe_serialization=True)
    second.save_pretrained(tmp_path)
    assert_same_model(MambaLMHeadModel.from_pretrained(tmp_path), second)
    first.save_pretrained(tmp_path, safe_serialization=True)
    assert_same_model(MambaLMHeadModel.from_pretrained(tmp_path), first)


def test_dtype(saved):
    folder, model = saved
    narrow = MambaLMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert narrow.lm_head.weight.dtype == torch.bfloat16
    mixer, wide = narrow.backbone.layers[0].mixer, model.backbone.layers[0].mixer
    assert torch.equal(mixer.A_log, wide.A_log), "float32 parameters must not be rounded on the way"
    assert torch.equal(mixer.in_proj.weight, wide.in_proj.weight.bfloat16())
    state = hf.load_state_dict_hf(folder, dtype=torch.float16)
    assert all(tensor.dtype == torch.float16 for tensor in state.values())
    assert torch.equal(state["lm_head.weight"], state["backbone.embedding.weight"])
    assert hf.load_config_hf(folder)["d_model"] == 16


@pytest.mark.gpu
def test_onto_the_gpu(saved, cuda):
    folder, model = saved
    found = MambaLMHeadModel.from_pretrained(folder, device=cuda)
    assert all(parameter.device.type == "cuda" for parameter in found.parameters())
    assert_same_model(found.cpu(), model)


# ---- errors ----------------------------------------------------------------------------------------------------------


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def load_error(folder, kind=ValueError):
    with pytest.raises(kind) as error:
        MambaLMHeadModel.from_pretrained(folder)
    return str(error.value)


def test_nothing_is_written_where_the_configuration_cannot_be(tmp_path):
    model = make()
    model.config.ssm_cfg = {"dt_rank": torch.tensor(1)}
    with pytest.raises(TypeError, match="not JSON serializable"):
        model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_files_that_are_not_there(saved, tmp_path):
    folder, _ = saved
    (folder / "pytorch_model.bin").unlink()
    text = load_error(folder, FileNotFoundError)
    assert str(folder) in text and "pytorch_model.bin" in text and "model.safetensors" in text
    assert text.endswith("it holds config.json")
    (folder / "config.json").unlink()
    assert load_error(folder, FileNotFoundError).endswith("has no config.json; it holds nothing")
    for i in range(2000):
        (folder / f"file{i:04d}").touch()
    expected = "it holds file0000, file0001, file0002, file0003, file0004 and 1995 more"
    assert load_error(folder, CheckpointError).endswith(expected)


@pytest.mark.parametrize("contents", [b"", b"not a checkpoint", "half"], ids=["empty", "text", "cut"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_damaged_weights(saved, name, contents):
    folder, model = saved
    if name == "model.safetensors":
        pytest.importorskip("safetensors")
        model.save_pretrained(folder, safe_serialization=True)
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if contents == "half" else contents)
    text = load_error(folder)
    assert str(path) in text and "damaged" in text


def split(folder, state, parts=3):
    """Writes the state dict over several files, as accelerate and transformers do with large ones."""
    (folder / "pytorch_model.bin").unlink()
    files = {name: f"pytorch_model-{i % parts + 1:05d}-of-{parts:05d}.bin" for i, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return index, sorted(set(files.values()))


def test_split_weights(saved, hub):
    folder, model = saved
    index, files = split(folder, model.state_dict())
    assert_same_model(MambaLMHeadModel.from_pretrained(folder), model)
    asked = []

    def download(name, file):
        asked.append(file)
        if not (folder / file).exists():
            raise EntryNotFoundError(file)
        return str(folder / file)

    hub.hf_hub_download = download
    assert_same_model(MambaLMHeadModel.from_pretrained("somebody/some-model"), model)
    assert asked[-3:] == files
    (folder / files[1]).unlink()
    assert files[1] in load_error(folder, FileNotFoundError)
    for contents in ('{"weight_map": ["a"]}', "{}"):
        index.write_text(contents)
        assert f"{index} is no index of weights" in load_error(folder)
    index.write_text("{")
    assert f"{index} is damaged" in load_error(folder)
    model.save_pretrained(folder)
    assert not index.exists()
    assert_same_model(MambaLMHeadModel.from_pretrained(folder), model)


def test_weights_that_are_no_state_dict(saved):
    folder, _ = saved
    torch.save({"step": 3, "model": {"weight": torch.ones(2)}}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin must hold a dict of tensors" in load_error(folder)


@pytest.mark.parametrize(
    ("make_tensor", "kind"),
    [
        (lambda tensor: tensor.to("meta"), "a meta tensor"),
        (lambda tensor: torch.quantize_per_tensor(tensor, 1.0, 0, torch.qint8), "a quantized tensor"),
        (lambda tensor: torch.nested.nested_tensor([tensor]), "a nested tensor"),
        (lambda tensor: torch.nested.nested_tensor([tensor], layout=torch.jagged), "a nested tensor"),
        (lambda tensor: tensor.to_sparse(), "layout torch.sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's, of its own prototypes
def test_weights_that_are_no_dense_tensors(saved, make_tensor, kind):
    folder, model = saved
    state = {**model.state_dict(), "backbone.norm_f.weight": make_tensor(torch.ones(16))}
    torch.save(state, folder / "pytorch_model.bin")
    expected = f"pytorch_model.bin: backbone.norm_f.weight must be a dense tensor with data, got {kind}"
    unnamed = f"pytorch_model.bin: weights must be dense tensors with data, and it holds {kind}"  # torch 2.15, nested
    assert load_error(folder).endswith((expected, unnamed))


def test_weights_of_another_model(saved):
    folder, model = saved
    edit_config(folder, n_layer=3)
    text = load_error(folder)
    assert "pytorch_model.bin does not fit its config.json" in text
    assert "n_layer is 3 there, but the weights have 2 layers" in text
    edit_config(folder, n_layer=2, d_model=24)
    assert "d_model 24 there need backbone.embedding.weight (24, 24), got (24, 16)" in load_error(folder)
    edit_config(folder, d_model=16)
    state = {**model.state_dict(), "extra.weight": torch.ones(1)}
    torch.save(state, folder / "pytorch_model.bin")
    assert "does not fit its config.json: unexpected: extra.weight" in load_error(folder)
    state = {**model.state_dict(), "lm_head.weight": torch.zeros(24, 16)}
    torch.save(state, folder / "pytorch_model.bin")
    assert "lm_head.weight differs from backbone.embedding.weight" in load_error(folder)
    del state["backbone.norm_f.weight"]
    torch.save(state, folder / "pytorch_model.bin")
    assert "does not fit its config.json: missing: backbone.norm_f.weight" in load_error(folder)
    torch.save({}, folder / "pytorch_model.bin")
    assert "the weights have no backbone.layers.0, ...; they are none" in load_error(folder)


def test_a_tied_head_may_be_left_out(saved):
    folder, model = saved
    state = model.state_dict()
    del state["lm_head.weight"]
    torch.save(state, folder / "pytorch_model.bin")
    assert_same_model(MambaLMHeadModel.from_pretrained(folder), model)


def test_wrong_configurations(saved):
    folder, _ = saved
    edit_config(folder, hidden_size=16, model_type="mamba")
    text = load_error(folder)
    assert "unknown hidden_size, model_type" in text and "loaded with transformers" in text and str(folder) in text
    (folder / "config.json").write_text('{"d_model": 16')
    assert "config.json is damaged" in load_error(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe")
    assert "config.json is damaged" in load_error(folder)
    (folder / "config.json").write_text("[" * 200_000)
    assert "config.json is damaged" in load_error(folder)
    (folder / "config.json").write_text("[1]")
    assert "must hold a JSON object, got list" in load_error(folder)


# ---- packages that may be missing, and the hub -----------------------------------------------------------------------


def test_safetensors_is_asked_for_only_where_it_is_needed(saved, monkeypatch):
    folder, model = saved
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setattr(hf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'safetensors is needed for .*pip install "mamba_ssm\[safetensors\]"'):
        model.save_pretrained(folder, safe_serialization=True)
    (folder / "model.safetensors").write_bytes(b"never read: there is a .bin")
    assert_same_model(MambaLMHeadModel.from_pretrained(folder), model)
    (folder / "pytorch_model.bin").unlink()
    text = load_error(folder, ImportError)
    assert "safetensors is needed to read" in text and str(folder) in text and "mamba_ssm[safetensors]" in text


def test_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    text = load_error("somebody/some-model", ImportError)
    assert "huggingface_hub is needed" in text and "'somebody/some-model'" in text and "mamba_ssm[hub]" in text


class EntryNotFoundError(Exception):
    pass


class LocalEntryNotFoundError(EntryNotFoundError):
    pass


class RepositoryNotFoundError(Exception):
    pass


class HFValidationError(Exception):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for huggingface_hub: download is set by the test."""
    package = types.ModuleType("huggingface_hub")
    package.utils = types.SimpleNamespace(
        EntryNotFoundError=EntryNotFoundError,
        LocalEntryNotFoundError=LocalEntryNotFoundError,
        RepositoryNotFoundError=RepositoryNotFoundError,
        HFValidationError=HFValidationError,
        GatedRepoError=GatedRepoError,
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    return package


def test_from_the_hub(saved, hub):
    folder, model = saved

    def download(name, file):
        assert name == "somebody/some-model"
        if not (folder / file).exists():
            raise EntryNotFoundError(file)
        return str(folder / file)

    hub.hf_hub_download = download
    assert_same_model(MambaLMHeadModel.from_pretrained("somebody/some-model"), model)
    (folder / "pytorch_model.bin").unlink()
    text = load_error("somebody/some-model", FileNotFoundError)
    assert "the hub's 'somebody/some-model' has no" in text and "pytorch_model.bin" in text


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (LocalEntryNotFoundError, "the hub was not reached"),
        (ConnectionError, "the hub was not reached"),
        (RepositoryNotFoundError, "the hub has no such model, or it is private and needs `hf auth login`"),
        (HFValidationError, "the hub has no such model"),
        (GatedRepoError, "the hub's model is gated: ask for access on its page, then `hf auth login`"),
    ],
)
def test_hub_without_the_model(hub, kind, problem):
    def download(name, file):
        raise kind("the reason" + 10_000 * " and more")

    hub.hf_hub_download = download
    with pytest.raises(hf.CheckpointNotFoundError) as error:
        MambaLMHeadModel.from_pretrained("somebody/no_such_model")
    text = str(error.value)
    assert f"'somebody/no_such_model' is no folder here, and {problem}" in text and "the reason" in text
    assert isinstance(error.value, FileNotFoundError) and type(error.value.__cause__) is kind and len(text) < 600


PATHS = (
    "/no/such/folder",
    "./no_such",
    "../no_such",
    "~/no_such",
    r"C:\no\such",
    r"no\such",
    "no/such/folder",
    "no such",
)


@pytest.mark.parametrize("path", [*PATHS, "x" * 999])
def test_a_path_is_never_taken_to_the_hub(monkeypatch, path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises ImportError
    for load in MambaLMHeadModel.from_pretrained, hf.load_config_hf, hf.load_state_dict_hf:
        with pytest.raises(CheckpointError, match="there is no folder") as error:
            load(path)
        assert isinstance(error.value, FileNotFoundError) and len(str(error.value)) < 150


def test_what_is_no_name(saved):
    folder, _ = saved
    for name in (None, 3, b"folder", "", ["folder"]):
        with pytest.raises(TypeError, match="a folder or the name of a hub repository, got"):
            MambaLMHeadModel.from_pretrained(name)
    text = load_error(folder / "config.json", FileNotFoundError)
    assert f"{folder / 'config.json'} is a file: give the folder that holds it" in text


def test_a_folder_below_home(saved, monkeypatch):
    folder, model = saved
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert_same_model(MambaLMHeadModel.from_pretrained(f"~/{folder.name}"), model)


def test_the_stand_in_has_the_real_hubs_names():
    hub = pytest.importorskip("huggingface_hub")
    assert callable(hub.hf_hub_download)
    for name in ("EntryNotFoundError", "RepositoryNotFoundError", "HFValidationError"):
        assert issubclass(getattr(hub.utils, name), Exception)
    assert issubclass(hub.utils.GatedRepoError, hub.utils.RepositoryNotFoundError)
    assert issubclass(hub.utils.LocalEntryNotFoundError, hub.utils.EntryNotFoundError)


class WithMore(MambaLMHeadModel):
    """A subclass whose constructor adds a buffer of integers, a layer and rows to the embedding."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.backbone.layers.append(torch.nn.Linear(config.d_model, config.d_model))
        self.backbone.embedding = torch.nn.Embedding(60, config.d_model)


def test_a_subclass_decides_what_it_holds(tmp_path):
    model = WithMore(MambaConfig(d_model=16, n_layer=2, vocab_size=50, tie_embeddings=False))
    model.save_pretrained(tmp_path)
    loaded = WithMore.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    torch.save({**model.state_dict(), "lm_head.weight": torch.zeros(56, 16).long()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights must be float32, .* got lm_head.weight int64"):
        WithMore.from_pretrained(tmp_path)


def test_weights_with_a_prefix_are_named(saved):
    folder, model = saved
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, folder / "pytorch_model.bin")
    assert "have no backbone.layers.0, ...; they are module.backbone.embedding.weight" in load_error(folder)
