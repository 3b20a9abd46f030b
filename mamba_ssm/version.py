"""The package's version, written here only. The wheel's local label (``+cu130``) is put on by the build."""

__version__ = "2.4.0"
