"""TORCH_CUDA_ARCH_LIST: every spelling of torch's and CMake's, mixed and repeated, gives one normalised plan."""

import pytest
from wheel_build.architectures import check_spelling, plan_architectures
from wheel_build.config import SwitchError

CUDA_13_0 = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]
CUDA_12_4 = [50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90]
ALL_13_0 = [f"{number}{'a' if number == 90 else ''}-real" for number in CUDA_13_0] + ["121-virtual"]

PLANS = [
    # one architecture, in every spelling
    ("8.6", "86-real"),
    ("86", "86-real"),
    ("86-real", "86-real"),
    ("8.6-real", "86-real"),
    ("86-virtual", "86-virtual"),
    ("8.6-virtual", "86-virtual"),
    ("8.6+PTX", "86-real 86-virtual"),
    ("8.6+ptx", "86-real 86-virtual"),
    ("86+PTX", "86-real 86-virtual"),
    ("7.5", "75-real"),
    ("9.0", "90a-real"),
    ("90", "90a-real"),
    ("90-real", "90a-real"),
    ("9.0+PTX", "90-virtual 90a-real"),
    ("90-virtual", "90-virtual"),
    ("9.0a", "90a-real"),
    ("90a", "90a-real"),
    ("90A", "90a-real"),
    ("90a-real", "90a-real"),
    ("9.0a+PTX", "90a-real 90a-virtual"),
    ("100f", "100f-real"),
    ("10.0f-virtual", "100f-virtual"),
    ("12.0", "120-real"),
    ("120", "120-real"),
    ("12.0+PTX", "120-real 120-virtual"),
    ("120-virtual", "120-virtual"),
    ("12.1", "121-real"),
    # separators, order, repeats, mixes
    ("75;86;89;120", "75-real 86-real 89-real 120-real"),
    ("7.5;8.6;8.9;12.0", "75-real 86-real 89-real 120-real"),
    ("7.5,8.6,8.9,12.0", "75-real 86-real 89-real 120-real"),
    ("7.5 8.6 8.9 12.0", "75-real 86-real 89-real 120-real"),
    ("120 ; 89, 86\t75", "75-real 86-real 89-real 120-real"),
    (" 8.6 ", "86-real"),
    ("8.6;", "86-real"),
    ("86;8.6;86-real;8.6", "86-real"),
    ("8.6;86+PTX", "86-real 86-virtual"),
    ("86-real;86-virtual", "86-real 86-virtual"),
    ("9.0;90a", "90a-real"),
    ("7.5;120+PTX;89-real", "75-real 89-real 120-real 120-virtual"),
    # names, with torch's meaning
    ("Turing", "75-real 75-virtual"),
    ("turing", "75-real 75-virtual"),
    ("Ampere", "80-real 86-real 86-virtual"),
    ("Ada", "89-real 89-virtual"),
    ("Hopper", "90-virtual 90a-real"),
    ("HOPPER+PTX", "90-virtual 90a-real"),
    ("Blackwell", "100-real 103-real 120-real 121-real 121-virtual"),
    ("Turing;8.9", "75-real 75-virtual 89-real"),
    ("Ampere 86", "80-real 86-real 86-virtual"),
    # sets
    ("all", " ".join(sorted(ALL_13_0, key=lambda word: (int(word.split("-")[0].rstrip("a")), word)))),
    ("all-major", "75-real 80-real 90a-real 100-real 110-real 120-real 120-virtual"),
    ("ALL-MAJOR;86", "75-real 80-real 86-real 90a-real 100-real 110-real 120-real 120-virtual"),
    ("native", "89-real"),
    ("native;75", "75-real 89-real"),
    # the default
    ("", "75-real 80-real 90a-real 100-real 120-real 120-virtual"),
    ("   ", "75-real 80-real 90a-real 100-real 120-real 120-virtual"),
]


@pytest.mark.parametrize(("text", "expected"), PLANS)
def test_plan(text, expected):
    assert plan_architectures(text, CUDA_13_0, (13, 0), native=[89]).cmake == expected.split()


WRONG_SPELLINGS = ["8", "8.66", "8..6", "1200", "86-", "86-ptx", "86+", "8.6+PTX+PTX", "86-real+PTX", "86b", "sm_86"]
WRONG_SPELLINGS += ["compute_86", "Ampera", "al", "natives", "native+PTX", "8.6:8.9", "-86", "8,6x", ";", " , ;"]


@pytest.mark.parametrize("text", WRONG_SPELLINGS)
def test_wrong_spelling(text):
    with pytest.raises(SwitchError) as caught:
        plan_architectures(text, CUDA_13_0, (13, 0), native=[89])
    assert caught.value.code == "switch-invalid"
    assert caught.value.switch == "TORCH_CUDA_ARCH_LIST"
    assert "8.6, 86, 8.6+PTX" in str(caught.value)
    assert repr(text) in str(caught.value)
    # ... and the same without an nvcc to ask
    with pytest.raises(SwitchError):
        check_spelling(text)


@pytest.mark.parametrize("text", [text for text, _ in PLANS] + ["7.0", "Volta", "13.0"])
def test_right_spelling_without_nvcc(text):
    check_spelling(text)


@pytest.mark.parametrize(
    ("text", "supported", "version", "named"),
    [
        ("7.0", CUDA_13_0, (13, 0), "7.0"),
        ("Volta", CUDA_13_0, (13, 0), "7.0"),
        ("12.0", CUDA_12_4, (12, 4), "12.0"),
        ("8.6;120", CUDA_12_4, (12, 4), "12.0"),
        ("Blackwell", CUDA_12_4, (12, 4), "10.0"),
        ("12", CUDA_13_0, (13, 0), "1.2"),
        ("8.5", CUDA_13_0, (13, 0), "8.5"),
        ("75a", CUDA_13_0, (13, 0), "7.5a"),
        ("90f", CUDA_13_0, (13, 0), "9.0f"),
        ("100f", [75, 100, 120], (12, 8), "10.0f"),
        ("99.9", CUDA_13_0, (13, 0), "99.9"),
    ],
)
def test_architecture_that_nvcc_does_not_know(text, supported, version, named):
    with pytest.raises(SwitchError) as caught:
        plan_architectures(text, supported, version)
    assert caught.value.code == "architecture-unknown"
    assert f"nvcc {version[0]}.{version[1]} can compile: " in str(caught.value)
    assert f"{named} is not among them" in str(caught.value)


def test_native_without_gpu():
    with pytest.raises(SwitchError) as caught:
        plan_architectures("native", CUDA_13_0, (13, 0))
    assert caught.value.code == "native-without-gpu"


def test_default_is_cut_to_what_nvcc_knows_and_keeps_ptx():
    plan = plan_architectures("", CUDA_12_4, (12, 4))
    assert plan.cmake == ["75-real", "80-real", "90-virtual", "90a-real"]
    assert plan.left_out == ("10.0", "12.0")


def test_count_is_of_architectures_not_of_targets():
    assert plan_architectures("8.6+PTX;7.5", CUDA_13_0, (13, 0)).count == 2
