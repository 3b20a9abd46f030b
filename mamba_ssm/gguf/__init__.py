"""Models as GGUF files, which llama.cpp runs, and such files as models: its architectures mamba and mamba2.

python -m mamba_ssm.gguf export FOLDER FILE [--type f32|f16|bf16|q8_0]
python -m mamba_ssm.gguf import FILE FOLDER
"""

from mamba_ssm.gguf.export import export_folder, export_model
from mamba_ssm.gguf.load import import_file, load_model, load_tokenizer

__all__ = ["export_folder", "export_model", "import_file", "load_model", "load_tokenizer"]
