"""Each rule of scripts/lint_msvc.py: what it must find, and its neighbour that it must leave alone."""

import lint_msvc
import pytest
from lint_msvc import RULES, lint

# rule: (file name, source that breaks it on the line that ends in "// HERE", source that does not)
CASES = {
    "macro-lambda": [
        (
            "a.cuh",
            "#define BOOL_SWITCH(cond, name, code) [&] { constexpr bool name = true; code(); }()  // HERE\n",
            "#define JOIN(a, b) a##b\n",
        ),
        ("a.h", "#define RUN(x) \\\n    [&]() { return x; }()\n", "#define INDEX(a, i) ((a)[i])\n"),
    ],
    "lambda-constexpr": [
        (
            "a.cuh",
            "int f() {\n    constexpr int kN = 4;\n    auto l = [&] {\n"
            "        return value<kN + 1>();  // HERE\n    };\n}\n",
            "int f() {\n    static constexpr int kN = 4;\n    auto l = [&] {\n"
            "        return value<kN + 1>();\n    };\n}\n",
        ),
        (
            "a.cpp",
            "int f() {\n    constexpr int n = 2;\n"
            "    auto l = [=](int a) -> int { return g<int, n>(a); };  // HERE\n}\n",
            "int f() {\n    constexpr int n = 2;\n}\nint g() {\n    auto l = [=](int a) { return h<int, n>(a); };\n}\n",
        ),
    ],
    "compared-default": [
        (
            "a.cuh",
            "template <class Tiles, int kEach = Tiles::kRows < 32 ? 1 : 2>  // HERE\nvoid f();\n",
            "template <int kRows, int kEach = (kRows + 31) / 32>\nvoid f();\ntemplate <class T = A<int>>\n"
            "void g() { bool b = 1 < 2; }\n",
        ),
    ],
    "conditional-template": [
        (
            "a.cuh",
            "auto kernel = fast ? run<T, 8, true> : run<T, 8, false>;  // HERE\n",
            "auto size = fast ? run<T, true>(p) : run<T, false>(p);\nauto x = a ? b : c;\n",
        ),
        ("a.cu", "k = a && b ? ns::f<(V > 1)>\n                : ns::f<false>;\n", "k = f<true>;\n"),
    ],
    "specialised-constant": [
        (
            "a.cuh",
            "template <>  // HERE\nconstexpr int kCode<__half> = 1;\n",
            "template <>\ninline constexpr int kCode<T> = 1;\ntemplate <>\nconstexpr int f<T>() {\n    int a = 1;\n}\n",
        ),
    ],
    "math-constant": [
        ("a.cpp", "double x = M_PI;  // HERE\n", 'double x = kPi;  // not M_PI\nconst char* s = "M_PI";\n')
    ],
    "posix-type": [
        ("a.cu", "void f(uint a);  // HERE\n", "void f(unsigned a, uint32_t b, uint4 c);\n"),
        ("a.cpp", "ssize_t n;  // HERE\n", "int64_t n; int my_ssize_t;\n"),
    ],
    "posix-header": [
        ("a.cpp", "#include <unistd.h>  // HERE\n", "#include <stdio.h>\n"),
        ("a.cpp", "#include <sys/mman.h>  // HERE\n", '#include "sys/mman.h"\n'),
    ],
    "alternative-token": [
        ("a.cpp", "bool f = a and not b;  // HERE\n", "bool f = a && !b;  // and not b\n"),
        ("a.cpp", "int f = a bitand b;  // HERE\n", 'const char* s = "this or that";\n#error this and that or not\n'),
    ],
    "long": [
        ("a.cpp", "long f();  // HERE\n", "long long f(); long double g(); unsigned long long h();\n"),
        ("a.cpp", "std::vector<unsigned long> v;  // HERE\n", "int longest; // a long word\n"),
    ],
    "printf-long": [
        ("a.cpp", 'printf("%ld", x);  // HERE\n', 'printf("%lld %llu %d", x, y, z);\n'),
        ("a.cpp", 'fail(1, "n is %5lu", x);  // HERE\n', "int old = a %ld;\n"),
    ],
    "directive-in-macro": [
        ("a.cpp", "SUM(1,\n#ifdef _WIN32  // HERE\n    2);\n", "sum(1,\n#ifdef _WIN32\n    2);\n"),
        ("a.cpp", "CHECK(f(\n    a,\n    #if X  // HERE\n    b));\n", "#if X\nCHECK(a);\n#endif\n"),
    ],
    "plain-if": [
        (
            "a.cuh",
            "template <typename T>\nint launch(T x);\ntemplate <bool kZ>\nint f(int x) {\n    if (kZ) {  // HERE\n"
            "        return launch<int>(x);\n    }\n    return 0;\n}\n",
            "template <typename T>\nint launch(T x);\ntemplate <bool kZ>\nint f(int x) {\n    if constexpr (kZ) {\n"
            "        return launch<int>(x);\n    }\n    return 0;\n}\n",
        ),
        (
            "a.cu",
            "template <int N> int g();\ntemplate <int N, bool kA>\nint f() {\n"
            "    if (!kA) return g<N>();  // HERE\n    return 0;\n}\n",
            "template <int N> int g() {\n    return N;\n}\ntemplate <int N, bool kA>\nint f() {\n"
            "    if (!kA) return g<N>();\n    return 0;\n}\n",
        ),
    ],
    "variadic-macro": [
        ("a.h", "#define LOG(format, ...) 0  // HERE\n", "#define LOG(format) 0\nvoid log(const char*, ...);\n"),
        ("a.h", "#define A(x) f(__VA_ARGS__)  // HERE\n", "// __VA_ARGS__\n"),
    ],
    "cplusplus-value": [
        ("a.h", "#if __cplusplus >= 201703L  // HERE\n#endif\n", "#ifdef __cplusplus\n#endif\n"),
        ("a.h", "#if 201703L <= __cplusplus  // HERE\n#endif\n", "#if defined(__cplusplus)\n#endif\n"),
    ],
    "attribute": [
        ("a.cpp", "int __attribute__((noinline)) f();  // HERE\n", "[[nodiscard]] int f(); alignas(16) int x;\n")
    ],
    "variable-length-array": [
        (
            "a.cpp",
            "int f(int n) {\n    float a[n];  // HERE\n}\n",
            "int f() {\n    float a[kN], b[3];\n    b[n] = 1;\n}\n",
        ),
        (
            "a.cuh",
            "int f(int n) {\n    int64_t sums[n + 1] = {};  // HERE\n}\n",
            "template <int n>\nint f() {\n    constexpr int m = 2;\n    int64_t sums[n + 1] = {};\n"
            "    int b[m];\n    int c[sizeof(int)];\n}\n",
        ),
    ],
    "int128": [("a.cpp", "__int128 x;  // HERE\n", "__m128i x; int64_t y;\n")],
    "statement-expression": [("a.cpp", "int x = ({ int y = 1; y; });  // HERE\n", "f({1, 2}); int x = g({});\n")],
    "typeof": [("a.cpp", "__typeof__(x) y = x;  // HERE\n", "decltype(x) y = x; auto typeof_x = 1;\n")],
    "case-range": [
        (
            "a.cpp",
            "switch (x) {\n    case 1 ... 3:  // HERE\n}\n",
            "switch (x) {\n    case 1:\n    case 2:\n        f(...);\n}\n",
        )
    ],
    "designated-initialiser": [
        ("a.cpp", "S s = {.a = 1};  // HERE\n", "S s = {1, .5f};\ns.a = 1;\nbool b = f(1, x.y == 2);\n"),
        ("a.cpp", "S s{1,\n    .b = 2};  // HERE\n", "f(a, b).c = 1;\n"),
    ],
    "elvis": [("a.cpp", "int x = a ?: b;  // HERE\n", "int x = a ? ::b : c;\n")],
    "computed-goto": [
        ("a.cpp", "void* p = &&label;  // HERE\n", "bool b = (a &&b);\nT&& f(T&& x);\n"),
        ("a.cpp", "goto *p;  // HERE\n", "goto end;\n"),
    ],
    "builtin": [("a.cu", "int x = __builtin_popcount(y);  // HERE\n", "int x = __popc(y); // __builtin_popcount\n")],
    "pretty-function": [("a.cpp", "f(__PRETTY_FUNCTION__);  // HERE\n", "f(__func__);\n")],
    "zero-length-array": [
        ("a.h", "struct S {\n    int data[0];  // HERE\n};\n", "struct S {\n    int data[1];\n};\n"),
        (
            "a.h",
            "struct S {\n    float* rows[];  // HERE\n};\n",
            "void f() {\n    extern __shared__ float4 shared[];\n}\n",
        ),
    ],
    "restrict": [("a.cpp", "void f(float* __restrict__ x);  // HERE\n", "void f(float* __restrict x);\n")],
    "inline-assembly": [
        ("a.cpp", '__asm__ volatile("nop");  // HERE\n', "int asmx(int); // asm(...)\n"),
        ("a.h", 'asm("nop");  // HERE\n', 'const char* s = "asm(1)";\n'),
    ],
    "thread-keyword": [("a.cpp", "static __thread int x;  // HERE\n", "static thread_local int x;\n")],
    "gnu-pragma": [("a.h", "#pragma GCC diagnostic push  // HERE\n", "#pragma once\n#pragma unroll\n")],
    "warning-directive": [("a.h", "#warning slow  // HERE\n", "#error slow\n")],
    "openmp": [
        ("a.cpp", "#pragma omp parallel for  // HERE\n", "#pragma once\n"),
        ("a.cpp", "#include <omp.h>  // HERE\n", "// no OpenMP\n"),
    ],
    "not-ascii": [("a.cpp", "// \u00fc HERE\n", "// plain\n")],
    "cuda-include": [
        ("a.cu", "#include <vector>  // HERE\n", '#include <cuda_fp16.h>\n#include <stdint.h>\n#include "a.h"\n'),
        ("a.cuh", "#include <cub/cub.cuh>  // HERE\n", "// #include <vector>\n"),
    ],
}
# Both ways round: constructs that are fine where they stand.
FINE = [
    ("a.cu", "void f(float* __restrict__ x);\n"),
    ("a.cu", 'asm volatile("" : "+l"(pointer));\n'),
    ("a.cpp", "#include <vector>\n"),
    ("tests/cuda/test.cu", "#include <vector>\n"),
]


def table():
    return [
        pytest.param(name, *case, id=f"{name}-{i}") for name, cases in CASES.items() for i, case in enumerate(cases)
    ]


def test_every_rule_has_a_case():
    assert sorted(CASES) == sorted(rule.name for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("rule", "name", "bad", "good"), table())
def test_rule_fires(rule, name, bad, good):
    marked = [number for number, line in enumerate(bad.split("\n"), 1) if line.endswith("HERE")]
    found = [finding.line for finding in lint(name, bad) if finding.rule == rule]
    assert found == (marked or [1])


@pytest.mark.parametrize(("rule", "name", "bad", "good"), table())
def test_rule_leaves_its_neighbour_alone(rule, name, bad, good):
    assert lint(name, good) == []


@pytest.mark.parametrize(("name", "source"), FINE)
def test_fine_where_it_stands(name, source):
    assert lint(name, source) == []


def test_plain_if_knows_templates_that_another_file_compiles():
    source = "template <bool kZ>\nint f(int x) {\n    if (kZ) return launch<int>(x);\n    return 0;\n}\n"
    assert lint("a.cuh", source) == []
    assert [finding.rule for finding in lint("a.cuh", source, ["launch"])] == ["plain-if"]
    assert lint_msvc.instantiated_templates("template int launch<float>(int);\ntemplate <> int f<int>();\n") == {
        "launch"
    }
    specialised = "template <class T>\nint launch(T x);\ntemplate <>\nint launch<int>(int x) {\n    return x;\n}\n"
    assert lint("a.cuh", specialised + source) == []


def test_an_excuse_needs_a_reason():
    assert lint("a.cpp", "long x;  // NOLINT(msvc): Windows' own API\n") == []
    assert [finding.rule for finding in lint("a.cpp", "long x;  // NOLINT(msvc)\n")] == ["excuse"]
    assert [finding.rule for finding in lint("a.cpp", "long x;  // NOLINT\n")] == ["long"]
    assert lint("a.h", "#define API __attribute__((used)) /* NOLINT(msvc): the branch for others */\n") == []


def test_findings_name_file_line_rule_why_and_cure(tmp_path, capsys):
    file = tmp_path / "bad.cpp"
    file.write_text("int a;\nssize_t b;\n")
    assert lint_msvc.main([str(file)]) == 1
    printed = capsys.readouterr().out
    assert f"{file}:2: [posix-type] a POSIX name that Windows' headers lack; write: uint32_t, int64_t" in printed
    file.write_text("int a;\n")
    assert lint_msvc.main([str(file)]) == 0


def test_csrc_is_clean(capsys):
    assert lint_msvc.main([]) == 0, capsys.readouterr().out
