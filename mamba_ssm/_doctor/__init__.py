"""The doctor, `python -m mamba_ssm` or `python -m mamba_ssm_doctor`: is this installation whole, and does it compute?

It has to work in an installation that does not. So all but libraries.py and self_test.py is standard library alone, and
runs before the rest of mamba_ssm and torch are imported.
"""

REINSTALL = "Reinstall mamba_ssm: pip install --force-reinstall --no-deps with the wheel's file."
