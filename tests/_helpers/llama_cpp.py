"""llama.cpp, through the C interface of the library in the wheel xllamacpp: the logits of a GGUF file's model."""

import ctypes
import importlib.util
import os
from pathlib import Path

import pytest


class _Parameters(ctypes.Structure):
    """Larger than any of its structs of parameters, which are passed by value: only the first integers are set."""

    _fields_ = [("bytes", ctypes.c_uint8 * 512)]


class _Batch(ctypes.Structure):
    _names = "token", "embd", "pos", "n_seq_id", "seq_id", "logits"
    _fields_ = [("n", ctypes.c_int32)] + [(name, ctypes.c_void_p) for name in _names]


_pointer, _int = ctypes.c_void_p, ctypes.c_int32
_FUNCTIONS = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_Parameters, []),
    "llama_context_default_params": (_Parameters, []),
    "llama_model_load_from_file": (_pointer, [ctypes.c_char_p, _Parameters]),
    "llama_model_free": (None, [_pointer]),
    "llama_model_get_vocab": (_pointer, [_pointer]),
    "llama_tokenize": (_int, [_pointer, ctypes.c_char_p, _int, _pointer, _int, ctypes.c_bool, ctypes.c_bool]),
    "llama_init_from_model": (_pointer, [_pointer, _Parameters]),
    "llama_free": (None, [_pointer]),
    "llama_batch_get_one": (_Batch, [_pointer, _int]),
    "llama_decode": (_int, [_pointer, _Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_pointer, _int]),
}
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_silent = _LOG(lambda level, text, data: None)  # kept: llama.cpp calls it later


def library():
    """The library; skips the test where it is not there."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel xllamacpp, which has llama.cpp, is not installed")
    folder = Path(spec.origin).parent
    files = [file for file in os.listdir(folder) if file.startswith("xllamacpp.") and file.endswith((".so", ".pyd"))]
    try:
        loaded = ctypes.CDLL(str(folder / files[0]))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError, IndexError) as error:
        pytest.skip(f"xllamacpp does not show llama.cpp's C interface here: {error}")
    loaded.llama_log_set(_silent, None)
    loaded.llama_backend_init()
    return loaded


class Model:
    """A file's model in llama.cpp, as a context manager."""

    def __init__(self, file):
        self.library = library()
        self.model = self.library.llama_model_load_from_file(
            os.fsencode(file), self.library.llama_model_default_params()
        )
        assert self.model, f"llama.cpp refused {file}"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.library.llama_model_free(self.model)

    def logits(self, tokens, vocabulary):
        """Of the last of these tokens, a list of numbers."""
        settings = self.library.llama_context_default_params()
        ctypes.cast(settings.bytes, ctypes.POINTER(ctypes.c_uint32))[0] = 512  # of context
        context = self.library.llama_init_from_model(self.model, settings)
        assert context
        given = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self.library.llama_batch_get_one(ctypes.cast(given, ctypes.c_void_p), len(tokens))
        assert self.library.llama_decode(context, batch) == 0
        found = self.library.llama_get_logits_ith(context, -1)[:vocabulary]
        self.library.llama_free(context)
        return found

    def tokenize(self, text):
        """The numbers of a text's tokens."""
        data, room = text.encode(), (ctypes.c_int32 * 256)()
        vocabulary = self.library.llama_model_get_vocab(self.model)
        into = ctypes.cast(room, ctypes.c_void_p)
        count = self.library.llama_tokenize(vocabulary, data, len(data), into, len(room), False, True)
        return list(room[:count])
