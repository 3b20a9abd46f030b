"""The problems, a module for each kind of case.

prepare(case, device, side) makes the inputs, compares the side's results with the float64 reference, and returns
{pass: calls}: calls that need no arguments and take turns, each with inputs of its own. "memory" is one such call.
"""
