"""An operator's flat arguments and the records that name them: fields with a default come last of all."""

import typing

import torch

from mamba_ssm._torch import flat, signature, unpack


class Inputs(typing.NamedTuple):
    x: torch.Tensor
    z: torch.Tensor | None


class Options(typing.NamedTuple):
    softplus: bool
    reverse: bool = False


class Wanted(typing.NamedTuple):
    last_state: bool
    twice: bool = False


class Late(typing.NamedTuple):
    late: bool = False


def test_fields_with_a_default_are_the_last_arguments():
    expected = "Tensor x, Tensor? z, bool softplus, bool last_state, bool reverse=False, bool twice=False"
    assert signature(Inputs, Options, Wanted) == expected
    assert signature(Late, Inputs) == "Tensor x, Tensor? z, bool late=False"


def test_flat_and_unpack_are_inverses():
    records = [Inputs("x", "z"), Options("softplus", "reverse"), Wanted("last_state", "twice")]
    arguments = flat(*records)
    assert arguments == ("x", "z", "softplus", "last_state", "reverse", "twice")
    assert unpack(arguments, Inputs, Options, Wanted) == records
    assert unpack(flat(Late(True), records[0]), Late, Inputs) == [Late(True), records[0]]
    assert [type(record) for record in unpack(arguments, Inputs, Options, Wanted)] == [Inputs, Options, Wanted]
