"""Constructs that gcc takes and Visual C++ does not, or takes otherwise: python scripts/lint_msvc.py [FILES...]

Looks through csrc, or the files given, and prints file:line, the rule, why, and what to write instead; exit status 1
if there is anything. It reads patterns, not C++, so a line may be excused: `// NOLINT(msvc): the reason`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".c", ".h", ".cpp", ".cu", ".cuh")
LINUX_ONLY = ROOT / "csrc" / "tests" / "emulator"  # made for g++
# What CUDA sources may include besides our own headers: they compile in seconds, and under the Windows gate.
CUDA_INCLUDES = {"stdint.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "mma.h"}
DEFINITION = r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*"  # continuation lines included
EXCUSE = re.compile(r"NOLINT\(msvc\)(: *(?P<reason>\w.*))?")


@dataclass(frozen=True)
class Source:
    """One file three times, line for line: as it is, without comments, and without comments and strings."""

    name: str
    raw: str
    text: str
    code: str
    variants: frozenset[str]  # function templates whose variants other files compile

    @property
    def cuda(self) -> bool:
        return self.name.endswith((".cu", ".cuh"))


# What a rule finds: offsets into the text.
Finder = Callable[[Source], Iterator[int]]


@dataclass(frozen=True)
class Rule:
    name: str
    why: str
    instead: str
    find: Finder


def blanked(raw: str, strings: bool) -> str:
    """The file with its comments, and its strings if asked for, as spaces; line breaks stay."""
    token = r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"' + r"|(?<!\w)'(?:\\.|[^'\\\n])+'"

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        if found[0] == "/":
            return re.sub(r"[^\n]", " ", found)
        if strings and not raw[: match.start()].rsplit("\n", 1)[-1].lstrip().startswith("#include"):
            return found[0] + re.sub(r"[^\n]", " ", found[1:-1]) + found[-1]
        return found

    text = re.sub(token, blank, raw, flags=re.DOTALL)
    return re.sub(r"(?m)^([ \t]*#[ \t]*(?:error|warning)\b)[^\n]*", lambda found: found[1].ljust(len(found[0])), text)


def read(name: str, raw: str, variants: Iterable[str]) -> Source:
    return Source(name, raw, blanked(raw, strings=False), blanked(raw, strings=True), frozenset(variants))


# ---- finders ---------------------------------------------------------------------------------------------------------


def in_code(pattern: str, cuda: bool | None = None) -> Finder:
    """Every match in the code, or its group `at`; `cuda` True or False: of CUDA sources only, or of the others only."""
    compiled = re.compile(pattern, re.MULTILINE)
    group = "at" if "at" in compiled.groupindex else 0

    def find(source: Source) -> Iterator[int]:
        if cuda in (None, source.cuda):
            yield from (match.start(group) for match in compiled.finditer(source.code))

    return find


def in_strings(pattern: str) -> Finder:
    def find(source: Source) -> Iterator[int]:
        for string in re.finditer(r'"(?:\\.|[^"\\\n])*"', source.text):
            yield from (string.start() + match.start() for match in re.finditer(pattern, string[0]))

    return find


def non_ascii(source: Source) -> Iterator[int]:
    yield from (match.start() for match in re.finditer(r"[^\x00-\x7f]+", source.raw))


def macro_bodies(source: Source) -> Iterator[tuple[int, str]]:
    """(offset, text) of every #define, continuation lines included."""
    for match in re.finditer(DEFINITION, source.code, re.MULTILINE):
        yield match.start(), match[0]


def macro_with_lambda(source: Source) -> Iterator[int]:
    for start, text in macro_bodies(source):
        match = re.search(r"\[[&=\w, ]*\]\s*(\([^)]*\)\s*)?(->\s*\w+\s*)?\{", text)
        if match or re.match(r"\s*#\s*define\s+\w*(SWITCH|DISPATCH)\w*\(", text):
            yield start


def matching(code: str, opening: int) -> int:
    """The offset behind the bracket that closes the one at `opening`."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    close, depth = pairs[code[opening]], 0
    for at in range(opening, len(code)):
        depth += {code[opening]: 1, close: -1}.get(code[at], 0)
        if depth == 0:
            return at + 1
    return len(code)


def directive_in_macro_arguments(source: Source) -> Iterator[int]:
    code = re.sub(
        r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*",
        lambda found: re.sub(r"[^\n]", " ", found[0]),
        source.code,
        flags=re.MULTILINE,
    )
    for call in re.finditer(r"\b[A-Z][A-Z0-9_]+\s*(\()", code):
        arguments = code[call.start(1) : matching(code, call.start(1))]
        for directive in re.finditer(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|else|elif|endif)\b", arguments, re.MULTILINE):
            yield call.start(1) + directive.start()


def lambda_over_constexpr(source: Source) -> Iterator[int]:
    """A constexpr local of the function around, used inside a capturing lambda as a template argument."""
    code = source.code
    for match in re.finditer(r"\[[&=][^\]\n]*\]\s*(\([^)]*\)\s*)?(mutable\s*)?(->\s*[\w:]+\s*)?(\{)", code):
        body_end = matching(code, match.start(4))
        function = code.rfind("\n}", 0, match.start())
        before = code[max(function, 0) : match.start()]
        for name in set(re.findall(r"\n[ \t]+constexpr\s+[\w:]+\s+(\w+)\s*[={]", before)):
            use = re.search(rf"<[^<>;()]*\b{name}\b[^<>;()]*>", code[match.end() : body_end])
            if use:
                yield match.end() + use.start()


def constants(code: str) -> set[str]:
    """Names that are compile-time constants here: constexpr, enumerators, template parameters, macros."""
    names = set(re.findall(r"\bconstexpr\s+(?:static\s+|inline\s+)?[\w:]+\s+(\w+)\s*[={\[]", code))
    names |= set(re.findall(r"^\s*#\s*define\s+(\w+)", code, re.MULTILINE))
    for parameters in re.findall(r"\btemplate\s*<([^{;]*?)>\s*(?:\w|\[|__)", code):
        names |= set(re.findall(r"\b(?:bool|int|int64_t|int32_t|uint32_t|size_t|unsigned)\s+(\w+)", parameters))
    for body in re.findall(r"\benum\b[^{;]*\{([^}]*)\}", code):
        names |= set(re.findall(r"(\w+)\s*(?:=[^,}]*)?(?:,|$)", body))
    return names


def declared_templates(code: str) -> set[str]:
    """Function templates declared here without a body, and not specialised here: other files compile their variants."""
    declaration = r"\btemplate\s*<[^{};]*?>\s*[\w:<>,&*\s]*?\b(\w+)\s*\([^{};]*\)\s*;"
    specialised = re.findall(r"\btemplate\s*<\s*>\s*[^{};(]*?\b(\w+)\s*<[^{};(]*>\s*\(", code)
    return set(re.findall(declaration, code)) - {"static_assert"} - set(specialised)


def instantiated_templates(code: str) -> set[str]:
    """Function templates of which this file compiles variants for others: template int f<float>(int);"""
    return set(re.findall(r"^(?:extern\s+)?template\s+(?!<)[^;{(]*?\b(\w+)\s*<[^;{(]*>\s*\(", code, re.MULTILINE))


def plain_if_on_constant(source: Source) -> Iterator[int]:
    """if (kFlag), where kFlag is a bool template parameter, around a call of a template compiled elsewhere."""
    flags: set[str] = set()
    for parameters in re.findall(r"\btemplate\s*<([^{};]*?)>", source.code):
        flags |= set(re.findall(r"\bbool\s+(\w+)", parameters))
    for match in re.finditer(r"\bif\s*\(\s*!?\s*(\w+)\s*\)\s*(\{?)", source.code):
        if match[1] not in flags:
            continue
        end = matching(source.code, match.end() - 1) if match[2] else source.code.find(";", match.end())
        called = set(re.findall(r"\b(\w+)<[^;(){}]*>\s*\(", source.code[match.end() : end]))
        if called & (source.variants | declared_templates(source.code)):
            yield match.start()


def variable_length_array(source: Source) -> Iterator[int]:
    known = constants(source.code)
    types = r"float|double|int|char|bool|unsigned|u?int\d+_t|size_t|[A-Z]\w*"
    declaration = rf"^[ \t]+(?:const\s+)?(?:{types})\s+\w+\[([a-z]\w*)\b[^\]\n]*\](?:;|\s*=|\[)"
    for match in re.finditer(declaration, source.code, re.MULTILINE):
        name = match[1]
        constant_style = re.match(r"k[A-Z]", name) or name in ("sizeof", "static_cast")
        if not constant_style and name not in known:
            yield match.start(1)


def unlisted_include(source: Source) -> Iterator[int]:
    if source.cuda and "tests/" not in source.name:
        for match in re.finditer(r"^[ \t]*#[ \t]*include\s*<([^>]+)>", source.text, re.MULTILINE):
            if match[1] not in CUDA_INCLUDES:
                yield match.start()


# ---- rules -----------------------------------------------------------------------------------------------------------

RULES = (
    Rule(
        "macro-lambda",
        "cl loses constexpr locals in the nested lambdas of such macros (C2975)",
        "template functions and if/else on named values",
        macro_with_lambda,
    ),
    Rule(
        "lambda-constexpr",
        "cl does not capture a constexpr local for a template argument (C2975, C3493)",
        "a template parameter, or static constexpr",
        lambda_over_constexpr,
    ),
    Rule(
        "conditional-template",
        "cl may not choose between two function templates as the values of a conditional (C2568)",
        "a variable that holds the one, and an if that gives it the other",
        in_code(r"\?\s*\w+(::\w+)*<[^;?]*>\s*:\s*\w+(::\w+)*<[^;?]*>\s*;"),
    ),
    Rule(
        "compared-default",
        "nvcc in Microsoft mode takes the < of a comparison in a template's default argument for a bracket",
        "arithmetic, or a named constant",
        in_code(r"\btemplate\s*<[^;{}>]*=[^;{},>]*\s<\s"),
    ),
    Rule(
        "specialised-constant",
        "one symbol a source file: cl and lld-link then find it twice (LNK2005)",
        "inline constexpr",
        in_code(r"\btemplate\s*<\s*>\s*(static\s+)?const(expr)?\b(?![^=;]*\binline\b)[^;(){}]*="),
    ),
    Rule(
        "math-constant",
        "hidden in <math.h> without _USE_MATH_DEFINES, in cl's and nvcc's passes",
        "a named constant of our own",
        in_code(r"\bM_(E|LOG2E|LOG10E|LN2|LN10|PI|PI_2|PI_4|1_PI|2_PI|2_SQRTPI|SQRT2|SQRT1_2)\b"),
    ),
    Rule(
        "posix-type",
        "a POSIX name that Windows' headers lack",
        "uint32_t, int64_t and their like",
        in_code(r"\b(uint|ushort|ulong|ssize_t|off_t|u_int\d+_t|u_char)\b(?!\s*[(=])"),
    ),
    Rule(
        "posix-header",
        "a POSIX header that Windows lacks",
        "the standard library",
        in_code(
            r"^[ \t]*#[ \t]*include\s*<(unistd|pthread|dlfcn|strings|dirent|alloca|sched|sys/\w+)\.h>"
            r"|#\s*include_next\b"
        ),
    ),
    Rule(
        "alternative-token",
        "no operator in cl's and nvcc's passes before C++20",
        "&& || ! and their like",
        in_code(r"(?<![#\w.>:])\b(and|or|not|and_eq|or_eq|not_eq|xor|xor_eq|bitand|bitor|compl)\b(?!\s*[,;:(]\s*\))"),
    ),
    Rule(
        "long",
        "32 bits on Windows: another type than int64_t, LNK2001 for templates on it",
        "int64_t, or long long",
        in_code(r"(?<!long )(?<!\w)\b(?:unsigned\s+)?long\b(?!\s+(?:long|double)\b)(?!\s+int\s+long)"),
    ),
    Rule(
        "printf-long",
        "the l of %ld means 32 bits on Windows",
        "%lld with a cast to long long",
        in_strings(r"%[-+ #0]*[\d*]*(\.[\d*]+)?l[duxoi]"),
    ),
    Rule(
        "directive-in-macro",
        "cl's preprocessor takes no directives among a macro's arguments",
        "the directive around the whole call",
        directive_in_macro_arguments,
    ),
    Rule(
        "plain-if",
        "cl compiles and keeps both branches, so that variants nobody defines are missing at the link",
        "if constexpr",
        plain_if_on_constant,
    ),
    Rule(
        "variadic-macro",
        "cl's traditional preprocessor passes __VA_ARGS__ on as one argument",
        "a function, or a macro with named arguments",
        in_code(r"^[ \t]*#[ \t]*define\s+\w+\([^)]*\.\.\.|\b__VA_(ARGS|OPT)__\b"),
    ),
    Rule(
        "cplusplus-value",
        "199711L in cl without /Zc:__cplusplus",
        "#ifdef __cplusplus, or no test: everything is C++17",
        in_code(r"\b__cplusplus\s*[<>=!]=?\s*\d|\d[lL]*\s*[<>=!]=?\s*__cplusplus\b"),
    ),
    Rule("attribute", "GNU", "alignas, [[nodiscard]], __declspec", in_code(r"\b__attribute__\b|\[\[gnu::")),
    Rule(
        "variable-length-array",
        "GNU: cl wants a constant size (C2131)",
        "a constexpr size, or allocated memory",
        variable_length_array,
    ),
    Rule("int128", "GNU", "two int64_t", in_code(r"\bu?__u?int128(_t)?\b")),
    Rule("statement-expression", "GNU", "a function", in_code(r"(?<![\w)\]>])\s*\(\{(?!\s*\})")),
    Rule("typeof", "GNU", "decltype or auto", in_code(r"\b(__)?typeof(__)?\b\s*\(")),
    Rule("case-range", "GNU", "if with two comparisons", in_code(r"\bcase\s+[^:;?\n]+\.\.\.")),
    Rule(
        "designated-initialiser",
        "C++20; cl at C++17 refuses it (C7555)",
        "assignments, or values in order",
        in_code(r"[{,]\s*(?P<at>\.)[A-Za-z_]\w*\s*(=(?!=)|\{)"),
    ),
    Rule("elvis", "GNU", "a ? a : b", in_code(r"\?\s*:(?!:)")),
    Rule("computed-goto", "GNU", "switch", in_code(r"\bgoto\s*\*|[=,(]\s*&&\s*[A-Za-z_]\w*\s*[;,)]")),
    Rule(
        "builtin",
        "GNU (nvcc has a few of the same names for device code)",
        "the standard library, CUDA's intrinsics",
        in_code(r"\b__builtin_\w+|\b__sync_\w+"),
    ),
    Rule("pretty-function", "GNU", "__func__, or a name given by the caller", in_code(r"\b__PRETTY_FUNCTION__\b")),
    Rule(
        "zero-length-array",
        "GNU: cl refuses it (C2466), or lays it out otherwise",
        "a pointer, or an array of one",
        in_code(r"^[ \t]+(?![ \t]|extern\b)[A-Za-z_][\w:<>]*[\w:<> \t*&]*[ \t*&]\w+\s*\[\s*0?\s*\]\s*;"),
    ),
    Rule("restrict", "cl has __restrict", "__restrict", in_code(r"\b__restrict__\b", cuda=False)),
    Rule(
        "inline-assembly",
        "cl has none on x64",
        "an intrinsic",
        in_code(r"(?<!\w)(__)?asm(__)?\b\s*(volatile|__volatile__)?\s*[({]", cuda=False),
    ),
    Rule("thread-keyword", "GNU", "thread_local", in_code(r"\b__thread\b")),
    Rule(
        "gnu-pragma",
        "cl warns and ignores it (C4068)",
        "the guard that it needs",
        in_code(r"#\s*pragma\s+(GCC|clang)\b"),
    ),
    Rule("warning-directive", "not before C++23 (C1021)", "#error, or nothing", in_code(r"^[ \t]*#[ \t]*warning\b")),
    Rule(
        "openmp",
        "a second OpenMP runtime beside torch's ends the process (OMP: Error #15)",
        "std::thread",
        in_code(r"#\s*pragma\s+omp\b|#\s*include\s*<omp\.h>"),
    ),
    Rule(
        "not-ascii",
        "read in the machine's code page (C4819)",
        "ASCII",
        non_ascii,
    ),
    Rule(
        "cuda-include",
        "CUDA sources include stdint.h, CUDA's and our own headers only: they compile in seconds, and on Windows",
        "CUDA's functions, or code in a .cpp file",
        unlisted_include,
    ),
)


@dataclass(frozen=True)
class Finding:
    line: int
    rule: str
    message: str


def lint(name: str, raw: str, variants: Iterable[str] = ()) -> list[Finding]:
    """What is to be said about a source, in the order of its lines.

    `name`: its path; the suffix tells CUDA from C++. `variants`: function templates whose variants other files compile.
    """
    source, found = read(name, raw, variants), set()
    lines = raw.split("\n")
    for rule in RULES:
        for offset in rule.find(source):
            line = raw.count("\n", 0, offset) + 1
            if not EXCUSE.search(lines[line - 1]):
                found.add(Finding(line, rule.name, f"{rule.why}; write: {rule.instead}"))
    for number, text in enumerate(lines, 1):
        excuse = EXCUSE.search(text)
        if excuse and not excuse["reason"]:
            found.add(Finding(number, "excuse", "NOLINT(msvc) without a reason; write: // NOLINT(msvc): the reason"))
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


def main(words: list[str]) -> int:
    sources = (path for path in (ROOT / "csrc").rglob("*") if path.suffix in SUFFIXES)
    files = [Path(word) for word in words] or sorted(path for path in sources if LINUX_ONLY not in path.parents)
    contents = {file: file.read_bytes().decode("utf-8", "surrogateescape") for file in files}
    variants = {name for raw in contents.values() for name in instantiated_templates(blanked(raw, strings=True))}
    count = 0
    for file, raw in contents.items():
        for finding in lint(file.as_posix(), raw, variants):
            shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
            print(f"{shown}:{finding.line}: [{finding.rule}] {finding.message}")
            count += 1
    print(f"lint_msvc: {len(files)} files, {count} findings")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
