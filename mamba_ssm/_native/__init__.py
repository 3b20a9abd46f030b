"""The line between Python and the kernel libraries: struct mirror (abi), finding and loading (loader), calls (call)."""
