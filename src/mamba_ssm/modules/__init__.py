"""Neural network modules in upstream's names and parameter layouts."""
