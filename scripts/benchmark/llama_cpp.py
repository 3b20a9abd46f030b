"""llama.cpp through its C interface, as the package xllamacpp brings it: a library that ctypes opens."""

import ctypes
import importlib.util
import sys
from pathlib import Path

import torch


def installed():
    """Whether llama.cpp is here, and the package that writes its files."""
    return all(map(importlib.util.find_spec, ("xllamacpp", "gguf")))


class _Parameters(ctypes.Structure):
    """Larger than any of llama.cpp's structures of parameters, which are passed by value and differ by version."""

    _fields_ = [("numbers", ctypes.c_uint32 * 128)]


class _Batch(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int32)] + [
        (name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
    ]


_FUNCTIONS = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_Parameters, []),
    "llama_context_default_params": (_Parameters, []),
    "llama_model_load_from_file": (ctypes.c_void_p, [ctypes.c_char_p, _Parameters]),
    "llama_model_free": (None, [ctypes.c_void_p]),
    "llama_init_from_model": (ctypes.c_void_p, [ctypes.c_void_p, _Parameters]),
    "llama_free": (None, [ctypes.c_void_p]),
    "llama_batch_get_one": (_Batch, [ctypes.c_void_p, ctypes.c_int32]),
    "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, _Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]),
    "llama_set_n_threads": (None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
    "llama_get_memory": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_memory_clear": (None, [ctypes.c_void_p, ctypes.c_bool]),
}
_CONTEXT = 2048  # tokens that it makes room for
_PIECE = 512  # tokens of a prompt that it computes at once, its own default


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _say_errors(level, text, _):
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


def _open():
    folder = Path(importlib.util.find_spec("xllamacpp").origin).parent
    names = [path for path in sorted(folder.iterdir()) if path.suffix in (".so", ".pyd", ".dylib")]
    library = ctypes.CDLL(str(names[0]))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_say_errors, None)
    library.llama_backend_init()
    return library


class Model:
    """A GGUF file in llama.cpp, with one sequence."""

    def __init__(self, path, vocabulary, threads):
        self.library = _open()
        self.vocabulary = vocabulary
        self.model = self.library.llama_model_load_from_file(
            str(path).encode(), self.library.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        settings = self.library.llama_context_default_params()
        settings.numbers[:4] = _CONTEXT, _CONTEXT, _PIECE, 1  # n_ctx, n_batch, n_ubatch, n_seq_max
        self.context = self.library.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context for {path}")
        self.library.llama_set_n_threads(self.context, threads, threads)

    def forget(self):
        """Ready for a new sequence."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def decode(self, tokens):
        """tokens (L) int32 go on where the sequence is; the last one's logits (vocabulary), which llama.cpp owns."""
        batch = self.library.llama_batch_get_one(tokens.data_ptr(), len(tokens))
        code = self.library.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        logits = self.library.llama_get_logits_ith(self.context, -1)
        row = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary)).contents
        return torch.frombuffer(row, dtype=torch.float32)

    def close(self):
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)
